"""The state of a run, and the step that changes it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.data.pipeline.order import step_keys
from hbf.errors import UserError
from hbf.ops.parts import split
from hbf.tasks.task import ModelBatch, Task, TaskLoss
from hbf.training.distillation import Distillation, WithTeacher
from hbf.training.on_host import on_host
from hbf.training.schema import with_gone


class Totals(flax.struct.PyTreeNode):
  """Sums over the steps since the last report.

  The sums are saved with the state, so that a report is the same if the run is interrupted.

  Attributes:
    loss: sum of the losses of the batches.
    correct: number of correct predictions.
    gradient_norm: sum of the norms of the gradients.
    steps: number of steps.
  """

  loss: jax.Array
  correct: jax.Array
  gradient_norm: jax.Array
  steps: jax.Array

  @classmethod
  def zeros(cls) -> 'Totals':
    """Return totals of 0."""
    return cls(jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros((), jnp.int32))


def training_means(task: TaskLoss, totals: Totals, examples: float) -> dict[str, float]:
  """Return scores by name: the mean loss and, if the task counts correct predictions, their percentage.

  Args:
    task: the task of the run.
    totals: the sums, fetched from the devices.
    examples: number of examples in the steps that the sums cover. NaN if there was no step.
  """
  loss = {task.loss_score.name: float(totals.loss) / (int(totals.steps) or float('nan'))}
  if task.training_score is None:
    return loss
  return {**loss, task.training_score.name: 100 * int(totals.correct) / (examples * task.predictions)}


class Skips(flax.struct.PyTreeNode):
  """Counts of skipped steps (`hbf.training.skipping`).

  Attributes:
    consecutive: number of the latest steps in a row whose new state was not finite.
    total: number of skipped steps of the run.
  """

  consecutive: jax.Array
  total: jax.Array


class GradientNorms(flax.struct.PyTreeNode):
  """Squared norms of gradients, for the gradient noise scale (`hbf.training.noise`).

  Attributes:
    small: mean of the squared norms of the gradients of the parts of a batch.
    big: squared norm of the gradient of the whole batch.
  """

  small: jax.Array
  big: jax.Array

  @classmethod
  def zeros(cls) -> 'GradientNorms':
    """Return norms of 0."""
    return cls(jnp.zeros(()), jnp.zeros(()))


class TrainState(flax.struct.PyTreeNode):
  """The whole state of a run. The seed and the step determine the order of the data and the random keys.

  `average` is the moving average of the parameters (`hbf.training.average`), or None if the run keeps none. `skips`
  counts skipped steps, or is None if no step may be skipped. `norms` has sums of squared norms over the steps since
  the last report, or is None if the gradient noise scale is not logged.
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  totals: Totals
  average: Any = None
  skips: Skips | None = None
  norms: GradientNorms | None = None


Step = Callable[[TrainState, Resident, Batch], TrainState]


def former_state(optimizer: optax.GradientTransformation, state: TrainState) -> TrainState | None:
  """Return the shapes of the state in older code, which had more parameters (`hbf.training.schema.GONE`).

  Return None if older code had no other parameters in this network.
  """
  params = with_gone(state.params)
  if params is None:
    return None
  average = None if state.average is None else params
  return state.replace(params=params, opt_state=jax.eval_shape(optimizer.init, params), average=average)


@dataclasses.dataclass(frozen=True)
class Objective:
  """The function that a step minimizes, with the settings for its gradient.

  Attributes:
    task: the task, made from a config with all measured values (`TaskData.measure`).
    accumulate: the number of parts into which a batch is split. The gradients of the parts are computed one after
      another.
    seed: the seed of all random numbers.
    distillation: the loss of distillation. None: there is no teacher.
    radius: the radius ρ of SAM (`sharpness_aware`). 0: the gradient is the usual one.
    norms: True if the state sums squared norms of gradients. Then `accumulate` is more than 1.
  """

  task: Task
  accumulate: int
  seed: int
  distillation: Distillation | None = None
  radius: float = 0.0
  norms: bool = False


def init_state(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  resident: Resident,
  batch: Batch,
  given: Mapping[str, Any] | None = None,
) -> TrainState:
  """Return the state before the first step. Call this function inside jit.

  Some initial parameters, such as centers and gains, may depend on the batch.

  Args:
    model: the network.
    optimizer: the gradient transformation.
    objective: the objective of the run, with its task and its seed.
    resident: the arrays that stay in device memory.
    batch: the first batch.
    given: parameters to take in place of random ones: a dict from a name at the top of the parameters, such as
      'block0', to its subtree. None: all parameters are random.
  """
  inputs = objective.task.eval_batch(resident, batch).inputs
  params = model.init(jax.random.key(objective.seed), inputs, train=False)['params'] | (given or {})
  return fresh_state(params, optimizer, objective)


def fresh_state(params: Any, optimizer: optax.GradientTransformation, objective: Objective) -> TrainState:
  """Return the state of a run before its first step, with these parameters and sums of 0."""
  norms = GradientNorms.zeros() if objective.norms else None
  return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), Totals.zeros(), norms=norms)


def make_train_step(model: nn.Module, optimizer: optax.GradientTransformation, objective: Objective) -> Step:
  """Return the pure function of a training step: (state, resident, batch) → state.

  `resident` and `batch` are as in `hbf.data.pipeline.inputs`. If the objective has a teacher, `resident` is a
  `WithTeacher`.
  """
  task, distillation = objective.task, objective.distillation

  def loss(teacher: Any, params: Any, batch: ModelBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.asarray(model.apply({'params': params}, batch.inputs, train=True, rngs={'dropout': key}))
    value, correct = task.loss(logits, batch.targets)
    return distillation.loss(task, teacher, batch, logits, value) if distillation else value, correct

  def train_step(state: TrainState, resident: Resident | WithTeacher, batch: Batch) -> TrainState:
    data, teacher = resident if distillation else (resident, None)
    batch_keys, dropout_key = step_keys(objective.seed, state.step)
    with jax.named_scope('input'):
      model_batch = task.train_batch(batch_keys, data, batch | {'step': state.step})
    gradient = _accumulate(jax.value_and_grad(functools.partial(loss, teacher), has_aux=True), objective)
    if objective.radius:
      gradient = sharpness_aware(gradient, objective.radius)
    (value, correct, *norms), grads = gradient(state.params, model_batch, dropout_key)
    with jax.named_scope('optimizer'):
      updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    totals = Totals(
      loss=state.totals.loss + value,
      correct=state.totals.correct + correct,
      gradient_norm=state.totals.gradient_norm + optax.tree.norm(grads),
      steps=state.totals.steps + 1,
    )
    sums = jax.tree.map(jnp.add, state.norms, norms[0]) if norms else None
    return TrainState(state.step + 1, params, opt_state, totals, norms=sums)

  return train_step


def sharpness_aware(gradient: Callable, radius: float) -> Callable:
  """Return a function like `gradient` that computes the gradient of SAM in place of the usual one.

  `gradient` is a function (parameters, batch, key) → (values, gradient). The values are the loss and the number
  of correct predictions, and may include a `GradientNorms`.

  Let g be the usual gradient at the parameters w, and ρ the `radius`. The gradient of SAM is the gradient at
  w + ρ g / ‖g‖, with the same batch and the same dropout. The returned values are those at w.

  References: Foret et al. 2021, "Sharpness-aware minimization for efficiently improving generalization", eqs. 2, 3.
  """

  def perturbed(params: Any, *arguments: Any) -> Any:
    result, grads = gradient(params, *arguments)
    norm = optax.tree.norm(grads)
    scale = radius / jnp.where(norm == 0, 1.0, norm)
    _, grads = gradient(jax.tree.map(lambda w, g: w + scale * g, params, grads), *arguments)
    return result, grads

  return perturbed


def repeat_step(train_step: Step) -> Callable[[TrainState, Resident, Batch, jax.Array], tuple[TrainState, jax.Array]]:
  """Return a function that takes several steps in one call: (state, resident, stack, count) → (state, step).

  `stack` has at least `count` batches. `count` is an argument of the compiled program, so one program serves every
  count. The number of steps in a call does not change the bits of the state. The second result is the number of steps
  taken so far. The host waits for this number to know that the call has ended, because the state itself may already
  be donated to the next call.
  """

  def train_steps(
    state: TrainState, resident: Resident, stack: Batch, count: jax.Array
  ) -> tuple[TrainState, jax.Array]:
    def body(i: jax.Array, state: TrainState) -> TrainState:
      return train_step(state, resident, jax.tree.map(lambda z: z[i], stack))

    state = jax.lax.fori_loop(0, count, body, state)
    return state, state.step

  return train_steps


class Diverged(UserError):
  """An error: the loss or a parameter is not finite."""


def check_finite(step: int, *values: float) -> None:
  """Raise Diverged unless all `values` are finite. The message names the step."""
  if not all(math.isfinite(value) for value in values):
    raise Diverged(
      f'training diverged: the loss or a parameter is not finite at step {step}. '
      'Checkpoints before it are intact; lower optimizer.learning_rate, or set optimizer.clip'
    )


def check_finite_state(step: int, state: TrainState) -> None:
  """Raise Diverged unless the loss, the parameters and their average are finite after a step."""
  leaves = jax.tree.leaves((state.params, state.average))
  here = [on_host(leaf) for leaf in leaves]
  large = [leaf for leaf, values in zip(leaves, here, strict=True) if values is None]
  finite = all(np.isfinite(values).all() for values in here if values is not None)
  finite = finite and (not large or bool(all_finite(large)))
  check_finite(step, float(state.totals.loss), 0.0 if finite else float('nan'))


@jax.jit
def all_finite(tree: Any) -> jax.Array:
  """Return True if every number in the tree is finite."""
  return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def _accumulate(gradient: Callable, objective: Objective) -> Callable:
  """Return a function like `gradient` that splits a batch into `objective.accumulate` parts.

  It works on one part after another. The losses and the gradients of the parts are averaged. The counts of correct
  predictions are added. If the objective asks for norms, the result is ((loss, count, `GradientNorms`), gradient).
  Else it is ((loss, count), gradient), as that of `gradient`.
  """
  parts = objective.accumulate
  if parts == 1:
    return gradient
  if objective.norms:
    gradient = _with_squared_norm(gradient)

  def accumulated(params: Any, batch: ModelBatch, key: jax.Array) -> Any:
    def add(sums: Any, part: Any) -> tuple[Any, None]:
      return jax.tree.map(jnp.add, sums, gradient(params, *part)), None

    inputs = (jax.tree.map(lambda z: split(z, parts, axis=0), batch), jax.random.split(key, parts))
    first = jax.tree.map(lambda z: z[0], inputs)
    zeros = jax.tree.map(lambda z: jnp.zeros(z.shape, z.dtype), jax.eval_shape(gradient, params, *first))
    ((value, correct, *squares), grads), _ = jax.lax.scan(add, zeros, inputs)
    value, grads = jax.tree.map(lambda z: z / parts, (value, grads))
    norms = [GradientNorms(square / parts, optax.tree.norm(grads, squared=True)) for square in squares]
    return (value, correct, *norms), grads

  return accumulated


def _with_squared_norm(gradient: Callable) -> Callable:
  """Return a function like `gradient`, with the result ((loss, count, squared norm of the gradient), gradient)."""

  def measured(*arguments: Any) -> Any:
    (value, correct), grads = gradient(*arguments)
    return (value, correct, optax.tree.norm(grads, squared=True)), grads

  return measured
