"""Tests of types under jax_enable_x64: parameters stay float32, and the products of a float64 stage are float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.models.embedding import PatchEmbedding
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.baselines.gmlp import GatedMLP
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.mlp import MLP
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.baselines.token_mixing import TokenMLP
from hbf.nn.block import Block
from hbf.nn.context import Context, grid_positions
from hbf.nn.gated import GatedHyperBF
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.positional import PositionalHyperBF

CONTEXT = Context(positions=jnp.asarray(grid_positions(2, 3)), grid=(2, 3))
TOKENS = np.random.default_rng(0).normal(size=(2, 6, 8))
STAGES = [
  HyperBFAttention(2, metric='full', memory=3, relative_positions='adaptive', mimetic=0.7),
  HyperBFAttention(2, metric='low_rank', rank=2),
  HyperBFAttention(2, metric='diagonal', qk_norm=True),
  GatedHyperBF(heads=2, hidden=8),
  SoftmaxAttention(2, qk_norm=True, qkv_bias=True),
  PositionalHyperBF(2),
  SeparableConvolution(2),
  TokenMLP(8),
  GatedMLP(8, attention=4),
  MLP(8, normalize=True),
  HyperBFCenters(4, centers_init='normal'),
  HyperBFCenters(4, centers_init='kmeans', normalization='none', metric='bilinear', kernel='signed_gaussian'),
  HyperBFCenters(4, kernel='ball_silu', normalization='none', coefficients='linear'),
  HyperBFCenters(4, kernel='ball_silu', normalization='none', radius='absolute'),
  *(LinearAttention(2, features=features) for features in ('elu', 'relu', 'exp', 'softmax', 'gaussian')),
  LinearAttention(2, normalizer='none'),
]


def kinds(tree):
  return {z.dtype for z in jax.tree.leaves(tree)}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
@pytest.mark.parametrize('stage', STAGES, ids=lambda stage: type(stage).__name__)
def test_parameters_are_float32_and_outputs_have_the_type_of_the_stage(stage, dtype):
  block = Block(stage, layer_scale=0.1, dtype=dtype)
  with jax.enable_x64(True):
    shapes = jax.eval_shape(block.init_with_output, jax.random.key(0), jnp.asarray(TOKENS, dtype), CONTEXT)
  assert kinds(shapes[0]) == {jnp.dtype(dtype)} and kinds(shapes[1]) == {jnp.dtype('float32')}


@pytest.mark.parametrize('stage', STAGES, ids=lambda stage: type(stage).__name__)
def test_a_stage_without_a_type_computes_in_float32(stage):
  tokens = jax.ShapeDtypeStruct(TOKENS.shape, jnp.bfloat16)
  out, _ = jax.eval_shape(stage.clone(dtype=None).init_with_output, jax.random.key(0), tokens, CONTEXT)
  assert out.dtype == jnp.float32


@pytest.mark.parametrize('pool', ['cls', 'mean'])
def test_an_embedding_without_a_type_computes_in_float32(pool):
  embedding = PatchEmbedding(width=8, patch=2, pool=pool, positions='none', dtype=None)
  with jax.enable_x64(True):
    images = jax.ShapeDtypeStruct((2, 4, 4, 3), jnp.float32)
    (tokens, places), _ = jax.eval_shape(
      functools.partial(embedding.init_with_output, train=False), jax.random.key(0), images
    )
  assert tokens.dtype == places.dtype == jnp.float32


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('features', ['elu', 'exp', 'gaussian'])
def test_linear_attention_sums_in_float64(features, causal):
  """The derivative in a direction equals a difference to more digits than float32 has."""
  stage, context = LinearAttention(2, features=features, dtype=jnp.float64), Context(causal=causal)
  with jax.enable_x64(True):
    params = stage.init(jax.random.key(0), jnp.asarray(TOKENS), context)

    @jax.jit
    def value(tokens):
      return jnp.sum(jnp.sin(stage.apply(params, tokens, context)))

    along = np.random.default_rng(1).normal(size=TOKENS.shape)
    difference = (value(TOKENS + 1e-5 * along) - value(TOKENS - 1e-5 * along)) / 2e-5
    np.testing.assert_allclose(np.vdot(jax.jit(jax.grad(value))(TOKENS), along), difference, rtol=1e-7, atol=1e-8)
