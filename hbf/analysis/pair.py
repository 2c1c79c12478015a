"""Two runs side by side: how alike what they compute is, and where their answers differ."""

import numpy as np
from scipy.optimize import linear_sum_assignment

from hbf.analysis.trained_run import TrainedRun


def cka(x: np.ndarray, y: np.ndarray) -> float:
  """Compute the debiased linear CKA of features [n, p] and [n, q] of the same n ≥ 4 examples.

  CKA is HSIC(x, y) / √(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019, "Similarity of Neural Network Representations
  Revisited"). Here HSIC is the unbiased estimator (Song et al. 2012, "Feature Selection via Dependence
  Maximization"), as in Nguyen et al. 2021, "Do Wide and Deep Networks Learn the Same Things?". The estimator of 2019
  is biased upwards: features with nothing in common come to 1 if p and q are well above n. Debiased they come to
  about 0 on average, and may lie below. A rotation, a shift and a factor of the features change nothing.
  """
  return float(alignment(x[None], y[None])[0, 0])


def alignment(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  """Compute the CKA of every layer of one run with every layer of another, [K, L].

  Args:
    one: features of the layers, [K, n, p], as `layers` gives them.
    other: [L, n, q], of the same examples.
  """
  x, y = (np.stack([_u_centered(features).ravel() for features in run]) for run in (one, other))
  scale = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
  return np.divide(x @ y.T, scale, out=np.zeros_like(scale), where=scale > 0)


def _u_centered(features: np.ndarray) -> np.ndarray:
  """Center a Gram matrix so that Σ K_ij L_ij of two of them is n(n − 3) times the unbiased HSIC, [n, n].

  This is U-centering (Székely & Rizzo 2014): the diagonal, which makes HSIC biased, is left out.
  """
  n = len(features)
  centered = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
  gram = centered @ centered.T
  np.fill_diagonal(gram, 0)
  means = gram.sum(axis=0) / (n - 2)
  gram += means.sum() / (n - 1) - means - means[:, None]
  np.fill_diagonal(gram, 0)
  return gram


def layers(subject: TrainedRun, images: np.ndarray) -> np.ndarray:
  """The mean token of every image before the first block and after each, float64 [depth + 1, n, D].

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
  """
  parts = [np.asarray(seen.tokens, np.float64)[:, number >= 0].mean(axis=2) for number, seen in subject.looks(images)]
  return np.concatenate(parts, axis=1)


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
  centered = z - z.mean(axis=0)
  deviation = centered.std(axis=0)
  return np.asarray(np.divide(centered, deviation, out=np.zeros_like(centered), where=deviation > 0))


def responses(subject: TrainedRun, images: np.ndarray, block: str) -> np.ndarray | None:
  """Of the centers of a block to every token of the images, float32 [n · N, U]; None if it has no centers."""
  parts = [
    np.asarray(seen.responses[block])[number >= 0]
    for number, seen in subject.looks(images)
    if block in seen.responses
  ]
  return np.concatenate(parts).reshape(-1, parts[0].shape[-1]) if parts else None
