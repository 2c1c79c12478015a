"""Mistakes of a classifier, and its confidence in them."""

import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation.classification import Counts, detail, summarize


def summary(logits: np.ndarray, labels: np.ndarray) -> dict:
  """Return the scores and details (`hbf.evaluation`) of logits float32 [n, classes] and labels int32 [n]."""
  count = jax.jit(
    lambda logits, labels: Counts.zeros(logits.shape[1]).add(logits, labels, jnp.ones(len(labels), bool))
  )
  counts = count(logits, labels)
  return summarize(counts) | detail(counts)


def risk_coverage(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Compute the error among the most confident examples, for every coverage (Geifman & El-Yaniv 2017).

  Args:
    confidence: [n].
    correct: bool [n].

  Returns:
    The coverages 1/n, 2/n, … 1 and the error of each, both in percent [n]. The mean of the errors is the area under
    the curve.
  """
  order = np.argsort(-confidence, kind='stable')
  number = np.arange(1, len(order) + 1)
  return 100 * number / len(order), 100 * np.cumsum(~correct[order]) / number


def most_confident(probabilities: np.ndarray, labels: np.ndarray, most: int) -> np.ndarray:
  """Return the wrongly answered examples, most confident first, at most `most`: int [m]."""
  wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
  return wrong[np.argsort(-probabilities[wrong].max(axis=1), kind='stable')][:most]


def most_ambiguous(probabilities: np.ndarray, most: int) -> np.ndarray:
  """Return the examples with the smallest gap between the two likeliest classes, smallest first: int [m]."""
  two = np.sort(probabilities, axis=1)[:, -2:]
  return np.argsort(two[:, 1] - two[:, 0], kind='stable')[:most]


def confused(confusion: np.ndarray, most: int) -> list[tuple[int, int, int]]:
  """Return (label, prediction, examples) of the most common mistakes, at most `most`."""
  wrong = confusion - np.diag(np.diag(confusion))
  order = np.argsort(-wrong, axis=None, kind='stable')[:most]
  pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
  return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs if wrong[i, j]]
