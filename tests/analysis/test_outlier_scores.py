"""Tests of outlier scores against their definitions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hbf.analysis.outlier_scores import (
  ClassGaussians,
  calibrated,
  class_density,
  greatest,
  log_density,
  mahalanobis,
  nearest_features,
  nearest_tokens,
)

RNG = np.random.default_rng(0)
LABELS = np.arange(300) % 3
FEATURES = RNG.normal(size=(300, 4)) @ (np.eye(4) + 0.2 * RNG.normal(size=(4, 4))) + 3 * np.eye(4)[LABELS]
POINTS = RNG.normal(size=(20, 4)) * 3


def test_log_density_is_that_of_a_mixture_of_gaussians():
  """There are two tokens and five centers. The score leaves out the constant of the Gaussians' densities."""
  centers, tokens = RNG.normal(size=(5, 3)), RNG.normal(size=(6, 2, 3))
  densities = np.mean([stats.multivariate_normal(c, 0.49 * np.eye(3)).pdf(tokens) for c in centers], axis=0)
  constant = 1.5 * np.log(2 * np.pi * 0.49)
  log_kernels = -np.square(tokens[:, :, None] - centers).sum(-1) / (2 * 0.49)
  np.testing.assert_allclose(
    log_density(jnp.asarray(log_kernels)), (np.log(densities) + constant).mean(axis=1), rtol=1e-5
  )
  np.testing.assert_allclose(greatest(jnp.asarray(log_kernels)), log_kernels.max(-1).mean(-1), rtol=1e-5)


def test_nearest_tokens_are_those_of_sorted_distances():
  tokens, bank = RNG.normal(size=(6, 2, 3)), RNG.normal(size=(30, 3))
  distances = np.sort(np.linalg.norm(tokens[:, :, None] - bank, axis=-1), axis=-1)
  found = nearest_tokens(jnp.asarray(tokens), jnp.asarray(bank), (1, 4))
  np.testing.assert_allclose(found, -distances[..., [0, 3]].mean(axis=1), rtol=1e-3)


def test_nearest_features_are_those_of_sorted_distances():
  unit = [z / np.linalg.norm(z, axis=1, keepdims=True) for z in (POINTS, FEATURES)]
  distances = np.sort(np.linalg.norm(unit[0][:, None] - unit[1], axis=-1), axis=1)
  found = nearest_features(7 * POINTS, FEATURES, (1, 10, 300))
  for k in (1, 10, 300):
    np.testing.assert_allclose(found[k], -distances[:, k - 1], rtol=1e-6)


def test_the_mahalanobis_score_is_that_of_lee_et_al():
  means = np.array([FEATURES[c == LABELS].mean(axis=0) for c in range(3)])
  covariance = sum(np.cov(FEATURES[c == LABELS].T, bias=True) for c in range(3)) / 3
  around = POINTS[:, None] - means
  squares = np.einsum('ncf,fg,ncg->nc', around, np.linalg.inv(covariance), around)
  found = mahalanobis(ClassGaussians.fit(FEATURES, LABELS, shared=True), POINTS)
  np.testing.assert_allclose(found, -squares.min(axis=1), rtol=1e-4)


def test_the_density_of_classes_is_that_of_a_mixture():
  labels = np.where(np.arange(300) < 200, LABELS, 0)  # classes of different size
  parts = [FEATURES[labels == c] for c in range(3)]
  pdfs = [stats.multivariate_normal(z.mean(axis=0), np.cov(z.T, bias=True)).pdf(POINTS) * len(z) / 300 for z in parts]
  found = class_density(ClassGaussians.fit(FEATURES, labels, shared=False), POINTS)
  np.testing.assert_allclose(found, np.log(sum(pdfs)), rtol=1e-3)


@pytest.mark.parametrize('shared', [True, False])
def test_a_direction_without_variance_does_no_harm(shared):
  """The coordinates of a feature vector sum to 0, as after a LayerNorm, so one direction has no variance."""
  flat = FEATURES - FEATURES.mean(axis=1, keepdims=True)
  gaussians = ClassGaussians.fit(flat, LABELS, shared)
  points = POINTS - POINTS.mean(axis=1, keepdims=True)
  basis = np.linalg.svd(np.ones((1, 4)))[2][1:].T  # the other three directions
  reduced = ClassGaussians.fit(flat @ basis, LABELS, shared)
  np.testing.assert_allclose(gaussians.squares(points), reduced.squares(points @ basis), rtol=1e-3)


def test_a_calibrated_sum_gives_all_blocks_the_same_weight():
  reference = {'block0': RNG.normal(5, 2, 1_000), 'block1': RNG.normal(-100, 50, 1_000)}
  assert calibrated(reference, reference).mean() == pytest.approx(0, abs=1e-9)
  expected = sum((z - z.mean()) / z.std() for z in reference.values())
  np.testing.assert_allclose(calibrated(reference, reference), expected)
