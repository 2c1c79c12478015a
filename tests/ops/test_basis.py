"""Tests of the radial basis: it is a pytree whose names are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.errors import UserError
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf


def test_it_goes_through_jit_and_grad():
  points, centers = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
  basis = RadialBasis('gaussian', 1.5, metric='diagonal', weights=jnp.ones(3), normalization='layer')

  def total(basis):
    return jnp.sum(hyperbf(points, centers, centers, basis) ** 2)

  np.testing.assert_allclose(jax.jit(total)(basis), total(basis), rtol=1e-6)
  gradient = jax.grad(total)(basis)
  assert gradient.kernel == 'gaussian' and gradient.beta is None
  assert gradient.weights.shape == (3,) and np.isfinite(gradient.sigma)


@pytest.mark.parametrize(
  ('names', 'message'),
  [
    ({'kernel': 'gausian'}, "unknown kernel 'gausian': did you mean 'gaussian'"),
    ({'kernel': 'gaussian', 'metric': 'ful'}, "unknown metric 'ful': did you mean 'full'"),
    ({'kernel': 'gaussian', 'normalization': 'layr'}, "did you mean 'layer'"),
    ({'kernel': 'ball_relu'}, 'use normalization none, not sum'),
  ],
)
def test_wrong_names_are_refused_when_it_is_made(names, message):
  with pytest.raises(UserError, match=message):
    RadialBasis(**names, sigma=1.0)
