"""Scores of the prediction of K labels over every image of a split, in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hbf.evaluation.scores import EXACT_MATCH, F1, LABEL_ACCURACY, MEAN_PRECISION, NLL


def summarize(labels: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
  """Return the scores of a split.

  A label is predicted if its logit is above 0, so that its probability is above 1/2.

  Args:
    labels: 0 or 1, [n, K].
    logits: logits of the labels, [n, K].

  Returns:
    A dictionary. `n` is the number of images. `correct` is the number of images for which all K predictions are
    correct. The other keys are the scores in `hbf.evaluation.scores.MULTI_LABEL`. `map` is the average precision
    (`average_precision_terms`) in percent, as a mean over the labels that at least one image has. `f1` is F1 in
    percent, as a mean over all labels. `exact_match` is `correct` in percent, and `label_accuracy` is the percentage
    of correct predictions. `nll` is the mean negative log-likelihood of a prediction in nats.
  """
  truth, z = labels.astype(bool), logits.astype(np.float64)
  right = (z > 0) == truth
  correct = int(right.all(axis=1).sum())
  return {
    'n': len(labels),
    'correct': correct,
    MEAN_PRECISION.name: 100 * float(mean_precision_terms(labels, logits).mean()),
    F1.name: float(np.mean([_f1(truth[:, k], z[:, k] > 0) for k in range(z.shape[1])])),
    EXACT_MATCH.name: 100 * correct / len(labels),
    LABEL_ACCURACY.name: 100 * float(right.mean()),
    NLL.name: float(np.logaddexp(0, np.where(truth, -z, z)).mean()),
  }


def detail(labels: np.ndarray, logits: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
  """Return the scores of each label.

  Args:
    labels: 0 or 1, [n, K].
    logits: logits of the labels, [n, K].
    names: names of the labels, [K].

  Returns:
    A dictionary with the key `per_label`. It has a dictionary for each name: `n`, the number of images that have the
    label, and `average_precision`, `precision`, `recall` and `f1` in percent. If no image has the label,
    `average_precision` is None and `recall` is 0. If the label is never predicted, `precision` is 0.
  """
  found = {}
  for k, name in enumerate(names):
    truth, predicted = labels[:, k].astype(bool), logits[:, k] > 0
    both = int((truth & predicted).sum())
    terms = average_precision_terms(truth, logits[:, k])
    found[name] = {
      'n': int(truth.sum()),
      'average_precision': None if terms is None else 100 * float(terms.mean()),
      'precision': 100 * both / max(int(predicted.sum()), 1),
      'recall': 100 * both / max(int(truth.sum()), 1),
      F1.name: _f1(truth, predicted),
    }
  return {'per_label': found}


def mean_precision_terms(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
  """Return a number for each image, [n]. The mean of these numbers is the mean average precision, from 0 to 1.

  Each number is the mean over the labels of the number from `average_precision_terms`. Labels that no image has are
  left out. If no image has any label, all numbers are 0.

  Args:
    labels: 0 or 1, [n, K].
    logits: logits of the labels, [n, K].
  """
  terms = [average_precision_terms(labels[:, k].astype(bool), logits[:, k]) for k in range(labels.shape[1])]
  known = [term for term in terms if term is not None]
  return np.mean(known, axis=0) if known else np.zeros(len(labels))


def average_precision_terms(truth: np.ndarray, scores: np.ndarray) -> np.ndarray | None:
  """Return a number for each image, [n]. The mean of these numbers is the average precision AP of a label.

  The variance of the numbers, divided by n, estimates the variance of AP (the infinitesimal jackknife, Jaeckel 1972).
  For that, the number of an image is AP + n ∂AP/∂w at w = 1, where w is the weight of the image in AP.

  AP is the mean precision at the images that have the label. The precision at an image is computed over all images
  with at least the score of this image: it is the fraction of them that have the label.

  Args:
    truth: booleans [n]. True if the image has the label.
    scores: the score of each image for this label, such as the logit, [n].

  Returns:
    The numbers, or None if no image has the label.
  """
  positives = int(truth.sum())
  if not positives:
    return None
  order = np.argsort(-scores, kind='stable')
  falling, has = -scores[order], truth[order].astype(np.float64)
  first, above = (np.searchsorted(falling, falling, side=side) for side in ('left', 'right'))  # ties count together
  precision = np.cumsum(has)[above - 1] / above
  average = float(precision @ has) / positives
  # Sums over the images with the label whose score is at most that of an image: its weight changes their precision.
  gains, losses = (_sums_from(has * value / above)[first] for value in (1.0, precision))
  terms = np.empty(len(truth))
  terms[order] = average + len(truth) / positives * (has * (precision - average + gains) - losses)
  return terms


def _sums_from(values: np.ndarray) -> np.ndarray:
  """Return the sums of the values [n] from each index to the end, [n]."""
  return np.cumsum(values[::-1])[::-1]


def _f1(truth: np.ndarray, predicted: np.ndarray) -> float:
  """Return F1 of a label in percent, the harmonic mean of precision and recall, from booleans [n].

  F1 is 0 if no image has the label and the label is never predicted.
  """
  return 200 * int((truth & predicted).sum()) / max(int(truth.sum()) + int(predicted.sum()), 1)
