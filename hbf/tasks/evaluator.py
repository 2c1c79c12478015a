"""The evaluation of a model on every example of a split, exactly once."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hbf.data.augment.copies import Copies
from hbf.data.pipeline.inputs import Batch, Input, Resident
from hbf.data.pipeline.order import EvalOrder
from hbf.tasks.task import ModelBatch, Task

_REAL = 'real'  # the name of `Rows.real` among the arrays of a step


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


class Rows(NamedTuple):
  """The rows of a batch for an evaluation step.

  Attributes:
    batch: the inputs of the network, and the targets.
    real: bool [B], True for a row that holds an example, False for padding.
  """

  batch: ModelBatch
  real: jax.Array


class Evaluator:
  """A function that evaluates parameters on splits. The network is compiled once for all splits.

  Attributes:
    batch_size: the number of rows in a step.
  """

  def __init__(
    self, task: Task, model: nn.Module, batch_size: int, sharding: NamedSharding, copies: Copies | None = None
  ):
    """Make the jitted functions.

    Args:
      task: the task, made from a config with all measured values (`TaskData.measure`).
      model: a network of the task.
      batch_size: the number of rows in a step, a multiple of the number of shards. The last batch is padded and
        masked.
      sharding: the sharding of batches.
      copies: a function that makes changed copies of the inputs. The outputs for the copies are averaged. None: no
        copies.
    """
    self.batch_size = batch_size
    self._task = task
    self._mesh = sharding.mesh
    self._sharding, self._replicated = sharding, NamedSharding(sharding.mesh, PartitionSpec())
    replicated = self._replicated
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

    def step(counts: Any, variables: Any, rows: Rows) -> tuple[Any, dict[str, jax.Array]]:
      logits = averaged(variables, rows.batch.inputs)
      counts, per_example = task.add_counts(counts, logits, rows.batch.targets)
      return counts, {**per_example, _REAL: rows.real}

    def rows_of(resident: Resident, batch: Batch) -> Rows:
      return Rows(task.eval_batch(resident, batch), batch['index'] >= 0)

    self._step = jax.jit(step, donate_argnums=0, out_shardings=replicated)
    # A program of its own: it depends on the size of the split.
    self._rows_of = jax.jit(rows_of, out_shardings=sharding)
    self._compiled: Callable[..., Any] | None = None

  def trace(self, params: Any, resident: Resident, batch: Batch) -> Any:
    """Return the traced step. The arguments are only shapes with shardings.

    Args:
      params: the parameters.
      resident: what `TaskData.abstract_inputs` returns first, for any split.
      batch: what it returns second, for `batch_size` rows.
    """
    counts = _placed(jax.eval_shape(self._zeros), self._replicated)
    with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
      rows = _placed(jax.eval_shape(self._rows_of, resident, batch), self._sharding)
      return self._step.trace(counts, {'params': params}, rows)

  def compile(self, params: Any, resident: Resident, batch: Batch) -> None:
    """Compile the step before it is needed, so that a mistake shows early. Arguments as for `trace`."""
    self._compiled = self.trace(params, resident, batch).lower().compile()

  def __call__(self, params: Any, split: Input, stopped: Callable[[], bool] = lambda: False) -> SplitResult:
    """Evaluate parameters on a split.

    Args:
      params: the parameters of the model.
      split: the examples, each of which is evaluated once.
      stopped: a function that is called before every batch. The evaluation ends if it returns True.

    Raises:
      Interrupted: `stopped` returned True.
    """
    order, step = EvalOrder(len(split), self.batch_size), self._compiled or self._step
    counts, rows = self._zeros(), list[dict[str, jax.Array]]()
    with contextlib.closing(split.batches(order, 0, len(order))) as batches:
      for batch in batches:
        if stopped():
          raise Interrupted
        with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
          counts, per_row = step(counts, {'params': params}, self._rows_of(split.resident, batch))
        jax.block_until_ready(rows[-1:])  # at most one batch waits behind the running one
        rows.append(per_row)
    fetched = jax.device_get(rows)
    values = {name: np.concatenate([row[name] for row in fetched]) for name in fetched[0]}
    real = values.pop(_REAL)
    per_example = {name: column[real] for name, column in values.items()}
    return SplitResult(self._task.summarize(counts, per_example), per_example, counts)


def _placed(tree: Any, sharding: NamedSharding) -> Any:
  """Return the shapes in a tree with this sharding."""
  return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=sharding), tree)
