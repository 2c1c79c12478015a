"""Tests of kernels that are given by K itself: soft balls φ(b − r²/2σ²), and functions of s that grow or end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf

from hbf.errors import UserError
from hbf.ops.kernels import BALLS, DIRECT, KERNELS, VALUES

N, A, D, V, HEADS = 4, 5, 6, 3, 2
RNG = np.random.default_rng(0)
POINTS, CENTERS, COEFFICIENTS = (RNG.normal(size=(HEADS, *shape)) for shape in ((N, D), (A, D), (A, V)))
METRIC, SIGMA, DEPTH = (
  RNG.normal(size=(HEADS, D, D)),
  RNG.uniform(1, 2, (HEADS, 1, A)),
  RNG.normal(size=(HEADS, 1, A)),
)
NAMES = ('points', 'centers', 'coefficients', 'weights', 'sigma', 'squared_radius')
ARRAYS = {
  name: jnp.asarray(z, jnp.float32)
  for name, z in zip(NAMES, (POINTS, CENTERS, COEFFICIENTS, METRIC, SIGMA, DEPTH), strict=True)
}


def in_float64(kernel, mask):
  """Return the sums by their definition, one center at a time."""
  out = np.zeros((HEADS, N, V))
  for h in range(HEADS):
    r2 = reference.squared_distances(POINTS[h], CENTERS[h], 'full', METRIC[h])
    for a in range(A):
      s = r2[:, a] / (2 * SIGMA[h, 0, a] ** 2)
      if kernel in reference.BALLS:
        k = [reference.BALLS[kernel](z) for z in DEPTH[h, 0, a] - s]
      else:
        k = [reference.VALUES[kernel](z) for z in s]
      responses = mask[:, a] * np.array(k)
      out[h] += responses[:, None] * COEFFICIENTS[h, a]
  return out


@pytest.mark.parametrize('seen', ['all', 'causal', 'mask'])
@pytest.mark.parametrize('kernel', reference.BALLS | reference.VALUES)
def test_equals_the_sum_over_centers(kernel, seen):
  mask = {'all': np.ones((N, A)), 'causal': np.tri(N, A), 'mask': RNG.random((N, A)) < 0.5}[seen]
  given = {'all': {}, 'causal': {'causal': True}, 'mask': {'mask': jnp.asarray(mask, bool)}}[seen]
  arrays = ARRAYS if kernel in reference.BALLS else {n: z for n, z in ARRAYS.items() if n != 'squared_radius'}
  result = hyperbf(**arrays, kernel=kernel, metric='full', normalization='none', **given)
  np.testing.assert_allclose(result, in_float64(kernel, mask), rtol=1e-4, atol=1e-4)


def test_factors_multiply_the_responses():
  factors = RNG.normal(size=(HEADS, N, A))
  how = {'kernel': 'gaussian', 'metric': 'identity', 'sigma': ARRAYS['sigma'], 'normalization': 'sum'}
  arrays = {name: ARRAYS[name] for name in ('points', 'centers', 'coefficients')}
  expected = [
    (factors[h] * reference.responses(POINTS[h], CENTERS[h], 'gaussian', SIGMA[h, 0], 'identity', None, 'sum'))
    @ COEFFICIENTS[h]
    for h in range(HEADS)
  ]
  result = hyperbf(**arrays, **how, factors=jnp.asarray(factors, jnp.float32))
  np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_every_kernel_has_a_reference_and_balls_decay_to_0():
  assert set(BALLS) == set(reference.BALLS)
  assert set(VALUES) == set(reference.VALUES)
  assert not set(DIRECT) & set(KERNELS)
  for kernel in BALLS.values():
    np.testing.assert_allclose(kernel(jnp.asarray([-30.0, -100.0])), 0, atol=1e-11)


@pytest.mark.parametrize('kernel', VALUES)
def test_slopes_of_functions_of_s_are_those_of_a_difference_and_finite_at_the_center(kernel):
  s = jnp.asarray([0.0, 1e-3, 0.5, 3.0, 9.9, 10.1, 50.0])
  slopes = jax.vmap(jax.grad(VALUES[kernel]))(s)
  assert np.isfinite(slopes).all()
  at = np.asarray(s[1:], np.float64)
  below, above = ([reference.VALUES[kernel](z) for z in at * factor] for factor in (1 - 1e-6, 1 + 1e-6))
  np.testing.assert_allclose(slopes[1:], np.subtract(above, below) / (2e-6 * at), rtol=1e-3, atol=1e-5)


def test_wendland_has_the_curvature_of_the_gaussian_at_its_center_and_ends():
  s = 1e-6
  np.testing.assert_allclose((1 - reference.VALUES['wendland'](s)) / (1 - np.exp(-s)), 1, rtol=0.01)
  assert VALUES['wendland'](jnp.asarray(10.0)) == 0


def test_the_gradient_of_the_radius_is_that_of_a_difference():
  """A larger b makes a larger ball. Its gradient must equal a finite difference."""

  def out(b):
    return hyperbf(
      **ARRAYS | {'squared_radius': b}, kernel='ball_softplus', metric='full', normalization='none'
    ).sum()

  step = 1e-2 * jnp.zeros((HEADS, 1, A)).at[1, 0, 2].set(1.0)
  difference = (out(ARRAYS['squared_radius'] + step) - out(ARRAYS['squared_radius'] - step)) / 2e-2
  np.testing.assert_allclose(jax.grad(out)(ARRAYS['squared_radius'])[1, 0, 2], difference, rtol=1e-2)


@pytest.mark.parametrize('normalization', ['sum', 'rms', 'layer'])
def test_a_kernel_that_changes_sign_is_not_normalized(normalization):
  with pytest.raises(UserError, match=f'kernel ball_gelu .* use normalization none, not {normalization}'):
    hyperbf(**ARRAYS, kernel='ball_gelu', metric='full', normalization=normalization)
