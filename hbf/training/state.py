"""Everything a run has to remember, and the step that changes it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.ops.parts import split
from hbf.tasks.task import ModelBatch, Task
from hbf.training.schema import with_gone


class Totals(flax.struct.PyTreeNode):
  """Sums since the last report; part of the state, so that a report doesn't change if the run was interrupted."""

  loss: jax.Array
  correct: jax.Array
  gradient_norm: jax.Array
  steps: jax.Array

  @classmethod
  def zeros(cls) -> 'Totals':
    """Totals of no steps."""
    return cls(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros((), jnp.int32))


class TrainState(flax.struct.PyTreeNode):
  """The whole state of a run: data order and random keys are functions of the seed and the step.

  Its average is that of the parameters, see `hbf.training.average`; None where there is none.
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  totals: Totals
  average: Any = None


Step = Callable[[TrainState, Resident, Batch], TrainState]


def former_state(optimizer: optax.GradientTransformation, state: TrainState) -> TrainState | None:
  """Return shapes of the state as older code had it; if no parameter of the network is gone, return None."""
  params = with_gone(state.params)
  if params is None:
    return None
  average = None if state.average is None else params
  return state.replace(params=params, opt_state=jax.eval_shape(optimizer.init, params), average=average)


@dataclasses.dataclass(frozen=True)
class Objective:
  """What a step minimizes, and how.

  Attributes:
    task: with all that is measured.
    accumulate: parts of the batch whose gradients are computed one after another.
    seed: of all that is drawn.
  """

  task: Task
  accumulate: int
  seed: int


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  resident: Resident,
  batch: Batch,
  given: Mapping[str, Any] | None = None,
) -> TrainState:
  """The state before the first step. Run it inside jit.

  Fresh parameters may depend on the batch (centers, gains); `given` ones, by their first name, take their place.
  """
  inputs = objective.task.eval_batch(resident, batch).inputs
  params = model.init(jax.random.key(objective.seed), inputs, train=False)['params'] | (given or {})
  return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), Totals.zeros())


def make_train_step(model: nn.Module, optimizer: optax.GradientTransformation, objective: Objective) -> Step:
  """A pure function (state, resident, batch) → state; `resident` and `batch` as in `hbf.data.pipeline.inputs`."""

  def loss(params: Any, seen: ModelBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.asarray(model.apply({'params': params}, seen.inputs, train=True, rngs={'dropout': key}))
    return objective.task.loss(logits, seen.targets)

  def train_step(state: TrainState, resident: Resident, batch: Batch) -> TrainState:
    key = jax.random.fold_in(jax.random.key(objective.seed), state.step)
    own_key, dropout_key, common_key = jax.random.split(key, 3)
    seen = objective.task.train_batch((own_key, common_key), resident, batch | {'step': state.step})
    gradient = _accumulated(jax.value_and_grad(loss, has_aux=True), objective.accumulate)
    (value, correct), grads = gradient(state.params, seen, dropout_key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    totals = Totals(
      loss=state.totals.loss + value,
      correct=state.totals.correct + correct,
      gradient_norm=state.totals.gradient_norm + optax.tree.norm(grads),
      steps=state.totals.steps + 1,
    )
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, totals)

  return train_step


def several(train_step: Step) -> Callable[[TrainState, Resident, Batch, jax.Array], tuple[TrainState, jax.Array]]:
  """Several steps in one call: (state, resident, stack, count) → the state after `count` batches, and its step.

  The count isn't compiled in: whatever it is, the very same program takes a step, and so the same numbers come out.
  The step comes a second time, for the host to wait for after the state has been given to the next call.
  """

  def train_steps(
    state: TrainState, resident: Resident, stack: Batch, count: jax.Array
  ) -> tuple[TrainState, jax.Array]:
    def body(i: jax.Array, state: TrainState) -> TrainState:
      return train_step(state, resident, jax.tree.map(lambda z: z[i], stack))

    state = jax.lax.fori_loop(0, count, body, state)
    return state, state.step

  return train_steps


@jax.jit
def all_finite(tree: Any) -> jax.Array:
  """Whether no number in the tree is NaN or infinite."""
  return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def _accumulated(gradient: Callable, parts: int) -> Callable:
  """`gradient` over `parts` parts of the batch one after another: mean loss and gradients, summed counts."""
  if parts == 1:
    return gradient

  def accumulated(params: Any, seen: ModelBatch, key: jax.Array) -> Any:
    def add(sums: Any, part: Any) -> tuple[Any, None]:
      return jax.tree.map(jnp.add, sums, gradient(params, *part)), None

    inputs = (jax.tree.map(lambda z: split(z, parts, axis=0), seen), jax.random.split(key, parts))
    first = jax.tree.map(lambda z: z[0], inputs)
    zeros = jax.tree.map(lambda z: jnp.zeros(z.shape, z.dtype), jax.eval_shape(gradient, params, *first))
    ((value, correct), grads), _ = jax.lax.scan(add, zeros, inputs)
    return (value / parts, correct), jax.tree.map(lambda z: z / parts, grads)

  return accumulated
