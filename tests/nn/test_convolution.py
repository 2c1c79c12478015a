"""Stage 1 as a separable convolution, and the sums over a grid: their formulas in float64."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import random_params
from scipy import ndimage

from hbf.errors import UserError
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.context import Context
from hbf.nn.grid_sums import sums_over_grid

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
