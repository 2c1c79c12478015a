"""Exact scores of a classifier over every example of a split."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation import exact
from hbf.evaluation.scores import ACCURACY, ECE, NLL, TOP5

CONFUSION_CLASSES = 1000  # most classes of a confusion matrix that is written: a million numbers
BINS = 15  # bins of confidence for the calibration error, as in Guo et al. 2017


class Counts(flax.struct.PyTreeNode):
  """Sums over the batches of a split.

  Attributes:
    confusion: int32 [C, C], number of examples by label and prediction.
    top5: int32, number of examples whose label is among the five largest logits, or all if there are at most 5
      classes.
    nll: float32 [2], summed negative log-likelihood in nats, and its rounding error.
    bin_examples: int32 [BINS], number of examples by confidence of the prediction, in equal bins of 0..1.
    bin_correct: int32 [BINS], number of correct predictions in each bin.
    bin_confidence: float32 [2, BINS], summed confidence in each bin, and its rounding error.
  """

  confusion: jax.Array
  top5: jax.Array
  nll: jax.Array
  bin_examples: jax.Array
  bin_correct: jax.Array
  bin_confidence: jax.Array

  @classmethod
  def zeros(cls, classes: int) -> 'Counts':
    """Return the counts of no examples."""
    # Every leaf is a separate array, because a step that gets the counts may reuse their memory.
    integers = ((classes, classes), (), (BINS,), (BINS,))
    confusion, top5, bin_examples, bin_correct = (jnp.zeros(shape, jnp.int32) for shape in integers)
    return cls(confusion, top5, jnp.zeros(2), bin_examples, bin_correct, jnp.zeros((2, BINS)))

  def add(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> 'Counts':
    """Add a batch.

    Args:
      logits: [B, C].
      labels: int32 [B].
      mask: booleans [B]. False for padding.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    predictions = jnp.argmax(logits, axis=-1)
    correct = (predictions == labels) & mask
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    confidence = jnp.exp(jnp.max(log_p, axis=-1))
    bins = jnp.clip(jnp.ceil(confidence * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
    nll = -jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    return Counts(
      confusion=self.confusion.at[labels, predictions].add(mask.astype(jnp.int32)),
      top5=self.top5 + jnp.sum((best == labels[:, None]).any(axis=-1) & mask, dtype=jnp.int32),
      nll=exact.add(self.nll, jnp.sum(nll, where=mask)),
      bin_examples=self.bin_examples.at[bins].add(mask.astype(jnp.int32)),
      bin_correct=self.bin_correct.at[bins].add(correct.astype(jnp.int32)),
      bin_confidence=exact.add(self.bin_confidence, jnp.zeros(BINS).at[bins].add(jnp.where(mask, confidence, 0.0))),
    )


def summarize(counts: Counts) -> dict[str, Any]:
  """Return the scores of a split: the integers n and correct, and the scores in `CLASSIFICATION`. nll is the mean."""
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll, bin_confidence = exact.value(c.nll), exact.value(c.bin_confidence)
  n, correct = int(c.confusion.sum()), int(np.trace(c.confusion))
  gaps = np.abs(c.bin_correct - bin_confidence)
  return {
    'n': n,
    'correct': correct,
    ACCURACY.name: 100 * correct / n,
    TOP5.name: 100 * int(c.top5) / n,
    NLL.name: float(nll) / n,
    ECE.name: 100 * float(gaps.sum()) / n,
  }


def detail(counts: Counts) -> dict[str, Any]:
  """Return the details of a split, which its report has beside the scores.

  Returns:
    A dictionary. `per_class` is the accuracy of each class in percent, or None for a class without examples.
    `confusion` is indexed [label][prediction]. It is left out if there are more than CONFUSION_CLASSES classes.
    `reliability` has for each bin of confidence the number of examples, and accuracy and mean confidence in percent.
  """
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  examples, bin_confidence = c.confusion.sum(axis=1), exact.value(c.bin_confidence)
  per_class = [
    100 * int(correct) / int(n) if n else None for correct, n in zip(np.diag(c.confusion), examples, strict=True)
  ]
  confusion = {'confusion': c.confusion.tolist()} if len(c.confusion) <= CONFUSION_CLASSES else {}
  return {
    'per_class': per_class,
    **confusion,
    'reliability': [
      {'n': int(n), 'accuracy': 100 * int(correct) / int(n), 'confidence': 100 * float(confidence) / int(n)}
      for n, correct, confidence in zip(c.bin_examples, c.bin_correct, bin_confidence, strict=True)
      if n
    ],
  }
