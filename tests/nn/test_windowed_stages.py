"""Stage 1 in windows: it is the stage over all tokens, with a mask that hides the tokens of other windows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply, random_params

from hbf.errors import UserError
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.block import Block
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.positional import PositionalHyperBF
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk
from hbf.nn.windows import in_windows

B, D = 2, 12
RANDOM = np.random.default_rng(0)
STAGES = {
  'softmax': SoftmaxAttention(3, relative_positions='gaussian'),
  'hyperbf': HyperBFAttention(3, relative_positions='adaptive', memory=2),
  'positional': PositionalHyperBF(3),
}


def make_tokens(grid):
  return jnp.asarray(RANDOM.normal(size=(B, grid[0] * grid[1], D)), 'f')


def context_of(grid):
  return Context(positions=jnp.asarray(list(np.ndindex(grid)), 'f'), grid=grid)


def same_window(grid, window, shifted):
  """Return booleans [N, N], True where two patches are in the same window."""
  found = np.ones((grid[0] * grid[1],) * 2, bool)
  for places, side in zip(np.indices(grid).reshape(2, -1), grid, strict=True):
    windows = (places - window // 2 if shifted and window < side else places) // window
    found &= windows[:, None] == windows
  return found


WINDOWS = [((4, 8), 4, False), ((4, 8), 4, True), ((6, 9), 3, True), ((4, 4), 8, True), ((6, 4), 2, True)]
# Windows do not know which stage they are given: one stage in all of them, and the others in two.
CASES = [
  pytest.param(name, *case, marks=() if name == 'softmax' or case in (WINDOWS[1], WINDOWS[4]) else pytest.mark.slow)
  for name in STAGES
  for case in WINDOWS
]


@pytest.mark.parametrize(('name', 'grid', 'window', 'shifted'), CASES)
def test_a_stage_in_windows_is_the_stage_with_a_mask(name, grid, window, shifted):
  stage, tokens, context = STAGES[name], make_tokens(grid), context_of(grid)
  params = random_params(stage, tokens, context)
  masked = dataclasses.replace(context, mask=jnp.asarray(same_window(grid, window, shifted)))

  @jax.jit
  def windowed(params):
    return in_windows(lambda *call: stage.apply({'params': params}, *call), tokens, context, window, shifted)

  np.testing.assert_allclose(windowed(params), apply(stage, params, tokens, masked), rtol=1e-4, atol=1e-5)


def test_a_stage_without_masks_works_on_each_window_alone():
  grid, stage = (4, 8), SeparableConvolution(3)
  tokens, half = make_tokens(grid), context_of((4, 4))
  params = random_params(Block(stage, window=4), tokens, context_of(grid))
  found = apply(Block(stage, window=4), params, tokens, context_of(grid)).reshape(B, *grid, D)
  images = tokens.reshape(B, *grid, D)
  for part in (slice(0, 4), slice(4, 8)):
    expected = apply(Block(stage), params, images[:, :, part].reshape(B, 16, D), half)
    np.testing.assert_allclose(found[:, :, part].reshape(B, 16, D), expected, rtol=1e-4, atol=1e-5)


def reached(trunk, token):
  """Return the tokens of an 8×8 grid, or of the merged one, that change with a token."""
  grid = (8, 8)
  tokens, context = make_tokens(grid), context_of(grid)
  params = random_params(trunk, tokens, context)
  changed = tokens.at[:, token[0] * 8 + token[1]].set(RANDOM.normal(size=D))
  both = [apply(trunk, params, z, context) for z in (tokens, changed)]
  side = round(both[0].shape[1] ** 0.5)
  return np.abs(both[0] - both[1]).max(axis=(0, 2)).reshape(side, side) > 1e-6


def make_trunk(**options):
  stage1, stage2 = make_stages('vit', 2, {}, {'hidden': 6})
  return Trunk(stage1=stage1, stage2=stage2, **options)


def test_a_second_block_passes_a_token_on_to_the_windows_beside_its_own():
  one = reached(make_trunk(depth=1, window=4), (3, 3))
  assert one[:4, :4].all() and one.sum() == 16
  two = reached(make_trunk(depth=2, window=4), (3, 3))
  assert two[:6, :6].all() and two.sum() == 36
  assert reached(make_trunk(depth=3, window=4), (3, 3)).all()


def test_each_resolution_begins_with_windows_that_are_not_moved():
  """Four merged tokens a side: the window of 2 at the top left has the merged tokens that block 0 reaches."""
  found = reached(make_trunk(depth=2, merge=(1,), window=2), (1, 1))
  assert found[:2, :2].all() and found.sum() == 4


def test_windows_as_large_as_the_image_change_nothing():
  tokens, context = make_tokens((4, 4)), context_of((4, 4))
  params = random_params(make_trunk(depth=2), tokens, context)
  expected = apply(make_trunk(depth=2), params, tokens, context)
  np.testing.assert_array_equal(apply(make_trunk(depth=2, window=4), params, tokens, context), expected)


@pytest.mark.parametrize(
  ('options', 'changes', 'message'),
  [
    ({'window': 3}, {}, 'window=3 does not divide the sides of 4×8 tokens: change it, the patch or the image'),
    ({'window': 4}, {'grid': None}, 'window=4 needs tokens that are patches only: set pool to mean or sequence'),
    ({'window': 4}, {'causal': True}, 'window=4 takes no mask and no causality: set window to 0'),
    ({'window': -1}, {}, 'window is -1: expected a whole number of 0 or more'),
  ],
)
def test_windows_that_can_not_be_are_refused(options, changes, message):
  grid = (4, 8)
  context = dataclasses.replace(context_of(grid), **changes)
  with pytest.raises(UserError, match=message):
    random_params(Block(SoftmaxAttention(3), **options), make_tokens(grid), context)


def test_moved_windows_need_a_stage_that_takes_masks():
  block, grid = Block(SeparableConvolution(3), window=4, shifted=True), (8, 8)
  with pytest.raises(
    UserError, match=r'window=4 moves windows, and SeparableConvolution takes no mask .* window to 0'
  ):
    random_params(block, make_tokens(grid), context_of(grid))


def test_one_loop_over_all_blocks_has_no_windows():
  with pytest.raises(UserError, match='window=4 has two kinds of blocks, and scan_layers loops over one'):
    random_params(make_trunk(depth=2, window=4, scan_layers=True), make_tokens((8, 8)), context_of((8, 8)))
