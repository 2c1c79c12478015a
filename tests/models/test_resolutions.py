"""Tests of a trunk with several resolutions: 2×2 tokens become one token of twice the width."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.errors import UserError
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFCenters
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk

WIDTH, GRID = 4, (4, 6)
UNITS = {'hyperbf': ({}, {'centers': 6}), 'vit': ({}, {'hidden': 6})}
TOKENS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, WIDTH)), jnp.float32)


def make(name='vit', **changes):
  stage1, stage2 = make_stages(name, 2, *UNITS[name])
  return Trunk(**{'depth': 3, 'stage1': stage1, 'stage2': stage2, 'merge': (2,), **changes})


def context_of(shape, grid):
  return Context(positions=jnp.asarray(np.mgrid[: shape[0], : shape[1]].reshape(2, -1).T, jnp.float32), grid=grid)


def run(trunk, tokens=TOKENS, grid=GRID):

  @jax.jit
  def made(tokens):
    output, params = trunk.init_with_output(jax.random.key(0), tokens, context_of(grid or GRID, grid))
    return params['params'], output

  return made(tokens)


@pytest.mark.parametrize(
  ('name', 'units'), [pytest.param('vit', 'hidden', marks=pytest.mark.slow), ('hyperbf', 'centers')]
)
def test_blocks_from_the_merge_on_have_twice_the_width_and_units(name, units):
  params, out = run(make(name))
  assert out.shape == (2, 6, 2 * WIDTH)
  sizes = {block: params[block]['stage2'] for block in ('block0', 'block1', 'block2')}
  if units == 'hidden':
    assert [stage['hidden']['kernel'].shape for stage in sizes.values()] == [(4, 6), (4, 6), (8, 12)]
  else:
    assert [stage['centers'].shape for stage in sizes.values()] == [(1, 6, 4), (1, 6, 4), (1, 12, 8)]


def test_every_merge_doubles_width_and_units_again():
  params, out = run(make('hyperbf', merge=(1, 2)), jnp.ones((2, 32, WIDTH)), (4, 8))
  assert out.shape == (2, 2, 4 * WIDTH)
  sizes = [params[block]['stage2']['centers'].shape for block in ('block0', 'block1', 'block2')]
  assert sizes == [(1, 6, 4), (1, 12, 8), (1, 24, 16)]


@pytest.mark.parametrize(
  'stage2', [HyperBFCenters(6, centers_init='normal'), functools.partial(HyperBFCenters, 6, centers_init='normal')]
)
def test_a_merge_doubles_the_units_of_stages_given_as_modules(stage2):
  trunk = Trunk(2, SoftmaxAttention(2), stage2, merge=(1,))
  shapes = jax.eval_shape(trunk.init, jax.random.key(0), TOKENS, context_of(GRID, GRID))['params']
  assert [shapes[block]['stage2']['centers'].shape for block in ('block0', 'block1')] == [(1, 6, 4), (1, 12, 8)]


def test_a_merge_refuses_stages_of_unknown_units():
  trunk = Trunk(2, SoftmaxAttention(2), lambda **options: HyperBFCenters(6, **options), merge=(1,))
  with pytest.raises(UserError, match=r'merge=\(1,\) doubles the units of stages, and those of a function'):
    jax.eval_shape(trunk.init, jax.random.key(0), TOKENS, context_of(GRID, GRID))


@pytest.mark.parametrize('merge', [2, (2, 1), (1, 1), (0, 1), (1.0,)])
def test_blocks_to_merge_before_are_an_increasing_tuple(merge):
  with pytest.raises(UserError, match=r'merge is .*: expected a tuple of increasing numbers of blocks'):
    make(merge=merge)


def test_a_merged_token_is_made_of_its_square():
  """The blocks mix no tokens here. So a change of one token changes only the merged token of its 2×2 square."""
  stage1, stage2 = make_stages('identity', 2, {}, {'hidden': 6})
  trunk = make(stage1=stage1, stage2=stage2)
  row, column = 3, 2
  changed = TOKENS.at[:, row * GRID[1] + column].add(1.0)
  params, out = run(trunk)
  other = trunk.apply({'params': params}, changed, context_of(GRID, GRID))
  differs = np.abs(out - other).max(axis=(0, 2)).reshape(2, 3) > 1e-6
  assert differs[row // 2, column // 2]
  assert differs.sum() == 1


@pytest.mark.parametrize(
  ('changes', 'grid', 'message'),
  [
    ({'merge': (1, 3)}, GRID, r'merge=\(1, 3\) names block 3 of 3: use 1 to 2'),
    ({}, (3, 8), 'by 2, and 3×8 tokens have no such part: change the patch or the image'),
    ({'merge': (1, 2)}, GRID, 'by 4, and 4×6 tokens have no such part'),
    ({}, None, 'patches only: set pool to mean or sequence'),
    ({'scan_layers': True}, GRID, 'scan_layers loops over one'),
  ],
)
def test_resolutions_that_can_not_be_are_refused(changes, grid, message):
  with pytest.raises(UserError, match=message):
    run(make(**changes), grid=grid)
