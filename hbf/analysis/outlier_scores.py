"""Scores of images or tokens: a greater score says that they are more like the training images.

`hbf.evaluation.outliers` has scores that are computed from logits, and measures how well a score separates images.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import linalg, special

from hbf.analysis.rows import of_norm_1
from hbf.ops.distances import squared_distances

# Fraction of the mean variance that is added to every variance. Features after a LayerNorm have a direction without
# variance.
RIDGE = 1e-6
PART = 500  # images whose distances are in memory at once


def greatest(log_kernels: Float[Array, 'B N U']) -> Float[Array, ' B']:
  """Return the greatest log K over the centers, averaged over the tokens of each image."""
  return jnp.max(log_kernels, axis=-1).mean(axis=-1)


def log_density(log_kernels: Float[Array, 'B N U']) -> Float[Array, ' B']:
  """Return log mean_a K_a over the centers a, averaged over the tokens of each image.

  If K is a Gaussian, this is the log-density of a mixture of Gaussians around the centers (Parzen 1962), up to a
  constant.
  """
  return (jax.nn.logsumexp(log_kernels, axis=-1) - jnp.log(log_kernels.shape[-1])).mean(axis=-1)


def nearest_tokens(
  tokens: Float[Array, 'B N D'], bank: Float[Array, 'M D'], ranks: Sequence[int]
) -> Float[Array, 'B ranks']:
  """Return minus the distance from a token to the k-th nearest token in `bank`, averaged over the tokens of an image.

  The result has a column for each k in `ranks`. Tokens are not scaled to norm 1. PatchCore (Roth et al. 2022) has a
  similar score.
  """
  squares = squared_distances(tokens.reshape(-1, tokens.shape[-1]), bank)
  found = -jax.lax.top_k(-squares, max(ranks))[0][:, jnp.array(ranks) - 1]
  return -jnp.sqrt(jnp.maximum(found, 0)).reshape(*tokens.shape[:2], -1).mean(axis=1)


def nearest_features(features: np.ndarray, bank: np.ndarray, ranks: Sequence[int]) -> dict[int, np.ndarray]:
  """Return minus the distance from each image's features to the k-th nearest training features (Sun et al. 2022).

  All features are scaled to norm 1.

  Args:
    features: [n, F].
    bank: features of training images, [M, F].
    ranks: the values of k, each at most M.

  Returns:
    The scores [n] for each k.
  """
  points, others = map(of_norm_1, (features, bank))
  places, found = np.array(ranks) - 1, []
  for start in range(0, len(points), PART):
    squares = 2 - 2 * points[start : start + PART] @ others.T
    found.append(np.partition(squares, places, axis=1)[:, places])
  distances = np.sqrt(np.maximum(np.concatenate(found), 0))
  return {k: -column for k, column in zip(ranks, distances.T, strict=True)}


class ClassGaussians(NamedTuple):
  """A Gaussian for the features of each class.

  Attributes:
    means: mean of each class, [C, F].
    factors: L⁻¹ of each class, where L Lᵀ is the covariance, [C, F, F].
    log_weights: logarithm of each class's share of the examples, minus log det L, [C].
  """

  means: np.ndarray
  factors: np.ndarray
  log_weights: np.ndarray

  @classmethod
  def fit(cls, features: np.ndarray, labels: np.ndarray, shared: bool) -> 'ClassGaussians':
    """Return the Gaussians of some labeled features.

    Args:
      features: [n, F].
      labels: index of each example's class, int [n]. Each class has at least two examples.
      shared: True for one covariance that all classes share, measured around the means of the classes. False for one
        covariance for each class.
    """
    features = features.astype(np.float64)
    counts = np.bincount(labels)
    means = np.array([features[labels == c].mean(axis=0) for c in range(len(counts))])
    around = features - means[labels]
    if shared:
      covariances = np.repeat((around.T @ around / len(around))[None], len(counts), axis=0)
    else:
      covariances = np.array([np.cov(around[labels == c].T, bias=True) for c in range(len(counts))])
    ridges = RIDGE * np.trace(covariances, axis1=1, axis2=2) / features.shape[1]
    lower = np.linalg.cholesky(covariances + ridges[:, None, None] * np.eye(features.shape[1]))
    factors = np.array([linalg.solve_triangular(z, np.eye(len(z)), lower=True) for z in lower])
    log_dets = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    return cls(means, factors, np.log(counts / counts.sum()) - log_dets)

  def squares(self, features: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distances [n, C] of features [n, F] to the means of the classes."""
    pairs = zip(self.means, self.factors, strict=True)
    return np.array([np.square((features - mean) @ factor.T).sum(axis=1) for mean, factor in pairs]).T


def mahalanobis(gaussians: ClassGaussians, features: np.ndarray) -> np.ndarray:
  """Return the scores [n] of features [n, F]: minus the squared Mahalanobis distance to the nearest class mean.

  The Gaussians share one covariance (Lee et al. 2018). Lee et al. also combine the scores of several layers and
  change the input, which is not done here.
  """
  return -gaussians.squares(features).min(axis=1)


def class_density(gaussians: ClassGaussians, features: np.ndarray) -> np.ndarray:
  """Return the log-density [n] of features [n, F] under a mixture of one Gaussian for each class.

  Each class has its own covariance. This is Gaussian discriminant analysis, the score of DDU (Mukhoti et al. 2023).
  DDU also trains the network with spectral normalization, which is not done here.
  """
  constant = features.shape[1] / 2 * np.log(2 * np.pi)
  return special.logsumexp(gaussians.log_weights - gaussians.squares(features) / 2, axis=1) - constant


def calibrated(scores: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> np.ndarray:
  """Return calibrated scores [n]: the sums of (score − mean) / standard deviation over the blocks.

  Args:
    scores: the scores [n] of images, by block.
    reference: the scores [m] of held-out images, by block. They give the mean and the standard deviation of each
      block.
  """
  return np.sum([(values - reference[b].mean()) / reference[b].std() for b, values in scores.items()], axis=0)
