"""Exact scores of a classifier over every example of a split."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation import exact
from hbf.evaluation.scores import ACCURACY, ECE, NLL, TOP5

CONFUSION_CLASSES = 1000  # With more classes, there is no confusion matrix: it would have over a million numbers.
BINS = 15  # bins of confidence for the calibration error, as in Guo et al. 2017


class Counts(flax.struct.PyTreeNode):
  """Sums over the batches of a split with C classes.

  The confidence of an example is the probability of its predicted class. The bins divide the range from 0 to 1 into
  BINS equal intervals of confidence. A sum of floats is an array of two: the sum and its rounding error
  (`hbf.evaluation.exact.add`).

  Attributes:
    examples: int32 [C], number of examples of each class.
    correct: int32 [C], number of correct predictions for the examples of each class.
    confusion: int32 [C, C], number of examples for each pair of true class and predicted class. None if C is greater
      than CONFUSION_CLASSES.
    top5: int32, number of examples whose true class is among the five classes with the largest logits.
    nll: float32 [2], the sum of the negative log-likelihoods in nats, and the rounding error of this sum.
    bin_examples: int32 [BINS], number of examples in each bin.
    bin_correct: int32 [BINS], number of correct predictions in each bin.
    bin_confidence: float32 [2, BINS], the sum of the confidences in each bin, and the rounding error of this sum.
  """

  examples: jax.Array
  correct: jax.Array
  confusion: jax.Array | None
  top5: jax.Array
  nll: jax.Array
  bin_examples: jax.Array
  bin_correct: jax.Array
  bin_confidence: jax.Array

  @classmethod
  def zeros(cls, classes: int) -> 'Counts':
    """Return counts that are all 0, for `classes` classes."""
    # Every leaf is a separate array, because a step that gets the counts may reuse their memory.
    integers = ((classes,), (classes,), (), (BINS,), (BINS,))
    examples, correct, top5, bin_examples, bin_correct = (jnp.zeros(shape, jnp.int32) for shape in integers)
    confusion = jnp.zeros((classes, classes), jnp.int32) if classes <= CONFUSION_CLASSES else None
    return cls(examples, correct, confusion, top5, jnp.zeros(2), bin_examples, bin_correct, jnp.zeros((2, BINS)))

  def add(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> 'Counts':
    """Return these counts plus the counts of a batch.

    Args:
      logits: logits of the classes, [B, C].
      labels: index of each example's true class, int32 [B].
      mask: booleans [B]. False for padding, which is not counted.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    predictions = jnp.argmax(logits, axis=-1)
    correct = (predictions == labels) & mask
    _, best = jax.lax.top_k(logits, min(5, logits.shape[-1]))
    confidence = jnp.exp(jnp.max(log_p, axis=-1))
    bins = jnp.clip(jnp.ceil(confidence * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
    nll = -jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    kept, confusion = mask.astype(jnp.int32), self.confusion
    return Counts(
      examples=self.examples.at[labels].add(kept),
      correct=self.correct.at[labels].add(correct.astype(jnp.int32)),
      confusion=None if confusion is None else confusion.at[labels, predictions].add(kept),
      top5=self.top5 + jnp.sum((best == labels[:, None]).any(axis=-1) & mask, dtype=jnp.int32),
      nll=exact.add(self.nll, jnp.sum(nll, where=mask)),
      bin_examples=self.bin_examples.at[bins].add(kept),
      bin_correct=self.bin_correct.at[bins].add(correct.astype(jnp.int32)),
      bin_confidence=exact.add(self.bin_confidence, jnp.zeros(BINS).at[bins].add(jnp.where(mask, confidence, 0.0))),
    )


def summarize(counts: Counts) -> dict[str, Any]:
  """Return the scores of a split.

  Returns:
    A dictionary. `n` is the number of examples, and `correct` is the number of correct predictions. The other keys
    are the scores in `hbf.evaluation.scores.CLASSIFICATION`: `accuracy`, `top5` and `ece` in percent, and `nll`, the
    mean in nats.
  """
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll, bin_confidence = exact.value(c.nll), exact.value(c.bin_confidence)
  n, correct = int(c.examples.sum()), int(c.correct.sum())
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
  """Return the details of a split: accuracies of classes, confusion matrix and calibration.

  Returns:
    A dictionary. `per_class` is the accuracy of each class in percent, or None for a class without examples.
    `confusion` has numbers of examples, indexed [true class][predicted class]. It is left out if there are more than
    CONFUSION_CLASSES classes. `reliability` has an entry for each bin of confidence that contains examples. The entry
    has the number of examples in the bin, and their accuracy and mean confidence in percent.
  """
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  bin_confidence = exact.value(c.bin_confidence)
  per_class = [100 * int(correct) / int(n) if n else None for correct, n in zip(c.correct, c.examples, strict=True)]
  confusion = {} if c.confusion is None else {'confusion': c.confusion.tolist()}
  return {
    'per_class': per_class,
    **confusion,
    'reliability': [
      {'n': int(n), 'accuracy': 100 * int(correct) / int(n), 'confidence': 100 * float(confidence) / int(n)}
      for n, correct, confidence in zip(c.bin_examples, c.bin_correct, bin_confidence, strict=True)
      if n
    ],
  }
