"""Steps that are skipped because a number is not finite, such as after an overflow of the loss."""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.training.state import Skips, Step, TrainState, all_finite


def with_skips(state: TrainState, config: ConfigDict) -> TrainState:
  """Return the state with counts of skipped steps, all 0. If no step may be skipped, return the state itself."""
  if not config.optimizer.skip:
    return state
  return state.replace(skips=Skips(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)))


def skipping(step: Step, config: ConfigDict) -> Step:
  """Return a step function that leaves the state as it was if the new state has a number that is not finite.

  Up to `optimizer.skip` consecutive steps are skipped. A skipped step still counts as a step of the run, so that the
  next batch is another one. Its loss is not in the totals, and the schedule of the learning rate does not go on.
  After `optimizer.skip` skipped steps in a row, the next step is taken in any case. If its new state is
  not finite either, the run ends as diverged.

  Args:
    step: a step function, from `hbf.training.average.averaging`.
    config: the config of the run. If `optimizer.skip` is 0, `step` itself is returned.
  """
  # `optax.apply_if_finite` looks at the gradient only. An overflow inside the optimizer would stay in its moments.
  limit = config.optimizer.skip
  if not limit:
    return step

  def skipped(state: TrainState, resident: Resident, batch: Batch) -> TrainState:
    skips, old = state.skips, state.replace(skips=None)
    assert skips is not None
    new = step(old, resident, batch)
    consecutive = jnp.where(all_finite(new), 0, skips.consecutive + 1)
    skip = (consecutive > 0) & (consecutive <= limit)
    kept = jax.tree.map(lambda before, after: jnp.where(skip, before, after), old, new)
    return kept.replace(step=new.step, skips=Skips(consecutive, skips.total + skip))

  return skipped
