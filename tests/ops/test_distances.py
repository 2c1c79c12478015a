import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference

from hbf.errors import UserError
from hbf.ops.distances import METRICS, squared_distances

N, A, D, RANK = 6, 5, 16, 3
DISTANCES = [metric for metric in reference.METRICS if metric != 'bilinear']
TYPES = ['float32', 'bfloat16']
CASES = ['near', 'coincident', 'far', 'both_far']


def make(case, metric, dtype, seed=0):
  """Return random points and centers of a type, and float32 weights of the metric."""
  rng = np.random.default_rng(seed)
  points, centers = rng.normal(size=(N, D)), rng.normal(size=(A, D))
  if case == 'coincident':
    centers = points[:A].copy()
  if case == 'far':
    points += 1e3
  if case == 'both_far':
    points, centers = points + 1e3, centers + 1e3
  weights = reference.metric_weights(rng, metric, D, RANK)
  return jnp.asarray(points, dtype), jnp.asarray(centers, dtype), weights


def mapped_norms(z, metric, weights):
  """Return ‖Wz‖² in float64. For bilinear, return ‖z‖ ‖zᵀM‖, a bound of |zᵀMz|."""
  z = np.asarray(z, np.float64)
  if metric == 'bilinear':
    return np.linalg.norm(z, axis=-1) * np.linalg.norm(z @ weights, axis=-1)
  z = {'identity': lambda: z, 'diagonal': lambda: z * weights}.get(metric, lambda: z @ weights.T)()
  return np.sum(z**2, axis=-1)


def test_reference_knows_every_metric():
  assert {*METRICS, 'bilinear'} == set(reference.METRICS)


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('metric', reference.METRICS)
def test_error_is_a_rounding_of_the_mapped_norms(metric, case, dtype):
  points, centers, weights = make(case, metric, dtype)
  expected = reference.squared_distances(points, centers, metric, weights)
  # Points as given are exact in the float32 products; only what W maps is held in the points' type.
  held = jnp.float32 if metric == 'identity' else dtype
  norms = mapped_norms(points, metric, weights)[:, None] + mapped_norms(centers, metric, weights)[None, :]
  result = squared_distances(points, centers, metric, weights)
  assert result.dtype == jnp.float32
  error = np.abs(np.asarray(result, np.float64) - expected)
  assert np.all(error <= 4 * float(jnp.finfo(held).eps) * norms), (error / norms).max()


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('metric', reference.METRICS)
def test_coincident_points_are_zero_to_float32_whatever_the_type(metric, dtype):
  points, centers, weights = make('coincident', metric, dtype)
  norms = mapped_norms(centers, metric, weights)
  result = np.diagonal(squared_distances(points, centers, metric, weights))
  assert np.all(np.abs(result) <= 4 * float(jnp.finfo(jnp.float32).eps) * norms)


@pytest.mark.parametrize('metric', DISTANCES)
def test_error_in_bfloat16_shrinks_with_the_distance(metric):
  """For points at a distance r, the error of r² in bfloat16 is at most 2 r times the rounding error of the points."""
  points, centers, weights = make('near', metric, 'bfloat16')
  centers = points[:A] + jnp.bfloat16(0.125) * centers
  r = np.sqrt(reference.squared_distances(points, centers, metric, weights))
  norms = np.sqrt(mapped_norms(points, metric, weights))[:, None] + np.sqrt(mapped_norms(centers, metric, weights))
  slip = float(jnp.finfo(jnp.bfloat16).eps) * norms
  error = np.abs(np.asarray(squared_distances(points, centers, metric, weights), np.float64) - r**2)
  assert np.all(error <= 2 * r * slip + slip**2)


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('metric', DISTANCES)
def test_never_negative(metric, dtype):
  for seed in range(3):
    points, _, weights = make('both_far', metric, dtype, seed)
    near = points + jnp.asarray(0.03 * np.random.default_rng(seed).normal(size=(N, D)), dtype)
    result = squared_distances(points, near, metric, weights)
    assert np.all(np.asarray(result) >= 0)


def test_bilinear_form_may_be_negative():
  points, centers, _ = make('near', 'bilinear', 'float32')
  assert np.all(np.asarray(squared_distances(points, centers, 'bilinear', -jnp.eye(D))) < 0)


@pytest.mark.parametrize('metric', reference.METRICS)
def test_leading_axes_broadcast(metric):
  """Shapes are those of the modules: points [batch, heads, N, D], centers [heads, A, D] and weights [heads, ...]."""
  rng = np.random.default_rng(1)
  points, centers = rng.normal(size=(2, 3, N, D)).astype('f'), rng.normal(size=(3, A, D)).astype('f')
  weights = reference.metric_weights(rng, metric, D, RANK, lead=(3,))
  result = squared_distances(jnp.asarray(points), jnp.asarray(centers), metric, weights)
  assert result.shape == (2, 3, N, A)
  for b in range(2):
    for h in range(3):
      expected = reference.squared_distances(points[b, h], centers[h], metric, reference.head(weights, h))
      np.testing.assert_allclose(result[b, h], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('metric', reference.METRICS)
def test_scale_multiplies_the_distances_center_by_center(metric, dtype):
  points, centers, weights = make('near', metric, dtype)
  plain = squared_distances(points, centers, metric, weights)
  for scale in (np.float32(0.3), np.linspace(0.1, 4, A, dtype='f')[None]):
    result = squared_distances(points, centers, metric, weights, scale)
    np.testing.assert_allclose(result, scale * plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('metric', DISTANCES)
def test_gradient_is_that_of_the_difference(metric):
  points, centers, weights = make('near', metric, 'float32')
  gradient = jax.grad(lambda x: squared_distances(x, centers, metric, weights).sum())(points)
  w = {'identity': np.eye(D)}.get(metric, weights)
  w = np.diag(w) if metric == 'diagonal' else np.asarray(w, np.float64)
  difference = np.asarray(points, np.float64)[:, None] - np.asarray(centers, np.float64)
  np.testing.assert_allclose(gradient, 2 * (difference @ w.T @ w).sum(axis=1), rtol=1e-4, atol=1e-4)


def test_unknown_metric_names_the_nearest():
  with pytest.raises(UserError, match="did you mean 'diagonal'"):
    squared_distances(jnp.ones((2, 3)), jnp.ones((2, 3)), 'diagnoal')
