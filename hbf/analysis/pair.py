"""Comparison of two runs: similarity of their layers and of their centers."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from hbf.analysis.trained_run import TrainedRun


def cka(x: np.ndarray, y: np.ndarray) -> float:
  """Compute the debiased linear CKA of features [n, p] and [n, q] of the same n ≥ 4 examples.

  CKA is HSIC(x, y) / √(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019, "Similarity of Neural Network Representations
  Revisited"). Debiased CKA estimates each HSIC without bias (Song et al. 2012, "Feature Selection via Dependence
  Maximization"), as Nguyen et al. 2021 do ("Do Wide and Deep Networks Learn the Same Things?"). For unrelated
  features, it is about 0 on average, and may be negative. The biased CKA of Kornblith et al. would approach 1 if p
  and q are well above n. CKA does not change if the features are rotated, shifted or scaled.
  """
  return float(alignment([x], [y])[0, 0])


def alignment(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
  """Compute the CKA [K, L] of the K layers of one run with the L layers of another.

  Args:
    one: features of the K layers for n examples, [n, p] for each layer, such as the result of `layers`.
    other: features of the L layers of the other run for the same examples, [n, q] for each layer.
  """
  x, y = (np.stack([_u_centered(features).ravel() for features in run]) for run in (one, other))
  scale = np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
  return np.divide(x @ y.T, scale, out=np.zeros_like(scale), where=scale > 0)


def _u_centered(features: np.ndarray) -> np.ndarray:
  """Return the U-centered Gram matrix [n, n] of features [n, p] (Székely & Rizzo 2014).

  For two such matrices K and L, Σ_ij K_ij L_ij is n(n − 3) times the unbiased HSIC.
  """
  n = len(features)
  centered = features.astype(np.float64) - features.mean(axis=0, dtype=np.float64)
  gram = centered @ centered.T
  np.fill_diagonal(gram, 0)
  means = gram.sum(axis=0) / (n - 2)
  gram += means.sum() / (n - 1) - means - means[:, None]
  np.fill_diagonal(gram, 0)
  return gram


def layers(run: TrainedRun, images: np.ndarray) -> list[np.ndarray]:
  """Return the mean token of each image before the first block and after each of L blocks, L + 1 arrays [n, D].

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
  """
  parts = [
    [np.asarray(tokens, np.float64)[number >= 0].mean(axis=1) for tokens in activations.tokens]
    for number, activations in run.capture_batches(images)
  ]
  return [np.concatenate(of_layer) for of_layer in zip(*parts, strict=True)]


def matched(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  """Match the centers of two runs one to one, and return the correlation of the responses of each pair.

  The matching maximizes the sum of the correlations (Li et al. 2016, "Convergent learning").

  Args:
    one: responses of the centers of one run to M tokens, [M, U].
    other: responses of the centers of the other run to the same tokens, [M, V].

  Returns:
    The correlation of each of the min(U, V) pairs.
  """
  x, y = (_standard(z.astype(np.float64)) for z in (one, other))
  correlation = x.T @ y / len(x)
  return np.asarray(correlation[linear_sum_assignment(correlation, maximize=True)])


def _standard(z: np.ndarray) -> np.ndarray:
  """Scale each column to mean 0 and variance 1. A constant column becomes 0."""
  centered = z - z.mean(axis=0)
  deviation = centered.std(axis=0)
  return np.asarray(np.divide(centered, deviation, out=np.zeros_like(centered), where=deviation > 0))


def responses(run: TrainedRun, images: np.ndarray, block: str) -> np.ndarray | None:
  """Return the responses of a block's U centers to all tokens, float32 [n · N, U], or None if it has no centers."""
  parts = [
    np.asarray(activations.responses[block])[number >= 0]
    for number, activations in run.capture_batches(images)
    if block in activations.responses
  ]
  return np.concatenate(parts).reshape(-1, parts[0].shape[-1]) if parts else None
