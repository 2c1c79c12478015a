"""Stage 1 over positions alone: its formula in float64, and HyperBF attention without contents as a reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params

from hbf.errors import UserError
from hbf.nn.block import Block
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.positional import PositionalHyperBF
from hbf.ops.fast import attention

B, D, HEADS = 2, 12, 3
STAGE = PositionalHyperBF(HEADS)
GRID = np.mgrid[:3, :4].reshape(2, -1).T.astype(np.float32)


def make(positions=GRID, grid=None):
  """Return random parameters, tokens [B, N, D] and a context with the positions."""
  context = Context(positions=jnp.asarray(positions), grid=grid)
  tokens = jax.random.normal(jax.random.key(0), (B, len(positions), D))
  return random_params(STAGE, tokens, context), tokens, context


@pytest.mark.parametrize('grid', [None, (3, 4)])
def test_the_stage_is_its_formula(grid):
  params, tokens, context = make(grid=grid)
  x, p = np.asarray(tokens, np.float64), jax.tree.map(lambda z: np.asarray(z, np.float64), params)
  values = (x @ p['v']['kernel']).reshape(B, -1, HEADS, D // HEADS)
  apart = GRID[:, None].astype(np.float64) - GRID - p['position_offset'][:, :, None]  # [H, N, N, 2]
  k = np.exp(-(apart**2).sum(-1) / (2 * np.exp(2 * p['position_log_sigma'])))
  mixed = np.einsum('hnm,bmhd->bnhd', k / k.sum(-1, keepdims=True), values).reshape(x.shape)
  expected = mixed @ p['out']['kernel'] + p['out']['bias']
  np.testing.assert_allclose(apply(STAGE, params, tokens, context), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('causal', [False, True])
def test_it_is_attention_without_contents(causal, masked):
  """The reference has queries and keys of 0. The first token has no position, like a class token."""
  params, tokens, context = make(np.concatenate([np.full((1, 2), np.nan), GRID]).astype('f'))
  keys = jnp.arange(tokens.shape[1]) != 2
  mask = jnp.broadcast_to(keys, (B, 1, keys.size)) if masked else None
  context = Context(positions=context.positions, causal=causal, mask=mask)
  contents = jnp.zeros((D, 2 * D))
  same = {name: params[name] for name in ('out', 'position_offset', 'position_log_sigma')}
  same |= {'log_sigma': jnp.zeros((HEADS, 1, 1)), 'qkv': {'kernel': jnp.hstack([contents, params['v']['kernel']])}}
  reference = apply(HyperBFAttention(HEADS, relative_positions='gaussian'), same, tokens, context)
  np.testing.assert_allclose(apply(STAGE, params, tokens, context), reference, rtol=1e-5, atol=1e-6)


def test_with_many_tokens_every_example_keeps_its_own_mask(monkeypatch):
  params, tokens, context = make()
  keys = np.random.default_rng(0).random((B, 1, len(GRID))) < 0.6
  context = Context(positions=context.positions, mask=jnp.asarray(keys))
  few = apply(STAGE, params, tokens, context)
  monkeypatch.setattr(attention, '_MOST_PAIRS', 0)
  np.testing.assert_allclose(apply(STAGE, params, tokens, context), few, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sums_over_rows_and_columns_have_the_same_gradients(dtype):
  params, tokens, context = make(grid=(3, 4))
  stage = PositionalHyperBF(HEADS, dtype=jnp.dtype(dtype))

  def gradients(context):
    loss = lambda params: jnp.sum(jnp.sin(stage.apply({'params': params}, tokens, context)))  # noqa: E731
    return jax.jit(jax.grad(loss))(params)

  found, expected = gradients(context), gradients(Context(positions=context.positions))
  rtol, atol = (1e-4, 1e-5) if dtype == 'float32' else (0.1, 0.05)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)


@pytest.mark.parametrize('grid', [(2, 40), (40, 2)])
def test_a_short_type_may_need_more_coordinates_for_one_axis_than_for_the_other(grid):
  """Two numbers in bfloat16 hold a coordinate of an axis with up to 32 positions. Longer axes need three."""
  params, tokens, context = make(np.mgrid[: grid[0], : grid[1]].reshape(2, -1).T.astype('f'), grid)
  found = apply(PositionalHyperBF(HEADS, dtype=jnp.bfloat16), params, tokens, context)
  np.testing.assert_allclose(found, apply(STAGE, params, tokens, context), atol=0.05)


@pytest.mark.parametrize('context', [{'causal': True}, {'mask': jnp.tri(12, dtype=bool)}])
def test_a_mask_of_the_patches_of_an_image_holds(context):
  params, tokens, plain = make()
  context = Context(positions=plain.positions, **context)
  found = apply(STAGE, params, tokens, dataclasses.replace(context, grid=(3, 4)))
  np.testing.assert_array_equal(found, apply(STAGE, params, tokens, context))


def test_tokens_without_positions_are_refused():
  with pytest.raises(UserError, match='stage 1 positional needs the positions of the tokens'):
    Block(STAGE).init(jax.random.key(0), jnp.ones((1, 4, D)))


def test_a_grid_of_other_tokens_is_refused():
  with pytest.raises(UserError, match='grid of the Context has 3×5 patches, and there are 12 tokens'):
    make(grid=(3, 5))
