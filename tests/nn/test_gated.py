"""Tests of the gated HyperBF against its formula in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params
from ops import reference

from hbf.errors import UserError
from hbf.nn.context import Context
from hbf.nn.gated import GatedHyperBF, GatedSoftmax

B, N, D, H = 2, 6, 8, 4
RELATIVE_POSITIONS = np.mgrid[:2, :3].reshape(2, -1).T.astype(np.float32)
CONTEXT = Context(positions=jnp.asarray(RELATIVE_POSITIONS))


def make(**changes):
  module = GatedHyperBF(**{'heads': H, 'hidden': 10, 'activation': 'relu'} | changes)
  tokens = jnp.asarray(np.random.default_rng(0).normal(size=(B, N, D)), jnp.float32)
  return module, tokens, random_params(module, tokens, CONTEXT)


def by_the_formula(module, params, tokens):
  """Compute the gated HyperBF image by image, head by head. A head has up to ⌈hidden/H⌉ of the values, in order."""
  params, tokens = jax.tree.map(lambda z: np.asarray(z, np.float64), (params, tokens))
  each = -(-module.hidden // H)
  joined = np.zeros((B, N, module.hidden))
  q, k = np.split(tokens @ params['qk']['kernel'], 2, axis=-1)
  gate, v = np.split(np.maximum(tokens @ params['in']['kernel'] + params['in']['bias'], 0), 2, axis=-1)
  for b, h in itertools.product(range(B), range(H)):
    of_head, values = slice(h * D // H, (h + 1) * D // H), slice(h * each, (h + 1) * each)
    sigma = np.exp(params['log_sigma'][h, 0, 0])
    s = reference.squared_distances(q[b, :, of_head], k[b, :, of_head]) / (2 * sigma**2)
    if module.relative_positions == 'gaussian':
      away = RELATIVE_POSITIONS[:, None] - RELATIVE_POSITIONS - params['position_offset'][h, 0]
      s += np.square(away).sum(axis=-1) / np.exp(2 * params['position_log_sigma'][h, 0, 0]) / 2
    responses = np.exp(-s)
    joined[b, :, values] = responses / responses.sum(axis=-1, keepdims=True) @ v[b, :, values]
  return gate * joined @ params['out']['kernel'] + params['out']['bias']


@pytest.mark.parametrize('changes', [{}, {'relative_positions': 'gaussian'}, {'hidden': 12}, {'hidden': 1}], ids=str)
def test_the_unit_equals_its_formula(changes):
  """This holds also if the number of heads does not divide the number of values."""
  module, tokens, params = make(**changes)
  out = apply(module, params, tokens, CONTEXT)
  np.testing.assert_allclose(out, by_the_formula(module, params, tokens), rtol=1e-4, atol=1e-5)


def test_queries_and_keys_of_gated_softmax_may_have_a_bias():
  tokens, options = make()[1], {'heads': H, 'hidden': 10}
  without, with_bias = (GatedSoftmax(**options, qkv_bias=bias) for bias in (False, True))
  params = random_params(with_bias, tokens)
  assert {*params['qk']} == {'kernel', 'bias'} and {*random_params(without, tokens)['qk']} == {'kernel'}
  zeros = params | {'qk': {**params['qk'], 'bias': jnp.zeros(2 * D)}}
  expected = apply(without, params | {'qk': {'kernel': params['qk']['kernel']}}, tokens)
  np.testing.assert_allclose(apply(with_bias, zeros, tokens), expected, rtol=1e-5, atol=1e-6)
  assert not np.allclose(apply(with_bias, params, tokens), expected, rtol=1e-2)


def test_a_closed_gate_lets_nothing_through():
  module, tokens, params = make()
  params['in']['bias'][:10] = -1e6
  np.testing.assert_array_equal(apply(module, params, tokens), np.broadcast_to(params['out']['bias'], tokens.shape))


def test_options_that_can_not_be_are_user_errors():
  tokens = jnp.ones((B, N, D))
  for changes, message in (({'heads': 3}, 'not divisible by 3 heads'), ({'activation': 'swiglu'}, 'activation')):
    with pytest.raises(UserError, match=message):
      GatedHyperBF(**{'heads': H, 'hidden': 10} | changes).init(jax.random.key(0), tokens)
