"""The evaluation of a model on every example of a split, exactly once."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hbf.data.augment.copies import Copies
from hbf.data.pipeline.inputs import Batch, Input, Resident
from hbf.data.pipeline.order import EvalOrder
from hbf.tasks.task import Task

_REAL = 'real'  # True for a row that holds an example, False for padding


class SplitResult(NamedTuple):
  """The evaluation of one set of parameters on a split.

  Attributes:
    summary: the scores, see `hbf.tasks.task.TaskScores.summarize`.
    per_example: arrays [n, …] by name, such as `predictions`, with a row for each example, in the order of the split.
    counts: the counts that `hbf.tasks.task.TaskScores.add_counts` has added up over the split.
  """

  summary: dict[str, Any]
  per_example: dict[str, np.ndarray]
  counts: Any


class Interrupted(Exception):
  """An evaluation was stopped before its last batch."""


class Evaluator:
  """A function that evaluates parameters on splits. It is compiled once for all splits of the same shapes.

  Attributes:
    batch_size: the largest number of examples in a step.
    step: the jitted step (counts, variables, resident, batch) → (counts, per-example arrays by name). Its `variables`
      are {'params': parameters}, and `resident` is the attribute `Input.resident` of the split.
  """

  def __init__(
    self, task: Task, model: nn.Module, batch_size: int, replicated: NamedSharding, copies: Copies | None = None
  ):
    """Make the jitted step.

    Args:
      task: the task, made from a config with all measured values (`TaskData.measure`).
      model: a network of the task.
      batch_size: the largest number of examples in a step, a multiple of the number of devices. The last batch is
        padded and masked.
      replicated: the sharding of arrays that every device holds.
      copies: a function that makes changed copies of the inputs. The outputs for the copies are averaged. None: no
        copies.
    """
    self.batch_size = batch_size
    self._task = task
    self._mesh = replicated.mesh
    self._replicated = replicated
    self._zeros = jax.jit(task.empty_counts, out_shardings=replicated)

    def outputs(variables: Any, inputs: jax.Array) -> jax.Array:
      return jnp.asarray(model.apply(variables, inputs, train=False))

    def averaged(variables: Any, inputs: jax.Array) -> jax.Array:
      if copies is None:
        return outputs(variables, inputs)
      variants, weights = copies(inputs)
      # One copy after another: a batch takes no more memory, and the network is compiled once.
      found = jax.lax.map(lambda z: outputs(variables, z), variants)
      return jnp.sum(weights.reshape(-1, *[1] * (found.ndim - 1)) * found, axis=0)

    def step(counts: Any, variables: Any, resident: Resident, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
      model_batch = task.eval_batch(resident, batch)
      logits = averaged(variables, model_batch.inputs)
      counts, per_example = task.add_counts(counts, logits, model_batch.targets)
      return counts, {**per_example, _REAL: batch['index'] >= 0}

    self.step = jax.jit(step, donate_argnums=0, out_shardings=replicated)
    self._compiled: dict[int, Callable[..., Any]] = {}  # by the number of examples of a split

  def compile(self, params: Any, examples: int, resident: Resident, batch: Batch) -> None:
    """Compile the step for a split before its examples are needed, so that a mistake shows early.

    Args:
      params: the shapes of the parameters, with their shardings.
      examples: the number of examples of the split.
      resident: the shapes of the split's attribute `Input.resident`, with their shardings.
      batch: the shapes of a batch of `rows(examples)` examples, with their shardings.
    """
    counts = jax.tree.map(
      lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=self._replicated), jax.eval_shape(self._zeros)
    )
    with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
      self._compiled[examples] = self.step.lower(counts, {'params': params}, resident, batch).compile()

  def rows(self, examples: int) -> int:
    """Return the batch size for a split of `examples` examples. It is less than `batch_size` for a small split."""
    devices = self._mesh.size
    return min(self.batch_size, -(-examples // devices) * devices)

  def __call__(self, params: Any, split: Input, stopped: Callable[[], bool] = lambda: False) -> SplitResult:
    """Evaluate parameters on a split.

    Args:
      params: the parameters of the model.
      split: the examples, each of which is evaluated once.
      stopped: a function that is called before every batch. The evaluation ends if it returns True.

    Raises:
      Interrupted: `stopped` returned True.
    """
    order = EvalOrder(len(split), self.rows(len(split)))
    step = self._compiled.get(len(split), self.step)
    counts, rows = self._zeros(), list[dict[str, jax.Array]]()
    with contextlib.closing(split.batches(order, 0, len(order))) as batches:
      for batch in batches:
        if stopped():
          raise Interrupted
        with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
          counts, per_row = step(counts, {'params': params}, split.resident, batch)
        jax.block_until_ready(rows[-1:])  # at most one batch waits behind the running one
        rows.append(per_row)
    fetched = jax.device_get(rows)
    values = {name: np.concatenate([row[name] for row in fetched]) for name in fetched[0]}
    real = values.pop(_REAL)
    per_example = {name: column[real] for name, column in values.items()}
    return SplitResult(self._task.summarize(counts, per_example), per_example, counts)
