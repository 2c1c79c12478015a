import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import reference

from configs.common import stage1_options, stage2_options
from hbf.errors import UserError
from hbf.nn.attention import SoftmaxAttention
from hbf.nn.block import Block
from hbf.nn.mlp import MLP
from hbf.nn.registry import MODELS, STAGE1, STAGE2, make_stages, options_of, stage_names

B, N, D = 2, 5, 8


def make_tokens(seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(B, N, D)), jnp.float32)


def random_params(module, *arguments):
  """Parameters of the module's shapes drawn by NumPy."""
  shapes = jax.eval_shape(lambda key: module.init(key, *arguments), jax.random.key(0))['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda z: (0.5 * rng.normal(size=z.shape)).astype('f'), shapes)


def dense(z, layer):
  return z @ np.asarray(layer['kernel'], np.float64) + layer.get('bias', 0.0)


@pytest.mark.parametrize('heads', [1, 4])
def test_softmax_attention_equals_the_formula(heads):
  module, tokens, d = SoftmaxAttention(heads), make_tokens(), D // heads
  params = random_params(module, tokens)
  q, k, v = np.split(dense(np.asarray(tokens, np.float64), params['qkv']), 3, axis=-1)
  joined = np.zeros(tokens.shape)
  for b, h in itertools.product(range(B), range(heads)):
    part = slice(h * d, (h + 1) * d)
    joined[b, :, part] = reference.softmax(q[b, :, part] @ k[b, :, part].T / math.sqrt(d)) @ v[b, :, part]
  result = module.apply({'params': params}, tokens)
  np.testing.assert_allclose(result, dense(joined, params['out']), rtol=1e-4, atol=1e-5)


ACTIVATIONS = {
  'relu': lambda z: max(z, 0),
  'gelu': lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
}


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_mlp_equals_the_formula(activation):
  module, tokens = MLP(hidden=6, activation=activation), make_tokens()
  params = random_params(module, tokens)
  hidden = np.vectorize(ACTIVATIONS[activation])(dense(np.asarray(tokens, np.float64), params['hidden']))
  result = module.apply({'params': params}, tokens)
  np.testing.assert_allclose(result, dense(hidden, params['out']), rtol=1e-4, atol=1e-5)


def make_block(dropout):
  return Block(
    functools.partial(SoftmaxAttention, heads=2), functools.partial(MLP, hidden=6, activation='relu'), dropout
  )


def test_block_is_pre_norm_and_residual():
  """Y = X + stage1(LayerNorm(X)), Z = Y + stage2(LayerNorm(Y))."""
  block, tokens = make_block(0.0), make_tokens()
  params = random_params(block, tokens, False)
  z = np.asarray(tokens, np.float64)
  for name, stage in (('stage1', SoftmaxAttention(2)), ('stage2', MLP(6, 'relu'))):
    normed = reference.layer_norm(z, **params[f'norm_{name}'])
    z = z + np.asarray(stage.apply({'params': params[name]}, jnp.asarray(normed, jnp.float32)))
  np.testing.assert_allclose(block.apply({'params': params}, tokens, False), z, rtol=1e-4, atol=1e-4)


def test_dropout_works_in_training_only():
  tokens, variables = make_tokens(), {'params': random_params(make_block(0.0), make_tokens(), False)}
  plain, dropping = make_block(0.0), make_block(0.5)
  expected = np.asarray(plain.apply(variables, tokens, True))
  np.testing.assert_array_equal(dropping.apply(variables, tokens, False), expected)
  outs = [dropping.apply(variables, tokens, True, rngs={'dropout': jax.random.key(i)}) for i in range(2)]
  assert not np.allclose(outs[0], expected)
  assert not np.allclose(outs[0], outs[1])
  again = dropping.apply(variables, tokens, True, rngs={'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(outs[0], again)


def test_dropout_is_on_the_updates_and_never_on_the_residual_path():
  """All but everything dropped, the tokens themselves remain."""
  tokens, block = make_tokens(), make_block(1.0)
  variables = {'params': random_params(make_block(0.0), tokens, False)}
  out = block.apply(variables, tokens, True, rngs={'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(out, tokens)


def options(stage, name, heads=2):
  """The shipped options of a registered stage at toy size."""
  if stage == 1:
    return {'heads': heads, **stage1_options(name)}
  return stage2_options(name, 16)


EVERY_STAGE = [(1, name) for name in STAGE1] + [(2, name) for name in STAGE2]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('stage,name', EVERY_STAGE)
def test_every_registered_stage_keeps_the_shape_of_the_tokens(stage, name, dtype):
  """Also of one token and one image; in bfloat16 its parameters stay float32."""
  module = {1: STAGE1, 2: STAGE2}[stage][name](**options(stage, name), dtype=jnp.dtype(dtype))
  for shape in ((B, N, D), (1, 1, D)):
    tokens = jax.ShapeDtypeStruct(shape, dtype)
    out, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), tokens)
    assert (out.shape, out.dtype) == (shape, jnp.dtype(dtype))
    assert {z.dtype for z in jax.tree.leaves(variables)} == {jnp.dtype('float32')}


@pytest.mark.parametrize('first,second', list(itertools.product(STAGE1, STAGE2)))
def test_any_stage_1_goes_with_any_stage_2(first, second):
  stages = make_stages(f'{first}+{second}', options(1, first), options(2, second))
  block = Block(*stages, dropout=0.0)
  params = random_params(block, make_tokens(), False)
  out = block.apply({'params': params}, make_tokens(), False)
  assert out.shape == (B, N, D) and np.all(np.isfinite(out))
  assert set(params) == {'norm_stage1', 'stage1', 'norm_stage2', 'stage2'}


def test_named_models_are_pairs_of_registered_stages():
  for name, (first, second) in MODELS.items():
    assert stage_names(name) == stage_names(f'{first}+{second}') == (first, second)


@pytest.mark.parametrize(
  'name,message',
  [
    ('hyperbff', "unknown model 'hyperbff': did you mean 'hyperbf'"),
    ('softmx+mlp', "unknown stage 1 'softmx': did you mean 'softmax'"),
    ('softmax+mpl', "unknown stage 2 'mpl': did you mean 'mlp'"),
    ('mlp+softmax', "unknown stage 1 'mlp'"),
    ('softmax+', "unknown stage 2 ''"),
  ],
)
def test_unknown_models_name_the_nearest(name, message):
  with pytest.raises(UserError, match=message):
    stage_names(name)


def test_unknown_option_names_the_nearest():
  with pytest.raises(UserError, match="unknown option of stage 2 'mlp' 'hiden': did you mean 'hidden'"):
    make_stages('vit', {'heads': 2}, {'hiden': 3, 'activation': 'relu'})


@pytest.mark.parametrize('stage,name', EVERY_STAGE)
def test_every_missing_option_is_named(stage, name):
  given = {1: options(1, 'softmax'), 2: options(2, 'mlp')}
  model = f'{name}+mlp' if stage == 1 else f'softmax+{name}'
  for missing in options_of({1: STAGE1, 2: STAGE2}[stage][name]):
    rest = {key: value for key, value in options(stage, name).items() if key != missing}
    with pytest.raises(UserError, match=f"stage {stage} '{name}' needs the options {missing}:"):
      make_stages(model, *(rest if i == stage else given[i] for i in (1, 2)))


def test_options_never_hold_what_the_block_decides():
  for module in (*STAGE1.values(), *STAGE2.values()):
    assert not {'name', 'parent', 'dtype'} & set(options_of(module))


def test_softmax_attention_needs_a_width_divisible_by_the_heads():
  with pytest.raises(UserError, match='a width of 8 is not divisible by 3 heads'):
    SoftmaxAttention(3).init(jax.random.key(0), make_tokens())


def test_unknown_activation_names_the_nearest():
  with pytest.raises(UserError, match="did you mean 'gelu'"):
    MLP(4, 'geluu').init(jax.random.key(0), make_tokens())
