"""Tests that the sums over two sets of centers, joined by their normalizers, are the sum over all centers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf_plain, partial_sum
from hbf.ops.union import unite

N, A, M, D, V = 5, 5, 7, 4, 3
SOME = np.arange(N)[:, None] > np.arange(A)  # the first point sees no center of the first set


@pytest.mark.parametrize(
  ('kernel', 'mask', 'causal'), [('gaussian', None, False), ('laplacian', None, True), ('gaussian', SOME, False)]
)
def test_two_parts_give_the_values_and_gradients_of_the_whole(kernel, mask, causal):
  """Computed in float64. The second set is one for both images, and all points see it."""
  rng = np.random.default_rng(0)
  shapes = {'points': (2, N, D), 'centers': (2, A, D), 'coefficients': (2, A, V), 'others': (M, D), 'theirs': (M, V)}
  arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()} | {'sigma': np.array(0.8)}

  def united(points, centers, coefficients, others, theirs, sigma):
    basis = RadialBasis(kernel, sigma)
    over = partial_sum(points, centers, coefficients, basis, mask=mask, causal=causal)
    return unite(over, partial_sum(points, others, theirs, basis))

  def whole(points, centers, coefficients, others, theirs, sigma):
    both = (
      jnp.concatenate([one, jnp.broadcast_to(other, (2, *other.shape))], axis=1)
      for one, other in ((centers, others), (coefficients, theirs))
    )
    first = np.tri(N, A, dtype=bool) if causal else np.ones((N, A), bool) if mask is None else mask
    seen = np.concatenate([first, np.ones((N, M), bool)], axis=1)
    return hyperbf_plain(points, *both, RadialBasis(kernel, sigma), seen)

  with jax.enable_x64(True):
    (value, result), (wanted, expected) = (
      jax.jit(jax.value_and_grad(lambda z, f=f: jnp.sum(jnp.sin(f(**z)))))(arrays) for f in (united, whole)
    )
  np.testing.assert_allclose(value, wanted, rtol=1e-12)
  for name in arrays:
    np.testing.assert_allclose(result[name], expected[name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize('distance', [0.0, 100.0])
def test_a_part_whose_normalizer_is_0_in_float32_has_no_weight(distance):
  """A set of centers is so far away that all its K are below e⁻⁵⁰⁰⁰. If both sets are, both have weights."""
  points, centers, values = np.zeros((1, 1), 'f'), np.array([[distance]], 'f'), np.ones((1, 1), 'f')
  near = partial_sum(points, centers, values, RadialBasis('gaussian', 1.0))
  far = partial_sum(points, np.array([[100.0]], 'f'), 0 * values, RadialBasis('gaussian', 1.0))
  np.testing.assert_allclose(unite(near, far), [[1.0 if distance == 0 else 0.5]], rtol=1e-6)
