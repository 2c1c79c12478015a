"""Schedule plateau: the learning rate falls whenever the score on held-out data has stopped improving.

The optimizer's state has a factor that multiplies the learning rate. After each evaluation, the factor is computed
anew from all scores of the run, so a continued run has the same factor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hbf.evaluation.scores import Score
from hbf.training.sharding import replicated
from hbf.training.state import TrainState


class PlateauState(NamedTuple):
  """The state of `scale_by_plateau`: the factor on the learning rate."""

  plateau_scale: jax.Array


def scale_by_plateau() -> optax.GradientTransformation:
  """Return a transformation that multiplies the updates by a factor, which only `with_plateau_scale` changes."""

  def init(params: optax.Params) -> PlateauState:
    del params
    return PlateauState(jnp.ones(()))

  def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, PlateauState]:
    del params
    return jax.tree.map(lambda z: z * state.plateau_scale.astype(z.dtype), updates), state

  return optax.GradientTransformation(init, update)


def plateau_scale(values: Sequence[float], score: Score, *, patience: int, factor: float, minimum: float) -> float:
  """Return the factor on the learning rate after some evaluations.

  It is 1 at first. After `patience` consecutive evaluations without a new best score, it is multiplied by `factor`.
  The count then begins anew. `optax.contrib.reduce_on_plateau` does the same, but wants a value in each step.

  Args:
    values: the scores of all evaluations so far.
    score: the kind of score.
    patience: the key `optimizer.plateau_patience`.
    factor: the key `optimizer.plateau_factor`.
    minimum: the least result, `optimizer.minimum_rate`: the minimum learning rate as a fraction of the peak.
  """
  best, waited, scale = None, 0, 1.0
  for value in values:
    if best is None or (value != best and score.better(value, best) == value):
      best, waited = value, 0
    else:
      waited += 1
    if waited == patience:
      scale, waited = scale * factor, 0
  return max(scale, minimum)


def scale_of(state: TrainState) -> jax.Array:
  """Return the factor on the learning rate that a state holds."""
  return optax.tree.get(state.opt_state, 'plateau_scale')


def with_plateau_scale(state: TrainState, scale: float, mesh: Mesh) -> TrainState:
  """Return the state with `scale` as the factor on the learning rate, on all devices of the mesh."""
  # A program makes the array: with several processes, `device_put` would compare their values.
  made = jax.jit(jnp.asarray, out_shardings=replicated(mesh))(np.float32(scale))
  return state.replace(opt_state=optax.tree.set(state.opt_state, plateau_scale=made))
