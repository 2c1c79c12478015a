"""Tests that, on tokens of norm 1, a HyperBF of soft balls equals an MLP with normalized weights, its control."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params

from hbf.nn.baselines.mlp import MLP
from hbf.nn.hyperbf import HyperBFCenters

D, UNITS = 6, 9
RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.normal(size=(2, 5, D)), jnp.float32)


def normalized(z):
  return z / np.linalg.norm(z, axis=-1, keepdims=True)


def gelu(z):
  return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


PHI = {'ball_relu': ('relu', lambda z: np.maximum(z, 0)), 'ball_gelu': ('gelu', gelu)}


@pytest.mark.parametrize('kernel', PHI)
def test_balls_on_the_sphere_are_hidden_units_with_normalized_weights(kernel):
  """For x and t of norm 1, φ(b − ‖x − t‖²/2σ²) = φ(s x·t + b − s) with s = 1/σ². The modules agree on this."""
  activation, phi = PHI[kernel]
  weights, bias = RNG.normal(size=(UNITS, D)), RNG.normal(size=UNITS)
  coefficients, out_bias, scale = RNG.normal(size=(UNITS, D)), RNG.normal(size=D), 3.0
  x, t = normalized(np.asarray(TOKENS, np.float64)), normalized(weights)
  r2 = ((x[..., None, :] - t) ** 2).sum(-1)
  balls = phi(bias + scale - scale * r2 / 2) @ coefficients + out_bias
  hidden = phi(scale * x @ t.T + bias) @ coefficients + out_bias
  np.testing.assert_allclose(balls, hidden, rtol=1e-12, atol=1e-12)

  mlp = MLP(UNITS, activation=activation, normalize=True)
  params = {
    'hidden': {'kernel': weights.T, 'bias': bias, 'scale': scale},
    'out': {'kernel': coefficients, 'bias': out_bias},
  }
  params = jax.tree.map(lambda z: jnp.asarray(z, jnp.float32), params)
  np.testing.assert_allclose(apply(mlp, params, TOKENS), hidden, rtol=1e-4, atol=1e-4)

  unit = HyperBFCenters(
    UNITS,
    kernel=kernel,
    metric='identity',
    sigma_per='layer',
    normalize_inputs=True,
    normalization='none',
    radius='absolute',
  )
  params = {
    'centers': weights[None],
    'squared_radius': (bias + scale)[None, None],
    'log_sigma': np.full((1, 1, 1), -0.5 * np.log(scale)),
    'coefficients': coefficients[None],
    'bias': out_bias,
  }
  params = jax.tree.map(lambda z: jnp.asarray(z, jnp.float32), params)
  np.testing.assert_allclose(apply(unit, params, TOKENS), hidden, rtol=1e-4, atol=1e-4)


def test_balls_with_linear_coefficients_are_a_gated_mlp_on_tokens_of_norm_root_d():
  """If ‖x‖² = D, silu(β + (‖t‖² + D)/2σ² − ‖x − t‖²/2σ²) (u·x + w) = silu(x·t/σ² + β) (u·x + w), a SwiGLU unit."""
  tokens = jnp.asarray(D**0.5 * normalized(np.asarray(TOKENS, np.float64)), jnp.float32)
  unit = HyperBFCenters(
    UNITS, kernel='ball_silu', metric='identity', sigma_per='layer', normalization='none', coefficients='linear'
  )
  params = random_params(unit, tokens)
  mlp = MLP(UNITS, activation='swiglu')
  gates = np.asarray(params['centers'][0]).T * np.exp(-2 * params['log_sigma'][0, 0, 0])
  kernels = np.concatenate([gates, np.asarray(params['slopes'][0]).T], axis=1)
  biases = np.concatenate([params['depth'][0, 0], params['slope_bias'][0, 0]])
  of_mlp = {
    'hidden': {'kernel': kernels, 'bias': biases},
    'out': {'kernel': params['coefficients'][0], 'bias': params['bias']},
  }
  expected = apply(mlp, of_mlp, tokens)
  np.testing.assert_allclose(apply(unit, params, tokens), expected, rtol=1e-3, atol=1e-3)


def test_the_length_of_a_center_does_not_move_tokens_at_right_angles():
  tokens = jnp.zeros((1, 1, D)).at[0, 0, 0].set(D**0.5)
  unit = HyperBFCenters(1, kernel='ball_gelu', metric='identity', normalization='none')
  params = random_params(unit, tokens)
  for length in (1.0, 5.0):
    params['centers'] = jnp.zeros((1, 1, D)).at[0, 0, 1].set(length)
    _, sown = apply(unit, params, tokens, mutable=['responses'])
    np.testing.assert_allclose(sown['responses']['log_kernels'][0], params['depth'], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('radius', ['relative', 'absolute'])
def test_a_ball_starts_with_about_half_of_the_tokens_in_it(radius):
  tokens = jnp.asarray(RNG.normal(size=(8, 64, D)), jnp.float32)
  unit = HyperBFCenters(UNITS, kernel='ball_relu', normalize_inputs=True, normalization='none', radius=radius)
  params = jax.jit(unit.init)(jax.random.key(0), tokens)['params']
  _, sown = apply(unit, params, tokens, mutable=['responses'])
  inside = (sown['responses']['log_kernels'][0] > 0).mean(axis=(0, 1))
  assert np.all((inside > 0.25) & (inside < 0.75))
  np.testing.assert_array_equal(inside, (sown['responses']['responses'][0] > 0).mean(axis=(0, 1)))


def test_the_scale_of_normalized_weights_starts_at_that_of_a_hyperbf():
  modules = MLP(UNITS, normalize=True), HyperBFCenters(UNITS, normalize_inputs=True, metric='identity')
  params, unit = (jax.jit(module.init)(jax.random.key(0), TOKENS)['params'] for module in modules)
  np.testing.assert_allclose(params['hidden']['scale'], np.exp(-2 * unit['log_sigma'][0, 0, 0]), rtol=1e-5)
