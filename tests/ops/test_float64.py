"""Tests that float64 arrays are computed in float64 if JAX has this type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference
from ops.keywords import hyperbf, hyperbf_plain

from hbf.errors import UserError
from hbf.ops.fast import sums
from hbf.ops.fast.attention import attention

N, A, D, V = 5, 40, 6, 3  # more centers than points and values have dimensions, so that blocks of points are computed


CAUSAL = {'kernel': 'gaussian', 'causal': True}


def make(seed=0):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=shape) for shape in ((N, D), (A, D), (A, V))], rng.normal(size=(D, D)) / D**0.5


@pytest.mark.parametrize(
  ('kernel', 'normalization', 'sigma'),
  [
    ('gaussian', 'sum', 1.3),  # attention
    ('gaussian', 'none', np.linspace(1, 2, A)[None]),
    ('laplacian', 'layer', 1.3),
    ('rational_quadratic', 'rms', np.linspace(1, 2, A)[None]),
  ],
)
def test_the_operator(kernel, normalization, sigma, monkeypatch):
  monkeypatch.setattr(sums, '_PAIRS', 2 * A)
  arrays, weights = make()
  how = {'kernel': kernel, 'normalization': normalization, 'metric': 'full', 'weights': weights, 'sigma': sigma}
  expected = reference.hyperbf(*arrays, **how | {'sigma': np.broadcast_to(sigma, (N, A))})
  with jax.enable_x64(True):

    def gradients(implementation):
      def total(arrays, weights, sigma):
        out = implementation(*arrays, **how | {'weights': weights, 'sigma': sigma})
        return jnp.sum(jnp.sin(out)), out

      return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(arrays, weights, sigma)

    (found, out), (defined, plain) = gradients(hyperbf), gradients(hyperbf_plain)
    for value in (out, plain):
      assert value.dtype == jnp.float64
      np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-12)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(defined), strict=True):
      assert one.dtype == jnp.float64
      np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_direct_kernels_and_causal_sums():
  arrays, _ = make()
  r2 = reference.squared_distances(*arrays[:2], 'identity', None)
  seen = np.tri(N, A) > 0
  ball = np.maximum(2 - r2 / 2, 0) @ arrays[2]
  causal = np.where(seen, np.exp(-r2 / 2), 0) @ arrays[2]
  with jax.enable_x64(True):
    for expected, how in (ball, {'kernel': 'ball_relu', 'squared_radius': 2.0}), (causal, CAUSAL):
      found = jax.jit(functools.partial(hyperbf, sigma=1.0, normalization='none', **how))(*arrays)
      np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_softmax_attention():
  (queries, keys, values), _ = make()
  expected = reference.softmax(queries @ keys.T / D**0.5) @ values
  with jax.enable_x64(True):
    np.testing.assert_allclose(jax.jit(attention)(queries, keys, values), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize('implementation', ['xla', 'plain'])
def test_one_array_of_float64_is_enough_and_the_coefficients_say_the_type_of_the_output(implementation, monkeypatch):
  monkeypatch.setattr(sums, '_PAIRS', 2 * A)
  (points, centers, coefficients), _ = make()
  points, centers = points.astype('f'), centers.astype('f')
  how = {
    'kernel': 'gaussian',
    'normalization': 'layer',
    'sigma': np.full((N, A), 1.3),
    'metric': 'identity',
    'weights': None,
  }
  unit = functools.partial(hyperbf, **how | {'sigma': 1.3, 'implementation': implementation})
  with jax.enable_x64(True):
    mixed = jax.jit(unit)(points, centers, coefficients)
    np.testing.assert_allclose(mixed, reference.hyperbf(points, centers, coefficients, **how), rtol=1e-11, atol=1e-12)
    # Nothing asks for float64 here.
    short = jax.value_and_grad(lambda *z: unit(*z).sum(), (0, 1, 2))
    out, gradients = jax.eval_shape(short, points, centers, coefficients.astype('f'))
    assert {z.dtype for z in (out, *gradients)} == {jnp.dtype('float32')}
    # Numbers of float64 whose coefficients are float32, as parameters may be.
    short = jax.eval_shape(short, np.float64(points), centers, coefficients.astype('f'))
    assert [z.dtype for z in (short[0], short[1][0])] == ['float32', 'float64']


def test_pallas_refuses_it():
  arrays, _ = make()
  with jax.enable_x64(True), pytest.raises(UserError, match='implementation pallas computes in float32'):
    hyperbf(*arrays, kernel='gaussian', normalization='layer', sigma=1.0, implementation='pallas')
