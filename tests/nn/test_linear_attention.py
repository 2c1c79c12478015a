import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import random_params

import hbf.nn.baselines.linear_attention
from benchmarks.common import matmul_flops
from hbf.errors import UserError
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.ops.linear_attention import MAPS, NORMALIZERS, RANDOM_MAPS, feature_map, linear_attention

B, N, D = 2, 5, 8
OPTIONS = {'heads': 2, 'features': 'elu', 'random_features': 6, 'normalizer': 'sum'}


def make(name='elu', normalizer='sum', **changes):
  return LinearAttention(**OPTIONS | {'features': name, 'normalizer': normalizer} | changes)


def make_tokens(shape=(B, N, D), seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(
  'name,normalizer,causal',
  [
    *((name, 'sum', False) for name in MAPS),
    *((name, *form) for name in ('elu', 'gaussian') for form in (('none', False), ('sum', True))),
  ],
)
def test_it_is_the_operator_between_the_projections(name, normalizer, causal):
  """With normalizer none, the outputs of a head are divided by their root mean square before the learned scale."""
  module, tokens, heads, d = make(name, normalizer), make_tokens(), 2, D // 2
  params = random_params(module, tokens)
  qkv = np.split(np.asarray(tokens) @ params['qkv']['kernel'], 3, axis=-1)
  joined = np.zeros(tokens.shape)
  for h in range(heads):
    q, k, v = (z[..., h * d : (h + 1) * d] for z in qkv)
    projections = hbf.nn.baselines.linear_attention._projections(heads, 6, d)[h]
    width = np.exp(params['log_sigma'][h]) if name == 'gaussian' else 1.0
    phi = (feature_map(z, name, projections=projections, sigma=width) for z in (q, k))
    out = np.asarray(linear_attention(*phi, v, normalizer=normalizer, causal=causal), np.float64)
    if normalizer == 'none':
      out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-18) * params['norm']['scale'][h]
    joined[..., h * d : (h + 1) * d] = out
  expected = joined @ params['out']['kernel'] + params['out']['bias']
  result = jax.jit(module.apply)({'params': params}, tokens, Context(causal=causal))
  np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)


EXACT = {'softmax': SoftmaxAttention(heads=2), 'gaussian': HyperBFAttention(heads=2)}


@pytest.mark.parametrize('name', RANDOM_MAPS)
def test_many_random_features_are_the_exact_stage_1(name):
  """Both stages have the same parameters. 64 times as many features have about an eighth of the error."""
  tokens = make_tokens((B, 12, D))
  params = jax.jit(EXACT[name].init)(jax.random.key(1), tokens)
  params['params']['qkv']['kernel'] *= 0.5
  expected = jax.jit(EXACT[name].apply)(params, tokens)
  few, many = (
    np.linalg.norm(jax.jit(make(name, random_features=rank).apply)(params, tokens) - expected)
    / np.linalg.norm(expected)
    for rank in (128, 8192)
  )
  assert many < 0.02 and few > 4 * many


def test_the_width_starts_as_that_of_the_exact_stage_1():
  params = jax.jit(make('gaussian').init)(jax.random.key(0), make_tokens())['params']
  np.testing.assert_allclose(np.exp(2 * params['log_sigma']), np.full((2, 1, 1), (D / 2) ** 0.5), rtol=1e-6)


@pytest.mark.parametrize('name', MAPS)
@pytest.mark.parametrize('normalizer', NORMALIZERS)
def test_parameters_hold_no_projections(name, normalizer):
  params = random_params(make(name, normalizer, random_features=7), make_tokens())
  expected = {'qkv': {'kernel': (D, 3 * D)}, 'out': {'kernel': (D, D), 'bias': (D,)}}
  expected |= {'log_sigma': (2, 1, 1)} if name == 'gaussian' else {}
  expected |= {'norm': {'scale': (2, D // 2)}} if normalizer == 'none' else {}
  assert jax.tree.map(jnp.shape, params) == expected


def test_projections_are_of_each_head_its_own_and_always_the_same():
  first = hbf.nn.baselines.linear_attention._projections(3, 5, 4)
  hbf.nn.baselines.linear_attention._projections.cache_clear()
  np.testing.assert_array_equal(hbf.nn.baselines.linear_attention._projections(3, 5, 4), first)
  assert first.shape == (3, 5, 4) and not np.any(first[0] == first[1])


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('name', MAPS)
def test_a_masked_token_is_as_one_that_is_not_there(name, causal):
  """The first token may be masked too, as in a batch of texts that are padded in front."""
  module, tokens, kept = make(name), make_tokens(), jnp.array([1, 2, 4])
  params = {'params': random_params(module, tokens)}
  mask = jnp.isin(jnp.arange(N), kept)[None, None]
  out = jax.jit(module.apply)(params, tokens, Context(causal=causal, mask=mask))[:, kept]
  expected = jax.jit(module.apply)(params, tokens[:, kept], Context(causal=causal))
  np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('scale', [0.0, 1e2])
@pytest.mark.parametrize('name', ['relu', 'softmax', 'gaussian'])
def test_extreme_tokens_stay_finite(name, scale):
  """Outputs and gradients in bfloat16 are finite, for tokens of 0 and for huge tokens."""
  module, tokens = make(name, 'none', dtype=jnp.bfloat16), scale * make_tokens()
  params = random_params(module, tokens)

  def loss(params, tokens):
    return jnp.sum(jnp.sin(module.apply({'params': params}, tokens).astype(jnp.float32)))

  value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, tokens)
  assert np.isfinite(value) and all(np.all(np.isfinite(z)) for z in jax.tree.leaves(gradients))


@pytest.mark.parametrize('name', RANDOM_MAPS)
def test_the_norm_does_not_see_how_small_the_weights_are(name):
  """Long queries and keys have tiny weights. The normalized outputs still have a root mean square of 1."""
  module, tokens = make(name, 'none', heads=1), make_tokens(seed=3)
  params = random_params(module, tokens)
  params['qkv']['kernel'][:, : 2 * D] *= 2
  params['norm']['scale'][:] = 1
  params['out'] = {'kernel': np.eye(D, dtype='f'), 'bias': np.zeros(D, 'f')}
  out = np.asarray(jax.jit(module.apply)({'params': params}, tokens))
  np.testing.assert_allclose(np.mean(out**2, axis=-1), np.ones((B, N)), rtol=1e-3)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('name', MAPS)
def test_operations_are_those_that_the_docstring_states(name, causal):
  """The test counts the matrix products of 256 tokens in chunks of 128."""
  length, width, heads, rank, chunk = 256, 32, 4, 24, 128
  module, tokens = make(name, heads=heads, random_features=rank), make_tokens((1, length, width))
  params = jax.eval_shape(module.init, jax.random.key(0), tokens)
  m = rank if name in RANDOM_MAPS else width // heads
  expected = 8 * width**2 + 4 * m * (width + heads)
  expected += 4 * m * width if name in RANDOM_MAPS else 0
  expected += 2 * chunk * (m * heads + width + heads) if causal else 0
  apply = functools.partial(module.apply, context=Context(causal=causal))
  assert matmul_flops(apply, params, tokens) == length * expected


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'features': 'softmx'}, "unknown features 'softmx': did you mean 'softmax'"),
    ({'normalizer': 'non'}, "unknown normalizer 'non': did you mean 'none'"),
    ({'heads': 3}, 'a width of 8 is not divisible by 3 heads'),
  ],
)
def test_bad_options_are_named(changes, message):
  with pytest.raises(UserError, match=message):
    LinearAttention(**OPTIONS | changes).init(jax.random.key(0), make_tokens())
