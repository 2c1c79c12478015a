"""Tests of gMLP, aMLP, MLP-Mixer, pooling and identity against the equations of the papers in float64."""

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params
from ops import reference

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import build_model, count_parameters
from hbf.nn.baselines.gmlp import GATES, GatedMLP
from hbf.nn.baselines.token_mixing import AveragePooling, Identity, TokenMLP
from hbf.nn.context import Context
from hbf.options import OptionError

B, N, D, HIDDEN, ATTENTION = 2, 5, 8, 6, 3


def make_tokens(shape=(B, N, D), seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dense(z, layer):
  return z @ np.asarray(layer['kernel'], np.float64) + layer['bias']


def gelu(z):
  return 0.5 * z * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))


def make_gmlp(gate='split', attention=0):
  return GatedMLP(HIDDEN, gate, attention, 'gelu_erf', 1e-6)


def gated(x, params, gate, attention, seen):
  """Compute the unit for one image [N, D] as in the paper's pseudo-code. Row i of `seen` says which tokens i sees."""
  z = gelu(dense(x, params['in']))
  kept, gating = np.split(z, 2, axis=-1) if gate == 'split' else (z, z)
  spatial = {**params['spatial'], 'kernel': params['spatial']['kernel'] * seen.T}
  f = dense(reference.layer_norm(gating, **params['norm']).T, spatial).T
  if attention:
    q, k, v = np.split(dense(x, params['attention_qkv']), 3, axis=-1)
    f = f + dense(
      reference.softmax(np.where(seen, q @ k.T / math.sqrt(attention), -np.inf)) @ v, params['attention_out']
    )
  s = {'linear': f, 'additive': kept + f, 'multiplicative': kept * f, 'split': kept * f}[gate]
  return dense(s, params['out'])


@pytest.mark.parametrize('attention', [0, ATTENTION])
@pytest.mark.parametrize('gate', GATES)
def test_gmlp_equals_the_formula(gate, attention):
  module, tokens = make_gmlp(gate, attention), make_tokens()
  params, of_all = random_params(module, tokens), np.ones((N, N), bool)
  shown = np.array([True, True, False, True, True])
  contexts = [
    (Context(), of_all),
    (Context(causal=True), np.tril(of_all)),
    (Context(causal=True, mask=jnp.asarray(shown)), np.tril(of_all) & shown),
  ]
  for context, seen in contexts:
    expected = [gated(x, params, gate, attention, seen) for x in np.asarray(tokens, np.float64)]
    np.testing.assert_allclose(module.apply({'params': params}, tokens, context), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(('gate', 'z_of'), [('additive', lambda z: z), ('multiplicative', lambda z: z)])
def test_gmlp_starts_as_a_feed_forward_of_each_token(gate, z_of):
  module, tokens = make_gmlp(gate), make_tokens()
  params = module.init(jax.random.key(0), tokens)['params']
  plain = dense(z_of(gelu(dense(np.asarray(tokens, np.float64), params['in']))), params['out'])
  np.testing.assert_allclose(apply(module, params, tokens), plain, atol=1e-4)


def test_a_split_gate_starts_as_a_feed_forward_of_its_first_half():
  module, tokens = make_gmlp('split'), make_tokens()
  params = module.init(jax.random.key(0), tokens)['params']
  first = np.split(gelu(dense(np.asarray(tokens, np.float64), params['in'])), 2, axis=-1)[0]
  np.testing.assert_allclose(apply(module, params, tokens), dense(first, params['out']), atol=1e-4)


def test_a_linear_gate_mixes_tokens_from_the_start():
  module, tokens = make_gmlp('linear'), make_tokens()
  variables = module.init(jax.random.key(0), tokens)
  changed = module.apply(variables, tokens.at[:, 0].multiply(-1)) - module.apply(variables, tokens)
  assert np.abs(changed[:, 1:]).max() > 0.01


def test_token_mlp_equals_the_formula():
  """The formula is U = W₂ GELU(W₁ X) over the tokens, with the same W₁ and W₂ for every channel."""
  module, tokens = TokenMLP(HIDDEN, 'gelu_erf'), make_tokens()
  params = random_params(module, tokens)
  columns = np.asarray(tokens, np.float64).swapaxes(1, 2)
  expected = dense(gelu(dense(columns, params['hidden'])), params['out']).swapaxes(1, 2)
  np.testing.assert_allclose(apply(module, params, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('hidden', [1, 3, 5, 11])
def test_units_of_a_causal_token_mlp_belong_to_the_tokens_in_order(hidden):
  """Each unit belongs to a token. It reads the tokens up to this one, and writes to this one and later ones."""
  module, tokens = TokenMLP(hidden, 'gelu_erf'), make_tokens()
  params = random_params(module, tokens)
  columns = np.asarray(tokens, np.float64).swapaxes(1, 2)
  expected = np.zeros_like(columns) + params['out']['bias']
  for unit in range(hidden):
    own = math.floor(unit * N / hidden)
    first, second = (params['hidden']['kernel'][: own + 1, unit], params['out']['kernel'][unit, own:])
    response = gelu(columns[..., : own + 1] @ np.asarray(first, np.float64) + params['hidden']['bias'][unit])
    expected[..., own:] += response[..., None] * second
  result = apply(module, params, tokens, Context(causal=True))
  np.testing.assert_allclose(result, expected.swapaxes(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('window', 'sides'), [(1, None), (3, None), (5, None), (3, (2, 8))])
def test_pooling_is_the_mean_of_the_neighbors_within_the_image_minus_the_patch(window, sides):
  (rows, columns), reach = sides or (4, 4), window // 2
  tokens = make_tokens((B, rows * columns, D))
  grid = np.asarray(tokens, np.float64).reshape(B, rows, columns, D)
  expected = np.zeros_like(grid)
  for i in range(rows):
    for j in range(columns):
      near = grid[:, max(i - reach, 0) : i + reach + 1, max(j - reach, 0) : j + reach + 1]
      expected[:, i, j] = near.mean(axis=(1, 2)) - grid[:, i, j]
  result = AveragePooling(window).apply({}, tokens, Context(grid=sides))
  np.testing.assert_allclose(result, expected.reshape(tokens.shape), atol=1e-5)


def test_identity_changes_nothing_and_learns_nothing():
  tokens = make_tokens()
  assert Identity().init(jax.random.key(0), tokens) == {}
  np.testing.assert_array_equal(Identity().apply({}, tokens), tokens)


@pytest.mark.parametrize('length', [2, 5, 17])
def test_pooling_needs_a_square_of_patches(length):
  with pytest.raises(UserError, match=rf'here are {length} tokens: .*pool mean'):
    AveragePooling(3).apply({}, make_tokens((B, length, D)))


@pytest.mark.parametrize(
  'context',
  [Context(grid=(3, 5)), Context(positions=jnp.arange(16.0)[:, None]), Context(positions=jnp.full((16, 2), jnp.nan))],
  ids=['a class token', 'a text', 'no positions'],
)
def test_pooling_takes_no_square_number_of_other_tokens_for_an_image(context):
  with pytest.raises(UserError, match='pooling needs a grid of as many patches as tokens'):
    AveragePooling(3).apply({}, make_tokens((B, 16, D)), context)


@pytest.mark.parametrize('window', [0, 2])
def test_pooling_needs_an_odd_window(window):
  with pytest.raises(OptionError, match=f'window is {window}: expected an odd number'):
    AveragePooling(window)


@pytest.mark.parametrize('module', [make_gmlp(), TokenMLP(HIDDEN, 'gelu')], ids=['gmlp', 'token_mlp'])
def test_another_number_of_tokens_is_refused_with_both_numbers(module):
  variables = {'params': random_params(module, make_tokens())}
  with pytest.raises(UserError, match=r'has parameters for 5 tokens, and here are 9: .*of the size it was made for'):
    module.apply(variables, make_tokens((B, 9, D)))


@pytest.mark.parametrize(('option', 'near'), [({'gate': 'splt'}, 'split'), ({'activation': 'gelu_er'}, 'gelu_erf')])
def test_unknown_options_name_the_nearest(option, near):
  with pytest.raises(OptionError, match=f"did you mean '{near}'"):
    make_gmlp().clone(**option)


# Millions of parameters at 224×224 images, and how far from them: Liu et al. 2021, Table 2 (timm's modules have 5.87,
# 19.42 and 73.08); Tolstikhin et al. 2021, Table 1, in whole millions and without a head.
PUBLISHED = [
  ('gmlp', 'tiny', 16, 1000, 5.9, 0.006),
  ('gmlp', 'small', 16, 1000, 19.5, 0.006),
  ('gmlp', 'base', 16, 1000, 73.4, 0.006),
  ('gmlp', 'tiny', 16, 1000, 5.87, 0.001),
  ('gmlp', 'small', 16, 1000, 19.42, 0.001),
  ('gmlp', 'base', 16, 1000, 73.08, 0.001),
  ('mixer', 'small', 32, 0, 19, 0.03),
  ('mixer', 'small', 16, 0, 18, 0.03),
  ('mixer', 'base', 32, 0, 60, 0.01),
  ('mixer', 'base', 16, 0, 59, 0.01),
]


@pytest.mark.parametrize(('model', 'size', 'patch', 'classes', 'millions', 'within'), PUBLISHED)
def test_published_sizes_have_the_published_numbers_of_parameters(model, size, patch, classes, millions, within):
  config = resolve(importlib.import_module('configs.image_folder').get_config(f'model={model},size={size}')).model
  assert (config.pool, config.positions) == ('mean', 'none')
  config.patch = patch
  count = count_parameters(build_model(config, max(classes, 1)), (224, 224, 3)) / 1e6
  assert abs(count - millions) < within * millions


def test_amlp_is_gmlp_with_tiny_attention():
  gmlp, amlp = (resolve(make_config(f'model={model}', {'name': 'cifar10'})).model for model in ('gmlp', 'amlp'))
  assert (gmlp.stage1.attention, amlp.stage1.attention) == (0, 64)
  amlp.update(name='gmlp')
  amlp.stage1.attention = 0
  assert amlp.to_dict() == gmlp.to_dict()


def test_the_unified_model_is_one_hyperbf_over_tokens_and_centers():
  config = resolve(make_config('model=unified', {'name': 'cifar10'})).model
  params = jax.eval_shape(
    lambda images: build_model(config, 10).init(jax.random.key(0), images, train=False), jnp.zeros((1, 32, 32, 3))
  )['params']
  assert set(params['block0']) == {'norm_stage1', 'stage1'}
  assert params['block0']['stage1']['memory_centers'].shape == (4, 256, 16)
