"""Stage 1 as a separable convolution, and the sums over a grid: their formulas in float64."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params
from scipy import ndimage

from hbf.errors import UserError
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.context import Context
from hbf.nn.grid_sums import sums_over_grid
from hbf.nn.positional import PositionalHyperBF

B, D, HEADS, GRID = 2, 12, 3, (4, 5)
RANDOM = np.random.default_rng(0)


def make_tokens(count=GRID[0] * GRID[1]):
  return jnp.asarray(RANDOM.normal(size=(B, count, D)), 'f')


@pytest.mark.parametrize('window', [1, 3, 11])
def test_the_stage_is_its_formula(window):
  """A filter may also be longer than the grid."""
  stage, tokens, context = SeparableConvolution(HEADS, window), make_tokens(), Context(grid=GRID)
  params = random_params(stage, tokens, context)
  values = np.asarray(tokens, np.float64) @ params['v']['kernel']
  mixed = np.zeros((B, *GRID, D))
  for channel in range(D):
    rows, columns = np.asarray(params['filters'], np.float64)[:, channel // (D // HEADS)]
    for image in range(B):
      patches = values[image, :, channel].reshape(GRID)
      mixed[image, ..., channel] = ndimage.correlate(patches, np.outer(rows, columns), mode='constant')
  expected = mixed.reshape(B, -1, D) @ params['out']['kernel'] + params['out']['bias']
  np.testing.assert_allclose(stage.apply({'params': params}, tokens, context), expected, rtol=1e-4, atol=1e-5)


def test_filters_that_start_as_gaussians_are_stage_1_positional_inside_the_image():
  """At the edge, only `positional` divides by the sum of the weights within the image. Heads look one patch away."""
  grid = (11, 12)
  stage, tokens = SeparableConvolution(HEADS, 7, 'gaussian'), make_tokens(math.prod(grid))
  positions = jnp.asarray(list(np.ndindex(grid)), 'f')
  of_positions, context = PositionalHyperBF(HEADS), Context(positions=positions, grid=grid)
  params = random_params(of_positions, tokens, context)
  filters, start = (
    jax.jit(lambda key, each=each: each.init(key, tokens, context)['params'])(jax.random.key(0))
    for each in (stage, of_positions)
  )
  params |= {key: start[key] for key in ('position_offset', 'position_log_sigma')}
  expected = apply(of_positions, params, tokens, context)
  free = {'filters': filters['filters'], 'v': params['v'], 'out': params['out']}
  found = apply(stage, free, tokens, context)
  inside = (slice(None), slice(4, -4), slice(4, -4))
  found, expected = (np.asarray(z).reshape(B, *grid, D)[inside] for z in (found, expected))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_random_filters_have_the_standard_deviation_of_the_docstring():
  stage = SeparableConvolution(12, 9)
  tokens, context = make_tokens(400), Context(grid=(20, 20))
  filters = stage.init(jax.random.key(0), tokens, context)['params']['filters']
  assert float(filters.std()) == pytest.approx(1 / 3, rel=0.1)


def test_a_start_of_filters_stays_finite_if_no_filter_reaches_the_patch_of_its_head():
  stage, tokens, context = SeparableConvolution(400, 1, 'gaussian'), jnp.ones((1, 4, 400)), Context(grid=(2, 2))
  filters = stage.init(jax.random.key(0), tokens, context)['params']['filters']
  np.testing.assert_allclose(filters, 1)


def test_sums_over_a_grid_are_those_with_products_of_weights():
  values = RANDOM.normal(size=(B, GRID[0] * GRID[1], HEADS, 4))
  of_rows, of_columns = (RANDOM.normal(size=(HEADS, side, side)) for side in GRID)
  weights = np.einsum('hir,hjc->hijrc', of_rows, of_columns).reshape(HEADS, values.shape[1], values.shape[1])
  expected = np.einsum('hnm,bmhd->bnhd', weights, values)
  found = sums_over_grid(*(jnp.asarray(z, 'f') for z in (values, of_rows, of_columns)))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('grid', [None, (4, 4)])
def test_tokens_that_are_not_the_patches_of_a_grid_are_refused(grid):
  with pytest.raises(UserError, match=rf'here are 20 tokens and grid {re.escape(str(grid))}: .*pool mean'):
    random_params(SeparableConvolution(HEADS), make_tokens(), Context(grid=grid))
