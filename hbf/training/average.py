"""An average of the parameters. It does not influence training, and is evaluated like the parameters.

It is a moving average with the decay `train.average`. Optimizer schedule_free computes an average of its own, which
takes the place of the moving average.
"""

import jax.numpy as jnp
import optax
import optax.contrib
from ml_collections import ConfigDict

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.errors import UserError
from hbf.training.state import Step, TrainState


def check_average(config: ConfigDict) -> None:
  """Check the config keys that belong to the average.

  Raises:
    UserError: the config asks for a moving average in addition to the average of optimizer schedule_free. Or
      the checkpoints are to be ranked by the scores of an average, but the run keeps no average.
  """
  if config.train.average and config.optimizer.name == 'schedule_free':
    raise UserError(
      f'optimizer schedule_free keeps an average of its own, and train.average is {config.train.average}: set it to 0'
    )
  if config.checkpoint.rank == 'average' and not _is_averaged(config):
    raise UserError(
      'checkpoint.rank is average, and train.average is 0: set train.average, such as 0.999, or checkpoint.rank to '
      'parameters'
    )


def with_average(state: TrainState, config: ConfigDict) -> TrainState:
  """Return the state with an average that equals the parameters, or the state itself if the run keeps no average.

  Call this function inside jit if a step later donates the state. Outside jit, parameters and average would share
  memory, which cannot be donated twice.
  """
  return state.replace(average=state.params) if _is_averaged(config) else state


def averaging(step: Step, config: ConfigDict) -> Step:
  """Return a step function that also updates the average. If the run keeps no average, return `step` itself.

  After step t the update is average ← d_t · average + (1 − d_t) · parameters. The decay is d_t = min(d, (1 + t) / (10
  + t)), with d = `train.average`. The decay is small at the beginning, so that even in a short run the average
  forgets the initial parameters. This is TensorFlow's tf.train.ExponentialMovingAverage with `num_updates` = t. With
  optimizer schedule_free, the average is the one that this optimizer computes.

  Args:
    step: the step function, from `hbf.training.state.make_train_step`.
    config: the config of the run.
  """
  if not _is_averaged(config):
    return step
  decay = config.train.average

  def averaged(state: TrainState, resident: Resident, batch: Batch) -> TrainState:
    new = step(state, resident, batch)
    if config.optimizer.name == 'schedule_free':
      return new.replace(average=optax.contrib.schedule_free_eval_params(new.opt_state, new.params))
    rest = jnp.maximum(1 - decay, 9 / (10 + new.step))  # 1 − d_t
    return new.replace(average=optax.incremental_update(new.params, state.average, rest))

  return averaged


def _is_averaged(config: ConfigDict) -> bool:
  return bool(config.train.average) or config.optimizer.name == 'schedule_free'
