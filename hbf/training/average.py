"""A moving average of the parameters. It does not influence training, and is evaluated like the parameters."""

import jax.numpy as jnp
import optax

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.training.state import Step, TrainState


def with_average(state: TrainState, decay: float) -> TrainState:
  """Return the state with an average that begins as its parameters. If the decay is 0, return the state itself.

  Run this inside jit if a step later donates the state. Outside jit, parameters and average would share memory.
  """
  return state.replace(average=state.params) if decay else state


def averaging(step: Step, decay: float) -> Step:
  """Return the step, followed by an update of the average. If the decay is 0, return the step itself.

  average ← d · average + (1 − d) · parameters, where after t steps d = min(decay, (1 + t) / (10 + t)). A small d at
  the beginning lets short runs forget their initial parameters too. TensorFlow's tf.train.ExponentialMovingAverage
  does the same with `num_updates` = t.

  Args:
    step: a step of `hbf.training.state.make_train_step`.
    decay: a number from 0 to below 1.
  """
  if not decay:
    return step

  def averaged(state: TrainState, resident: Resident, batch: Batch) -> TrainState:
    new = step(state, resident, batch)
    rest = jnp.maximum(1 - decay, 9 / (10 + new.step))  # 1 − d
    return new.replace(average=optax.incremental_update(new.params, state.average, rest))

  return averaged
