"""Tests of normalizations against float64 where responses hardly differ: precision and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf

IMPLEMENTATIONS = ['xla', 'pallas']


def unit(kernel, d, a, n, variance, dtype, seed=0):
  """Return points after a LayerNorm, centers and coefficients drawn from N(0, 1), and options with σ² = variance."""
  rng = np.random.default_rng(seed)
  points = reference.layer_norm(rng.normal(size=(n, d)))
  arrays = [jnp.asarray(z, dtype) for z in (points, rng.normal(size=(a, d)), rng.normal(size=(a, d)))]
  return arrays, {'kernel': kernel, 'sigma': float(np.sqrt(variance))}


def exact(arrays, options, normalization):
  """Compute the operator in float64 from its equations."""
  points, centers, coefficients = (np.asarray(z, np.float64) for z in arrays)
  r2 = (points**2).sum(-1)[:, None] + (centers**2).sum(-1) - 2 * points @ centers.T
  s = r2 / (2 * options['sigma'] ** 2)
  k = {'gaussian': lambda: np.exp(-s), 'inverse_multiquadric': lambda: 1 / np.sqrt(1 + 2 * s)}[options['kernel']]()
  return reference.normalized(k, normalization) @ coefficients


def relative_error(result, expected):
  return np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize(('dtype', 'most'), [('bfloat16', 0.01), ('float32', 2e-5)])
@pytest.mark.parametrize('kernel', ['gaussian', 'inverse_multiquadric'])
def test_centered_responses_that_hardly_differ_keep_their_digits(kernel, dtype, most, implementation):
  """Sizes are those of recipe memo, with σ² = D. Without jit, a CPU rounds between operations as accelerators do."""
  arrays, options = unit(kernel, 768, 1536, 16, 768, dtype)
  result = hyperbf(*arrays, **options, normalization='layer', implementation=implementation)
  assert relative_error(result, exact(arrays, options, 'layer')) < most


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
@pytest.mark.parametrize('sigma', [2.0, 300.0])
def test_gradient_is_that_of_the_float64_operator_however_little_responses_differ(
  sigma, normalization, implementation
):
  """This includes ε of the normalization. At σ = 300, ε is nearly all of the divisor of the centered responses."""
  arrays, options = unit('inverse_multiquadric', 8, 12, 5, sigma**2, 'float32')
  rng = np.random.default_rng(1)
  along, readout = (rng.normal(size=(5, 8)) for _ in range(2))

  def value(z):
    return (exact([z, *arrays[1:]], options, normalization) * readout).sum()

  points, step = np.asarray(arrays[0], np.float64), 1e-4
  expected = (value(points + step * along) - value(points - step * along)) / (2 * step)
  implementation = functools.partial(hyperbf, **options, normalization=normalization, implementation=implementation)
  gradient = jax.jit(jax.grad(lambda x: (implementation(x, *arrays[1:]) * readout).sum()))(arrays[0])
  slopes = np.asarray(gradient, np.float64) * along
  np.testing.assert_allclose(slopes.sum(), expected, rtol=2e-3, atol=2e-3 * np.abs(slopes).max())


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize('normalization', reference.NORMALIZATIONS)
def test_equal_responses_give_finite_gradients(normalization, implementation):
  points, centers = jnp.ones((5, 4)), jnp.ones((3, 4))
  run = functools.partial(
    hyperbf, kernel='gaussian', sigma=1.0, normalization=normalization, implementation=implementation
  )
  gradients = jax.jit(jax.grad(lambda *z: (run(*z) ** 2).sum(), (0, 1, 2)))(points, centers, jnp.eye(3, 4))
  assert all(jnp.isfinite(z).all() for z in gradients)
