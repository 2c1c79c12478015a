"""A moving average of the parameters, kept beside them: it learns nothing, and is evaluated as they are."""

import jax.numpy as jnp
import optax

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.training.state import Step, TrainState


def with_average(state: TrainState, decay: float) -> TrainState:
  """The state with an average that begins as its parameters; as it is if the decay is 0.

  Run it inside jit if a step is to take the state's memory: what comes out of one lies in memory of its own.
  """
  return state.replace(average=state.params) if decay else state


def averaging(step: Step, decay: float) -> Step:
  """The step, followed by one of the average; the step itself if the decay is 0.

  average ← d · average + (1 − d) · parameters, where after t steps d = min(decay, (1 + t) / (10 + t)). So it forgets
  where it began in a short run too: TensorFlow's tf.train.ExponentialMovingAverage with `num_updates` = t.

  Args:
    step: as made by `hbf.training.state.make_train_step`.
    decay: from 0 to below 1.
  """
  if not decay:
    return step

  def averaged(state: TrainState, resident: Resident, batch: Batch) -> TrainState:
    new = step(state, resident, batch)
    rest = jnp.maximum(1 - decay, 9 / (10 + new.step))  # 1 − d
    return new.replace(average=optax.incremental_update(new.params, state.average, rest))

  return averaged
