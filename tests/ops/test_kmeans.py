import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.ops.kmeans import kmeans, sample


def blobs(seed=0):
  """Return 60 points [60, 2] around three corners, in random order."""
  rng = np.random.default_rng(seed)
  corners = np.array([[0, 0], [10, 0], [0, 10]])
  return jnp.asarray(rng.permutation(np.repeat(corners, 20, axis=0) + rng.normal(size=(60, 2))), jnp.float32)


def quantization_error(points, means):
  return np.square(np.asarray(points)[:, None] - np.asarray(means)).sum(-1).min(1).mean()


def lloyd(points, means, iterations):
  """Run Lloyd's iteration in float64. A mean without points stays where it is."""
  points, means = np.asarray(points, np.float64), np.array(means, np.float64)
  for _ in range(iterations):
    nearest = np.square(points[:, None] - means).sum(-1).argmin(1)
    for a in range(len(means)):
      if np.any(nearest == a):
        means[a] = points[nearest == a].mean(0)
  return means


@pytest.mark.parametrize('count', [3, 7])
def test_equals_lloyds_iteration(count):
  points, key = blobs(), jax.random.key(3)
  expected = lloyd(points, sample(key, points, count), 5)
  np.testing.assert_allclose(kmeans(key, points, count, 5), expected, rtol=1e-4, atol=1e-4)


def test_each_iteration_lowers_the_quantization_error():
  points, key = blobs(), jax.random.key(0)
  errors = [quantization_error(points, kmeans(key, points, 6, iterations)) for iterations in (0, 1, 2, 10)]
  assert errors[0] > errors[1] > errors[2] >= errors[3]


def test_is_deterministic_and_jit_changes_nothing():
  points, key = blobs(), jax.random.key(1)
  first = kmeans(key, points, 4)
  np.testing.assert_array_equal(first, kmeans(key, points, 4))
  np.testing.assert_allclose(first, jax.jit(kmeans, static_argnums=2)(key, points, 4), rtol=1e-5, atol=1e-5)
  assert not np.array_equal(first, kmeans(jax.random.key(2), points, 4))


def test_sample_repeats_no_point_while_there_are_enough():
  points = blobs()
  assert len(np.unique(sample(jax.random.key(0), points, len(points)), axis=0)) == len(points)


@pytest.mark.parametrize('start', [sample, kmeans])
def test_more_centers_than_points_are_still_among_them(start):
  points = blobs()[:2]
  result = np.asarray(start(jax.random.key(0), points, 9))
  assert result.shape == (9, 2)
  assert {tuple(row) for row in result} <= {tuple(row) for row in np.asarray(points)}
