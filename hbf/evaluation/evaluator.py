"""Runs a model over every example of a split, exactly once."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hbf.data.augment import normalise
from hbf.data.inputs import Batch, Input, Resident, gather
from hbf.data.order import EvalOrder
from hbf.evaluation.metrics import Counts, summarise
from hbf.models.classifier import ImageClassifier


class Evaluated(NamedTuple):
  """What is known of a split after a pass over it.

  Attributes:
    summary: figures, see `hbf.evaluation.metrics.summarise`.
    labels: int32 [n], of every example of the split, in its order.
    predictions: int32 [n].
  """

  summary: dict[str, Any]
  labels: np.ndarray
  predictions: np.ndarray


class Interrupted(Exception):
  """A pass over a split was stopped before its end."""


class Evaluator:
  """Evaluates parameters on splits; compiles once for all splits of a kind.

  Attributes:
    batch_size: of a step.
    step: (counts, variables, resident, batch) → (counts, [label, prediction, mask] of each row), jitted.
  """

  def __init__(
    self,
    model: ImageClassifier,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int,
    replicated: NamedSharding,
  ):
    """Makes the step.

    Args:
      model: as built by `hbf.models.build.build_model`.
      mean: of the channels, in 0..1.
      std: likewise.
      batch_size: divisible by the number of devices; the last batch is padded and masked.
      replicated: sharding of arrays that every device holds.
    """
    self.batch_size = batch_size
    self._mesh = replicated.mesh
    self._zeros = jax.jit(lambda: Counts.zeros(model.classes), out_shardings=replicated)

    def step(counts: Counts, variables: Any, resident: Resident, batch: Batch) -> tuple[Counts, jax.Array]:
      examples = gather(resident, batch)
      logits = jnp.asarray(model.apply(variables, normalise(examples['image'], mean, std), train=False))
      shown = jnp.stack([examples['label'], jnp.argmax(logits, axis=-1), examples['mask']])
      return counts.add(logits, examples['label'], examples['mask']), shown.astype(jnp.int32)

    self.step = jax.jit(step, donate_argnums=0, out_shardings=replicated)

  def __call__(self, params: Any, split: Input, stopped: Callable[[], bool] = lambda: False) -> Evaluated:
    """Figures and predictions of the split.

    Args:
      params: of the model.
      split: all of whose examples are taken.
      stopped: asked before every batch.

    Raises:
      Interrupted: it was true.
    """
    order = EvalOrder(len(split), self.batch_size)
    counts, shown = self._zeros(), list[jax.Array]()
    with contextlib.closing(split.batches(order, 0, len(order))) as batches:
      for batch in batches:
        if stopped():
          raise Interrupted
        with jax.set_mesh(self._mesh):  # type: ignore[arg-type]  # not an abstract one
          counts, of_batch = self.step(counts, {'params': params}, split.resident, batch)
        jax.block_until_ready(shown[-1:])  # one batch ahead, as in training
        shown.append(of_batch)
    labels, predictions, mask = np.concatenate(jax.device_get(shown), axis=1)
    return Evaluated(summarise(counts), labels[mask == 1], predictions[mask == 1])
