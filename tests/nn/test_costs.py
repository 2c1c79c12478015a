"""Tests that the operations for each token in the stages' docstrings are those of their matrix products."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.common import matmul_flops
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.context import Context
from hbf.nn.positional import PositionalHyperBF
from hbf.nn.registry import STAGE1, STAGE2, make_stages, stage_names, stage_options

B, N, D, H, HIDDEN, MEMORY, TINY, HEADS = 2, 49, 64, 4, 96, 24, 16, 4
ATTENTION = 8 * D**2 + 4 * N * D
GMLP = 6 * HIDDEN * D + 2 * HIDDEN * N
GATED = 4 * D**2 + 6 * HIDDEN * D + 2 * (D + HIDDEN) * N
# Model, changed options of the stage, stated operations, and how far the products may be off.
CASES = {
  'softmax': ('vit', 1, {}, ATTENTION, 0.0),
  'softmax unit': ('vit', 1, {'qk_norm': True}, ATTENTION, 0.0),
  'hyperbf': ('hyperbf', 1, {}, ATTENTION, 0.05),
  'unified': ('unified', 1, {'memory': MEMORY}, 8 * D**2 + 4 * (N + MEMORY) * D, 0.05),
  'gated': ('gated', 1, {'hidden': HIDDEN}, GATED, 0.05),
  'gated softmax': ('gated_softmax+none', 1, {'hidden': HIDDEN}, GATED, 0.0),
  'gmlp': ('gmlp', 1, {}, GMLP, 0.0),
  'softmax places': ('vit', 1, {'relative_positions': 'gaussian'}, ATTENTION + 2 * 4 * N * H, 0.0),
  'hyperbf places': ('hyperbf', 1, {'relative_positions': 'gaussian'}, ATTENTION + 2 * 4 * N * H, 0.05),
  'adaptive places': (
    'hyperbf',
    1,
    {'relative_positions': 'adaptive'},
    ATTENTION + 2 * 4 * N * H + 6 * D,
    0.05,
  ),
  'amlp': ('gmlp', 1, {'attention': TINY}, GMLP + 6 * D * TINY + 4 * N * TINY + 2 * TINY * HIDDEN, 0.0),
  'token_mlp': ('mixer', 1, {'hidden': HIDDEN}, 4 * HIDDEN * D, 0.0),
  'positional': ('positional+none', 1, {}, 4 * D**2 + 2 * N * D + 2 * 4 * N * H / B, 0.0),
  'pooling': ('pooling', 1, {}, 0, 0.0),
  'identity': ('identity', 1, {}, 0, 0.0),
  'mlp': ('vit', 2, {}, 4 * HIDDEN * D, 0.0),
  'swiglu': ('vit', 2, {'activation': 'swiglu'}, 6 * HIDDEN * D, 0.0),
  'linear centers': ('hyperbf', 2, {'coefficients': 'linear'}, 6 * HIDDEN * D, 0.05),
  'centers': ('hyperbf', 2, {}, 4 * HIDDEN * D, 0.05),
}


@pytest.mark.parametrize('case', CASES)
def test_the_stated_operations_are_those_of_the_products(case):
  model, stage, changes, stated, off = CASES[case]
  alone = {1: f'{stage_names(model)[0]}+none', 2: f'identity+{stage_names(model)[1]}'}[stage]
  options = stage_options(alone, HIDDEN)
  options[stage - 1].update(changes)
  module = make_stages(alone, HEADS, *options)[stage - 1]()
  tokens = jax.ShapeDtypeStruct((B, N, D), jnp.float32)
  context = Context(positions=jnp.zeros((N, 2)), grid=(1, N) if case == 'pooling' else None)
  params = jax.eval_shape(module.init, jax.random.key(0), tokens, context)
  counted = matmul_flops(module.apply, params, tokens, context) / (B * N)
  assert abs(counted - stated) <= off * stated


@pytest.mark.parametrize(('stage', 'weights'), [(PositionalHyperBF(H), 10 * H), (SeparableConvolution(H), 0)])
def test_sums_over_rows_and_columns_cost_what_their_stages_state(stage, weights):
  """Each of the R² + C² weights of an example costs `weights` operations for all examples together."""
  rows, columns = grid = (5, 8)
  tokens = jax.ShapeDtypeStruct((B, rows * columns, D), jnp.float32)
  context = Context(positions=jnp.zeros((rows * columns, 2)), grid=grid)
  params = jax.eval_shape(stage.init, jax.random.key(0), tokens, context)
  stated = 4 * D**2 + 2 * (rows + columns) * D + weights * (rows**2 + columns**2) / (B * rows * columns)
  assert matmul_flops(stage.apply, params, tokens, context) == B * rows * columns * stated


def test_every_stage_has_its_costs_tested():
  """The costs of linear attention are tested in test_linear_attention.py, and those of a convolution above."""
  tested = {stage_names(model)[stage - 1] for model, stage, *_ in CASES.values()}
  assert tested | {'linear', 'convolution', 'none'} == {*STAGE1, *STAGE2}
