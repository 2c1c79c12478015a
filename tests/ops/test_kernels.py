import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.ops.kernels import KERNELS

# log K as functions of r and σ, as the literature writes them.
CLOSED_FORMS = {
  'gaussian': lambda r, sigma: -(r**2) / (2 * sigma**2),
  'laplacian': lambda r, sigma: -r / sigma,
  'rational_quadratic': lambda r, sigma: -np.log(1 + r**2 / (2 * sigma**2)),
  'inverse_multiquadric': lambda r, sigma: np.log(1 / np.sqrt(1 + r**2 / sigma**2)),
}


def test_every_kernel_has_a_closed_form_here():
  assert set(KERNELS) == set(CLOSED_FORMS)


@pytest.mark.parametrize('sigma', [0.3, 4.0])
@pytest.mark.parametrize('kernel', CLOSED_FORMS)
def test_logarithm_equals_closed_form(kernel, sigma):
  r = np.geomspace(1e-3, 1e4, 50)
  result = KERNELS[kernel](jnp.asarray(r**2 / (2 * sigma**2), jnp.float32))
  np.testing.assert_allclose(result, CLOSED_FORMS[kernel](r, sigma), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kernel', KERNELS)
def test_is_one_at_zero_and_decreasing(kernel):
  log_k = np.asarray(KERNELS[kernel](jnp.asarray([0, *np.geomspace(1e-6, 1e8, 60)], jnp.float32)))
  assert log_k[0] == 0
  assert np.all(np.diff(log_k) < 0)


@pytest.mark.parametrize('kernel', KERNELS)
def test_gradient_is_finite_at_zero_and_far(kernel):
  s = jnp.asarray([0.0, 1e-38, 1e-12, 1e9], jnp.float32)
  assert np.all(np.isfinite(jax.vmap(jax.grad(KERNELS[kernel]))(s)))


def test_laplacian_subgradient_at_the_kink_is_zero():
  assert jax.grad(KERNELS['laplacian'])(0.0) == 0


@pytest.mark.parametrize('kernel', [kernel for kernel in KERNELS if kernel != 'gaussian'])
def test_negative_arguments_count_as_zero(kernel):
  """With metric bilinear, s may be negative. Only the Gaussian is defined there."""
  s = jnp.asarray([-3.0, -1e4], jnp.float32)
  assert np.all(np.asarray(KERNELS[kernel](s)) == 0)
  assert np.all(np.isfinite(jax.vmap(jax.grad(KERNELS[kernel]))(s)))
