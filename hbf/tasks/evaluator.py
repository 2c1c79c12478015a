"""Runs a model over every example of a split, exactly once."""

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

_REAL = 'real'  # of each row, whether it is no padding


class Evaluated(NamedTuple):
  """What is known of a split after a pass over it.

  Attributes:
    summary: figures, see `hbf.tasks.task.Task.summarize`.
    kept: what the task keeps of every example of the split, in its order, by name [n].
    counts: that the summary is of; `hbf.tasks.task.Task.detail` says more of them.
  """

  summary: dict[str, Any]
  kept: dict[str, np.ndarray]
  counts: Any


class Interrupted(Exception):
  """A pass over a split was stopped before its end."""


class Evaluator:
  """Evaluates parameters on splits; compiles once for all splits of a kind.

  Attributes:
    batch_size: of a step, at most.
    step: (counts, variables, resident, batch) → (counts, what is kept of each row), jitted.
  """

  def __init__(
    self, task: Task, model: nn.Module, batch_size: int, replicated: NamedSharding, copies: Copies | None = None
  ):
    """Make the step.

    Args:
      task: with all that is measured.
      model: a network of it.
      batch_size: divisible by the number of devices; the last batch is padded and masked.
      replicated: sharding of arrays that every device holds.
      copies: of the inputs, whose outputs are averaged; None: the inputs alone are evaluated.
    """
    self.batch_size = batch_size
    self._task = task
    self._mesh = replicated.mesh
    self._zeros = jax.jit(task.zeros, out_shardings=replicated)

    def outputs(variables: Any, inputs: jax.Array) -> jax.Array:
      return jnp.asarray(model.apply(variables, inputs, train=False))

    def averaged(variables: Any, inputs: jax.Array) -> jax.Array:
      if copies is None:
        return outputs(variables, inputs)
      variants, weights = copies(inputs)
      # One after another: a batch takes no more memory, and the network is compiled once.
      found = jax.lax.map(lambda z: outputs(variables, z), variants)
      return jnp.sum(weights.reshape(-1, *[1] * (found.ndim - 1)) * found, axis=0)

    def step(counts: Any, variables: Any, resident: Resident, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
      seen = task.eval_batch(resident, batch)
      counts, kept = task.count(counts, averaged(variables, seen.inputs), seen.targets)
      return counts, {**kept, _REAL: batch['index'] >= 0}

    self.step = jax.jit(step, donate_argnums=0, out_shardings=replicated)

  def rows(self, examples: int) -> int:
    """Return the batch size for a split of so many examples; a larger batch would hold padding alone."""
    devices = self._mesh.size
    return min(self.batch_size, -(-examples // devices) * devices)

  def __call__(self, params: Any, split: Input, stopped: Callable[[], bool] = lambda: False) -> Evaluated:
    """Return figures and predictions of the split.

    Args:
      params: of the model.
      split: all of whose examples are taken.
      stopped: asked before every batch.

    Raises:
      Interrupted: it was true.
    """
    order = EvalOrder(len(split), self.rows(len(split)))
    counts, rows = self._zeros(), list[dict[str, jax.Array]]()
    with contextlib.closing(split.batches(order, 0, len(order))) as batches:
      for batch in batches:
        if stopped():
          raise Interrupted
        with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
          counts, of_batch = self.step(counts, {'params': params}, split.resident, batch)
        jax.block_until_ready(rows[-1:])  # one batch ahead, as in training
        rows.append(of_batch)
    found = {name: np.concatenate(of_batches) for name, of_batches in _by_name(jax.device_get(rows)).items()}
    real = found.pop(_REAL)
    return Evaluated(self._task.summarize(counts), {name: kept[real] for name, kept in found.items()}, counts)


def _by_name(rows: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
  return {name: [row[name] for row in rows] for name in rows[0]}
