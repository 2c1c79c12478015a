"""Two runs side by side: how alike what they compute is, and where their answers differ."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from hbf.analysis.subject import Subject


def cka(x: np.ndarray, y: np.ndarray) -> float:
  """Linear centred kernel alignment of features [n, p] and [n, q] of the same examples (Kornblith et al. 2019).

  1 if one is a rotation of the other, but for a factor; towards 0 if they have nothing in common, for n well above p
  and q.
  """
  x, y = (z.astype(np.float64) - z.mean(axis=0, dtype=np.float64) for z in (x, y))
  return float(np.sum((y.T @ x) ** 2) / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def layers(subject: Subject, images: np.ndarray) -> np.ndarray:
  """The mean token of every image before the first block and after each, float64 [depth + 1, n, D].

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
  """
  parts = [np.asarray(seen.tokens, np.float64)[:, number >= 0].mean(axis=2) for number, seen in subject.looks(images)]
  return np.concatenate(parts, axis=1)


def alignment(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  """CKA of every layer of one run with every one of the other, [layers, layers], of what `layers` gives."""
  return np.array([[cka(x, y) for y in other] for x in one])


def matched(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  """How well the units of one run find a counterpart of their own among those of another.

  Args:
    one: responses of the same M tokens, [M, U].
    other: [M, V].

  Returns:
    Of as many pairs as there can be, the correlation of the two's responses; the sum is the greatest there is (Li et
    al. 2016, "Convergent learning").
  """
  x, y = (_standard(z.astype(np.float64)) for z in (one, other))
  correlation = x.T @ y / len(x)
  return np.asarray(correlation[linear_sum_assignment(correlation, maximize=True)])


def _standard(z: np.ndarray) -> np.ndarray:
  """Of mean 0 and variance 1 over the rows; a column that is constant is 0."""
  centred = z - z.mean(axis=0)
  deviation = centred.std(axis=0)
  return np.asarray(np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0))


def responses(subject: Subject, images: np.ndarray, block: str) -> np.ndarray | None:
  """Of the centres of a block to every token of the images, float32 [n · N, U]; None if it has no centres."""
  parts = [
    np.asarray(seen.responses[block])[number >= 0]
    for number, seen in subject.looks(images)
    if block in seen.responses
  ]
  return np.concatenate(parts).reshape(-1, parts[0].shape[-1]) if parts else None
