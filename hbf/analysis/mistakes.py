"""Mistakes of a classifier, and the confidence of its answers."""

import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation.classification import Counts, detail, summarize


def summary(logits: np.ndarray, labels: np.ndarray) -> dict:
  """Return the scores of a classifier on n examples: accuracy, calibration, confusion matrix and others.

  Args:
    logits: float32 [n, classes].
    labels: the true classes, int32 [n].

  Returns:
    One dict with the entries that `summarize` and `detail` in `hbf.evaluation.classification` return.
  """
  count = jax.jit(
    lambda logits, labels: Counts.zeros(logits.shape[1]).add(logits, labels, jnp.ones(len(labels), bool))
  )
  counts = count(logits, labels)
  return summarize(counts) | detail(counts)


def risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Compute the error of a model that answers only some examples, those with the greatest confidence.

  The coverage is the share of the examples that it answers (Geifman & El-Yaniv 2017).

  Args:
    confidence: confidence in the answer to each example, [n].
    correct: True where the answer is right, bool [n].

  Returns:
    The coverages 1/n, 2/n, … 1 in percent, [n], and the error at each coverage, [n]: the percentage of wrong answers
    among the answered examples. The mean of these errors is the area under the curve of error against coverage.
  """
  order = np.argsort(-confidence, kind='stable')
  number = np.arange(1, len(order) + 1)
  return 100 * number / len(order), 100 * np.cumsum(~correct[order]) / number


def most_confident(probabilities: np.ndarray, labels: np.ndarray, most: int) -> np.ndarray:
  """Return the indices, int [m], of the m ≤ `most` examples with the most confident wrong answers.

  The most confident answer comes first.
  """
  wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
  return wrong[np.argsort(-probabilities[wrong].max(axis=1), kind='stable')][:most]


def most_ambiguous(probabilities: np.ndarray, most: int) -> np.ndarray:
  """Return the indices, int [m], of the m ≤ `most` examples whose two largest probabilities differ least.

  The smallest difference comes first.
  """
  two = np.sort(probabilities, axis=1)[:, -2:]
  return np.argsort(two[:, 1] - two[:, 0], kind='stable')[:most]


def confused(confusion: np.ndarray, most: int) -> list[tuple[int, int, int]]:
  """Return the most common mistakes as tuples (label, answer, number of examples), the most common first.

  Args:
    confusion: the confusion matrix, int [classes, classes]. A row is a label, a column is an answer.
    most: the greatest number of mistakes to return.
  """
  wrong = confusion - np.diag(np.diag(confusion))
  order = np.argsort(-wrong, axis=None, kind='stable')[:most]
  pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
  return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs if wrong[i, j]]
