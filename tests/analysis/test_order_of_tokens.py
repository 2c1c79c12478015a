"""Tests of the heads' distances against weights computed in float64, and of the Toeplitz share."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import random_params

from hbf.analysis import token_order
from hbf.analysis.report import text_page
from hbf.models.language import LanguageModel
from hbf.nn.registry import make_stages, stage_options
from hbf.nn.trunk import Trunk

V, N, D, H = 11, 8, 8, 2
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (3, N)), jnp.int32)


def make(name, depth=2, causal=True, **options):
  first, second = stage_options(name, 16)
  trunk = Trunk(depth, *make_stages(name, H, first | options, second))
  model = LanguageModel(trunk, V, N, D, causal=causal)
  return model, random_params(model, TOKENS, train=False)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('name', ['softmax+mlp', 'hyperbf+hyperbf'])
def test_distances_are_those_of_the_weights(name, causal):
  """The test compares the first block, because its input is the embedded tokens."""
  model, params = make(name, causal=causal)
  found = token_order.distances(model, params, TOKENS)
  assert list(found) == ['block0', 'block1']
  p = jax.tree.map(lambda z: np.asarray(z, np.float64), params)
  x = p['embedding']['embedding'][np.asarray(TOKENS)] + p['positions']
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  x = x * p['block0']['norm_stage1']['scale'] + p['block0']['norm_stage1']['bias']
  q, k, _ = (z.reshape(3, N, H, D // H) for z in np.split(x @ p['block0']['stage1']['qkv']['kernel'], 3, axis=-1))
  if name.startswith('softmax'):
    logits = np.einsum('bihd,bjhd->bhij', q, k) / np.sqrt(D / H)
  else:
    squared = np.square(q[:, :, None] - k[:, None]).sum(-1).transpose(0, 3, 1, 2)
    logits = -squared / (2 * np.exp(2 * p['block0']['stage1']['log_sigma']))
  logits = np.where(np.tri(N, dtype=bool), logits, -np.inf) if causal else logits
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  away = np.abs(np.subtract.outer(np.arange(N), np.arange(N)))
  expected = (weights * away).sum(-1)[:, :, N // 2 :].mean(axis=(0, 2))
  np.testing.assert_allclose(found['block0'], expected, rtol=1e-4)


def test_a_stage_without_attention_weights_is_said_on_the_page():
  """Linear attention has queries and keys, but its weights are never computed."""
  model, params = make('linear+none')
  run = types.SimpleNamespace(model=model, params=params, windows=lambda split, count: np.zeros((1, N + 1), int))
  assert 'is not softmax or HyperBF attention' in text_page._heads(run).numbers['lacks']


def test_stages_without_heads_have_no_distances():
  model, params = make('gmlp+none')
  assert token_order.distances(model, params, TOKENS) == {}
  matrices = token_order.spatial(params, causal=True)
  kernel = np.asarray(params['block0']['stage1']['spatial']['kernel'])
  assert np.isnan(matrices['block0'][2, 3]) and matrices['block0'][3, 2] == pytest.approx(kernel[2, 3])


def test_the_share_of_toeplitz_matrices_is_1_and_of_random_ones_little():
  random = np.random.default_rng(0)
  diagonals, noise = random.normal(size=199), random.normal(size=(100, 100))
  toeplitz = diagonals[np.subtract.outer(np.arange(100), np.arange(100)) + 99]
  assert token_order.toeplitz_share(toeplitz) == pytest.approx(1)
  assert token_order.toeplitz_share(noise) == pytest.approx(199 / 10_000, abs=0.01)
  assert token_order.toeplitz_share(toeplitz + noise) == pytest.approx(0.5, abs=0.1)
  lower = np.where(np.tri(100, dtype=bool), toeplitz, np.nan)
  assert token_order.toeplitz_share(lower) == pytest.approx(1)


def test_the_table_names_sigmas_of_old_results_like_those_of_new_ones():
  old = {'blocks': {'block0': {'width': [2.0], 'place_width': [3.0], 'place_offset': [4.0], 'distance': [1.0]}}}
  new = {'blocks': {'block0': {'sigma': [2.0], 'position_sigma': [3.0], 'position_offset': [4.0], 'distance': [1.0]}}}
  assert token_order.table(old) == token_order.table(new)
