"""Tests of second derivatives at the centers, where the distance is 0 or a rounding error of either sign.

Methods for differential equations need them, such as collocation at the centers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hbf


def wendland_radius(s):
  return np.sqrt(np.maximum(s, 1e-30) / 10)


# K' and K'' as functions of s.
SLOPES = {
  'gaussian': (lambda s: -np.exp(-s), lambda s: np.exp(-s)),
  'rational_quadratic': (lambda s: -((1 + s) ** -2), lambda s: 2 * (1 + s) ** -3),
  'inverse_multiquadric': (lambda s: -((1 + 2 * s) ** -1.5), lambda s: 3 * (1 + 2 * s) ** -2.5),
  'multiquadric': (lambda s: (1 + 2 * s) ** -0.5, lambda s: -((1 + 2 * s) ** -1.5)),
  'wendland': (
    lambda s: -(np.maximum(1 - wendland_radius(s), 0) ** 3),
    lambda s: 3 * np.maximum(1 - wendland_radius(s), 0) ** 2 / (20 * wendland_radius(s)),
  ),
}
CENTERS = np.random.default_rng(0).normal(size=(7, 3)).astype('f')
COEFFICIENTS = np.random.default_rng(1).normal(size=(7, 1)).astype('f')
SIGMA = 0.8


def closed_form(kernel):
  """Return the Laplacian ∇²f = Σ (K' ∇²s + K'' ‖∇s‖²) c at every center, with ∇²s = D/σ² and ‖∇s‖² = 2s/σ²."""
  s = ((np.float64(CENTERS)[:, None] - np.float64(CENTERS)) ** 2).sum(-1) / (2 * SIGMA**2)
  first, second = SLOPES[kernel]
  return ((first(s) * 3 + second(s) * 2 * s) / SIGMA**2 @ COEFFICIENTS)[:, 0]


@pytest.mark.parametrize('implementation', ['xla', 'plain'])
@pytest.mark.parametrize('kernel', SLOPES)
def test_the_laplacian_at_the_centers_is_the_closed_form(kernel, implementation):
  def f(x):
    options = {'kernel': kernel, 'sigma': SIGMA, 'normalization': 'none', 'implementation': implementation}
    return hbf.hyperbf(x[None], CENTERS, COEFFICIENTS, **options)[0, 0]

  laplacian = jax.jit(jax.vmap(lambda x: jnp.trace(jax.jacrev(jax.grad(f))(x))))
  np.testing.assert_allclose(laplacian(CENTERS), closed_form(kernel), rtol=1e-3, atol=1e-3)
