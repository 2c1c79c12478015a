import dataclasses
import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from nn.drawn import apply, random_params
from ops import reference
from sampled import sampled

from hbf.errors import UserError
from hbf.nn.baselines import mlp
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.mlp import MLP
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.block import Block
from hbf.nn.context import Context
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.registry import MODELS, STAGE1, STAGE2, make_stages, size_option, stage_names, stage_options
from hbf.nn.traits import traits_of
from hbf.training.sharding import AXES

B, N, D = 2, 5, 8
TRAIN = Context(train=True)
PLACED = Context(positions=jnp.asarray(np.mgrid[:3, :3].reshape(2, -1).T, jnp.float32), grid=(3, 3))  # nine tokens


def make_tokens(seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(B, N, D)), jnp.float32)


def dense(z, layer):
  return z @ np.asarray(layer['kernel'], np.float64) + layer.get('bias', 0.0)


@pytest.mark.parametrize('qkv_bias', [False, True])
@pytest.mark.parametrize('qk_norm', [False, True])
@pytest.mark.parametrize('heads', [1, 4])
def test_softmax_attention_equals_the_formula(heads, qk_norm, qkv_bias):
  module, tokens, d = SoftmaxAttention(heads, qk_norm, qkv_bias), make_tokens(), D // heads
  params = random_params(module, tokens)
  assert ('bias' in params['qkv']) == qkv_bias
  q, k, v = np.split(dense(np.asarray(tokens, np.float64), params['qkv']), 3, axis=-1)
  joined = np.zeros(tokens.shape)
  for b, h in itertools.product(range(B), range(heads)):
    part = slice(h * d, (h + 1) * d)
    queries, keys, temperature = q[b, :, part], k[b, :, part], math.sqrt(d)
    if qk_norm:
      queries, keys = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (queries, keys))
      temperature = math.exp(2 * params['log_sigma'][h, 0, 0])
    joined[b, :, part] = reference.softmax(queries @ keys.T / temperature) @ v[b, :, part]
  result = apply(module, params, tokens)
  np.testing.assert_allclose(result, dense(joined, params['out']), rtol=1e-4, atol=1e-5)


def test_unit_norm_softmax_attention_is_unit_norm_hyperbf_attention():
  """This is fact 1 of docs/explanation/attention.md. Both modules have the same parameters, also initial ones."""
  softmax, hyperbf = SoftmaxAttention(2, True), HyperBFAttention(2, qk_norm=True)
  params = random_params(softmax, make_tokens())
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, random_params(hyperbf, make_tokens()))
  results = [apply(module, params, make_tokens()) for module in (softmax, hyperbf)]
  np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)
  starts = [jax.jit(module.init)(jax.random.key(0), make_tokens())['params'] for module in (softmax, hyperbf)]
  jax.tree.map(np.testing.assert_allclose, *starts)


ACTIVATIONS = {
  'relu': lambda z: max(z, 0.0),
  'gelu': lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
  'gelu_erf': lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
}
GATES = {
  'glu': lambda z: 1 / (1 + math.exp(-z)),
  'reglu': ACTIVATIONS['relu'],
  'geglu': ACTIVATIONS['gelu'],
  'swiglu': lambda z: z / (1 + math.exp(-z)),
}


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_mlp_equals_the_formula(activation):
  module, tokens = MLP(6, activation, 1.0), make_tokens()
  params = random_params(module, tokens)
  hidden = np.vectorize(ACTIVATIONS[activation])(dense(np.asarray(tokens, np.float64), params['hidden']))
  result = apply(module, params, tokens)
  np.testing.assert_allclose(result, dense(hidden, params['out']), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('activation', GATES)
def test_gated_mlp_equals_the_formula(activation):
  """The formula is (act(x V) ⊙ x U) W (Shazeer 2020, eq. 5 and 6)."""
  module, tokens = MLP(6, activation, 1.0), make_tokens()
  params = random_params(module, tokens)
  gates, values = np.split(dense(np.asarray(tokens, np.float64), params['hidden']), 2, axis=-1)
  expected = dense(np.vectorize(GATES[activation])(gates) * values, params['out'])
  np.testing.assert_allclose(apply(module, params, tokens), expected, rtol=1e-4, atol=1e-5)


def test_every_activation_is_tested():
  assert (set(ACTIVATIONS), set(GATES)) == (set(mlp.ACTIVATIONS), set(mlp.GATED))


def test_output_scale_is_a_factor_on_the_second_layers_start():

  def start(module, tokens):
    return jax.jit(module.init)(jax.random.key(0), tokens)['params']

  usual, small = (start(MLP(6, 'relu', scale), make_tokens()) for scale in (1.0, 0.1))
  np.testing.assert_array_equal(usual['hidden']['kernel'], small['hidden']['kernel'])
  np.testing.assert_allclose(0.1 * usual['out']['kernel'], small['out']['kernel'], rtol=1e-6)
  dense_out = start(nn.Dense(D), jnp.ones((1, 4096)))['kernel']
  wide = start(MLP(4096, 'relu', 1.0), make_tokens())['out']['kernel']
  np.testing.assert_allclose(np.std(wide), np.std(dense_out), rtol=0.05)


ATTENTION = functools.partial(SoftmaxAttention, heads=2, qk_norm=False, qkv_bias=False)
RELU = functools.partial(MLP, hidden=6, activation='relu', output_scale=1.0)


def make_block(dropout=0.0, **options):
  return Block(ATTENTION, RELU, dropout, **options)


def test_block_is_pre_norm_and_residual():
  """The block computes Y = X + stage1(LayerNorm(X)) and Z = Y + stage2(LayerNorm(Y))."""
  block, tokens = make_block(0.0), make_tokens()
  params = random_params(block, tokens)
  z = np.asarray(tokens, np.float64)
  for name in ('stage1', 'stage2'):
    z = z + update_of(params, name, z)
  np.testing.assert_allclose(apply(block, params, tokens), z, rtol=1e-4, atol=1e-4)


def update_of(params, name, tokens):
  """Return what a stage of `make_block` adds to tokens, in float64."""
  stage = {'stage1': ATTENTION, 'stage2': RELU}[name]()
  normed = jnp.asarray(reference.layer_norm(tokens, **params[f'norm_{name}']), jnp.float32)
  return np.asarray(stage.apply({'params': params[name]}, normed), np.float64)


def test_parallel_stages_both_read_the_blocks_input():
  """The block computes Z = X + stage1(LayerNorm₁(X)) + stage2(LayerNorm₂(X))."""
  block, tokens = make_block(parallel=True), make_tokens()
  params = random_params(block, tokens)
  x = np.asarray(tokens, np.float64)
  expected = x + update_of(params, 'stage1', x) + update_of(params, 'stage2', x)
  np.testing.assert_allclose(apply(block, params, tokens), expected, rtol=1e-4, atol=1e-4)


def test_layer_scale_multiplies_what_each_stage_adds():
  block, tokens = make_block(layer_scale=0.1), make_tokens()
  start = block.init(jax.random.key(0), tokens)['params']
  for name in ('stage1', 'stage2'):
    np.testing.assert_array_equal(start[f'scale_{name}'], np.full(D, 0.1, 'f'))
  params = random_params(block, tokens)
  z = np.asarray(tokens, np.float64)
  for name in ('stage1', 'stage2'):
    z = z + params[f'scale_{name}'] * update_of(params, name, z)
  np.testing.assert_allclose(apply(block, params, tokens), z, rtol=1e-4, atol=1e-4)


def test_a_block_without_stage_2_is_its_stage_1():
  block, tokens = Block(ATTENTION, None, 0.0), make_tokens()
  params = random_params(block, tokens)
  assert set(params) == {'norm_stage1', 'stage1'}
  z = np.asarray(tokens, np.float64)
  expected = z + update_of(params, 'stage1', z)
  np.testing.assert_allclose(apply(block, params, tokens), expected, rtol=1e-4, atol=1e-4)


def test_stochastic_depth_lets_whole_images_go_past_a_stage_and_keeps_the_mean():
  """Each of many equal images takes no stage, one or both. The update of a taken stage is divided by 1 − rate."""
  rate, count = 0.25, 4000
  block = make_block(parallel=True)  # so that the two stages' parts don't depend on each other
  params = random_params(block, make_tokens())
  one = make_tokens()[:1]
  x = np.asarray(one, np.float64)
  parts = {name: update_of(params, name, x) / (1 - rate) for name in ('stage1', 'stage2')}
  out = apply(block, params, jnp.tile(one, (count, 1, 1)), TRAIN, rate, rngs={'dropout': jax.random.key(0)})
  seen = 0
  for taken in itertools.product((0, 1), repeat=2):
    expected = x + taken[0] * parts['stage1'] + taken[1] * parts['stage2']
    share = np.isclose(out, expected, rtol=1e-3, atol=1e-3).all(axis=(1, 2)).mean()
    probability = np.prod([1 - rate if t else rate for t in taken])
    assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / count)
    seen += share
  assert seen == 1
  evaluated = apply(block, params, one, drop_path=rate)
  np.testing.assert_array_equal(evaluated, apply(block, params, one))


def test_dropout_works_in_training_only():
  tokens, variables = make_tokens(), {'params': random_params(make_block(), make_tokens())}
  plain, dropping = make_block(0.0), make_block(0.5)
  expected = np.asarray(plain.apply(variables, tokens, TRAIN))
  np.testing.assert_array_equal(dropping.apply(variables, tokens), expected)
  outs = [dropping.apply(variables, tokens, TRAIN, rngs={'dropout': jax.random.key(i)}) for i in range(2)]
  assert not np.allclose(outs[0], expected)
  assert not np.allclose(outs[0], outs[1])
  again = dropping.apply(variables, tokens, TRAIN, rngs={'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(outs[0], again)


def test_dropout_is_on_the_updates_and_never_on_the_residual_path():
  """With a rate near 1 nearly all of the updates are dropped, and the tokens themselves remain."""
  tokens, block = make_tokens(), make_block(0.9999999)
  variables = {'params': random_params(make_block(), tokens)}
  out = block.apply(variables, tokens, TRAIN, rngs={'dropout': jax.random.key(0)})
  np.testing.assert_array_equal(out, tokens)


def make_stage(stage, name):
  """Return a constructor of a stage with its default options."""
  model = {1: f'{name}+none', 2: f'identity+{name}'}[stage]
  return make_stages(model, 2, *stage_options(model, 16))[stage - 1]


EVERY_STAGE = [(1, name) for name in STAGE1] + [(2, name) for name, module in STAGE2.items() if module]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('stage,name', EVERY_STAGE)
def test_every_registered_stage_keeps_the_shape_of_the_tokens(stage, name, dtype):
  """This holds for a single token of a single image too. Parameters stay float32 if the dtype is bfloat16."""
  module = make_stage(stage, name)(dtype=jnp.dtype(dtype))
  for shape in ((B, 9, D), (1, 1, D)):
    tokens = jax.ShapeDtypeStruct(shape, dtype)
    side = math.isqrt(shape[1])
    context = (Context(positions=PLACED.positions[: shape[1]], grid=(side, side)),) if stage == 1 else ()
    out, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), tokens, *context)
    assert (out.shape, out.dtype) == (shape, jnp.dtype(dtype))
    assert {z.dtype for z in jax.tree.leaves(variables)} <= {jnp.dtype('float32')}


@pytest.mark.parametrize('first,second', sampled(itertools.product(STAGE1, STAGE2)))
def test_any_stage_1_goes_with_any_stage_2(first, second):
  model = f'{first}+{second}'
  stages = make_stages(model, 2, *stage_options(model, 16))
  block, tokens = Block(*stages, dropout=0.0), jnp.asarray(np.random.default_rng(0).normal(size=(B, 9, D)), 'f')
  params = random_params(block, tokens, PLACED)
  out = apply(block, params, tokens, PLACED)
  assert out.shape == (B, 9, D) and np.all(np.isfinite(out))
  assert not np.allclose(out, tokens)
  assert {name for name in params if 'norm' in name} == {'norm_stage1'} | ({'norm_stage2'} if stages[1] else set())


def test_named_models_are_pairs_of_registered_stages():
  for name, (first, second) in MODELS.items():
    assert stage_names(name) == stage_names(f'{first}+{second}') == (first, second)


@pytest.mark.parametrize(
  'model,option',
  [
    ('hyperbf', ('stage2', 'centers')),
    ('unified', ('stage1', 'memory')),
    ('softmax+mlp', ('stage2', 'hidden')),
    ('gmlp', ('stage1', 'hidden')),
    ('gmlp+mlp', ('stage2', 'hidden')),
    ('softmax+none', None),
  ],
)
def test_units_are_counted_in_stage_2_or_where_it_is_missing_in_stage_1(model, option):
  assert size_option(model) == option


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
    make_stages('vit', 2, {}, {'hiden': 3, 'activation': 'relu'})


@pytest.mark.parametrize('stage,name', EVERY_STAGE)
def test_what_has_no_default_is_named_if_it_is_missing(stage, name):
  """Only the number of units has no default."""
  model = f'{name}+mlp' if stage == 1 else f'softmax+{name}'
  defaults = stage_options(model, 16)
  for missing in defaults[stage - 1]:
    given = [dict(options) for options in defaults]
    del given[stage - 1][missing]
    if missing in ('hidden', 'centers'):
      with pytest.raises(UserError, match=f"stage {stage} '{name}' needs the options {missing}:"):
        make_stages(model, 2, *given)
    else:
      made = [make_stages(model, 2, *options)[stage - 1]() for options in (given, defaults)]
      assert made[0] == made[1]


def test_options_never_hold_what_the_block_decides():
  for first, second in itertools.product(STAGE1, STAGE2):
    for options in stage_options(f'{first}+{second}', 16):
      assert not {'name', 'parent', 'dtype'} & set(options)
    assert 'heads' not in stage_options(f'{first}+{second}', 16)[0]


MASKED = {name: traits_of(module).masks for name, module in STAGE1.items()}
CAUSAL = [name for name, module in STAGE1.items() if traits_of(module).causal]


def make_stage1_block(name):
  """Return a block with this stage 1, its parameters, and nine tokens."""
  block = Block(make_stage(1, name), None, 0.0)
  tokens = jnp.asarray(np.random.default_rng(0).normal(size=(B, 9, D)), 'f')
  return block, {'params': random_params(block, tokens, PLACED)}, tokens


def test_what_stages_honor():
  expected = {
    **dict.fromkeys(('hyperbf', 'positional', 'gated_hyperbf', 'gated_softmax', 'softmax', 'identity'), 'any'),
    **dict.fromkeys(('linear', 'gmlp', 'token_mlp'), 'keys'),
    **dict.fromkeys(('convolution', 'pooling'), 'none'),
  }
  # A stage that a user adds is not in this table.
  assert {name: MASKED[name] for name in expected} == expected
  assert set(expected) - set(CAUSAL) == {'convolution', 'pooling'}


@pytest.mark.parametrize('of_each', [False, True])
@pytest.mark.parametrize('name', STAGE1)
def test_a_stage_honors_a_mask_or_its_block_refuses_it(name, of_each):
  """Changes of masked tokens have no effect. A mask is either for each token or for all tokens together."""
  block, params, tokens = make_stage1_block(name)
  hidden = jnp.arange(9) >= 6
  apart = jnp.broadcast_to(~hidden, (B, 9, 9)) | jnp.eye(9, dtype=bool)
  mask = apart if of_each else jnp.broadcast_to(~hidden, (B, 1, 9))
  context = dataclasses.replace(PLACED, mask=mask)
  refused = {
    'none': 'ignores masks, and the context has one',
    'keys': r'\[B, 1, N\], and this mask has shape \[2, 9, 9\]',
  }
  if MASKED[name] == 'none' or (MASKED[name] == 'keys' and of_each):
    with pytest.raises(UserError, match=refused[MASKED[name]]):
      block.apply(params, tokens, context)
    return
  changed = jnp.where(hidden[:, None], -tokens[::-1], tokens)
  before, after = (block.apply(params, z, context)[:, :6] for z in (tokens, changed))
  np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
  ('mask', 'message'),
  [
    (jnp.where(jnp.tri(9, dtype=bool), 0.0, -1e9), 'type float32; expected an array of booleans'),
    ([[True] * 9] * 9, 'type list; expected an array of booleans'),
    (jnp.ones((B, 9), bool), r'broadcasts to \[2, 9, 9\]: for keys to hide, give mask\[:, None, :\]'),
    (jnp.ones((B, 1, 9, 9), bool), r'shape \[2, 1, 9, 9\]; expected one that broadcasts to \[2, 9, 9\]'),
    (jnp.ones((8, 8), bool), r'shape \[8, 8\]; expected'),
  ],
)
def test_a_mask_that_is_not_booleans_for_all_pairs_of_tokens_is_refused(mask, message):
  block, params, tokens = make_stage1_block('hyperbf')
  with pytest.raises(UserError, match=message):
    block.apply(params, tokens, Context(mask=mask))


@pytest.mark.parametrize(
  ('context', 'message'),
  [
    (
      Context(positions=jnp.arange(9.0)),
      r'positions has shape \[9\]: expected an array \[9, P\].*positions\[:, None\]',
    ),
    (Context(positions=jnp.zeros((1, 2))), r'positions has shape \[1, 2\]: expected an array \[9, P\]'),
    (Context(positions=jnp.zeros((B, 9, 2))), r'positions has shape \[2, 9, 2\]: expected'),
    (Context(positions=jnp.zeros((9, 0))), r'positions has shape \[9, 0\]: expected'),
    (Context(positions=[[0.0, 0.0]] * 9), 'positions has type list: expected an array'),
    (Context(positions=jnp.zeros((9, 2)), grid=9), 'grid is 9: expected'),
    (
      Context(positions=jnp.zeros((9, 1)), grid=(3, 3)),
      r'positions has shape \[9, 1\]: expected \[9, 2\] beside a grid',
    ),
  ],
)
@pytest.mark.parametrize('name', ['hyperbf', 'positional'])
def test_positions_that_are_not_one_for_each_token_are_refused(name, context, message):
  block, tokens = Block(*make_stages(f'{name}+none', 2, *stage_options(f'{name}+none', D)), 0.0), jnp.ones((B, 9, D))
  with pytest.raises(UserError, match=message):
    jax.eval_shape(block.init, jax.random.key(0), tokens, context)


def test_a_stage_alone_refuses_an_additive_mask():
  stage, tokens = SoftmaxAttention(2), make_tokens()
  with pytest.raises(UserError, match='expected an array of booleans, True where'):
    stage.init(jax.random.key(0), tokens, Context(mask=jnp.zeros((9, 9))))


@pytest.mark.parametrize('name', sorted({*STAGE1} - {'identity'}))
@pytest.mark.parametrize(
  ('shape', 'wrong', 'message'),
  [
    ((9, 8), {}, r'tokens have shape \[9, 8\]: expected \[B, N, D\]'),
    ((B, 0, 8), {}, r'tokens have shape \[2, 0, 8\], \[B, N, D\]: expected one token or more'),
    ((B, 9, 8), {'mask': jnp.ones((B, 9), bool)}, r'the mask has shape \[2, 9\]; expected one that broadcasts'),
    ((B, 9, 8), {'positions': jnp.arange(9.0)}, r'positions has shape \[9\]: expected an array \[9, P\]'),
    ((B, 9, 8), {'positions': None, 'grid': (3,)}, r'grid is \(3,\): expected \(rows, columns\)'),
  ],
  ids=['tokens', 'no tokens', 'mask', 'positions', 'grid'],
)
def test_a_stage_1_without_a_block_checks_its_call(name, shape, wrong, message):
  stage = make_stage(1, name)(name='stage1')
  with pytest.raises(UserError, match=message):
    jax.eval_shape(stage.init, jax.random.key(0), jnp.ones(shape), dataclasses.replace(PLACED, **wrong))


@pytest.mark.parametrize('stage', [MLP(16), HyperBFCenters(4, centers_init='normal')], ids=['mlp', 'centers'])
def test_a_stage_on_every_token_alone_fits_every_context(stage):
  tokens = make_tokens()
  context = Context(causal=True, mask=jnp.tril(jnp.ones((N, N), bool)))
  block = Block(stage)
  params = random_params(block, tokens, context)
  before, after = (apply(block, params, z, context) for z in (tokens, tokens.at[:, 2].multiply(-3.0)))
  np.testing.assert_array_equal(np.any(before != after, axis=(0, 2)), np.arange(N) == 2)


@pytest.mark.parametrize('made', [Block, functools.partial(MLP, 16), functools.partial(SoftmaxAttention, 2)])
def test_a_type_of_products_is_a_type_of_floats(made):
  options = {'stage1': SoftmaxAttention(2)} if made is Block else {}
  for dtype in (jnp.bfloat16, 'bfloat16', np.float64, None):
    made(**options, dtype=dtype)
  for dtype in ('bf16', jnp.int32, 16):
    with pytest.raises(UserError, match=r'expected a type of floats such as jnp\.bfloat16, or None'):
      made(**options, dtype=dtype)


def test_a_block_refuses_tokens_of_one_example_without_its_axis():
  block, params, tokens = make_stage1_block('hyperbf')
  with pytest.raises(UserError, match=r'tokens have shape \[9, 8\]: expected \[B, N, D\]'):
    block.apply(params, tokens[0])


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('name', STAGE1)
def test_a_causal_stage_shows_no_token_a_later_one_or_its_block_refuses(name, masked):
  """If a token changes, earlier outputs stay bit for bit. Later ones change if tokens see all earlier ones."""
  block, params, tokens = make_stage1_block(name)
  mask = jnp.ones((B, 1, 9), bool) if masked else None
  context = dataclasses.replace(PLACED, causal=True, mask=mask)
  if name not in CAUSAL:
    with pytest.raises(UserError, match='mixes a token with later tokens'):
      block.apply(params, tokens, context)
    return
  apply = jax.jit(block.apply)
  before = np.asarray(apply(params, tokens, context))
  for j in range(9):
    after = np.asarray(apply(params, tokens.at[:, j].multiply(-3.0), context))
    np.testing.assert_array_equal(before[:, :j], after[:, :j])
    changed = np.any(before[:, j:] != after[:, j:], axis=(0, 2))
    assert changed[0] and (np.all(changed) or name in ('identity', 'token_mlp'))


def test_softmax_attention_needs_a_width_divisible_by_the_heads():
  with pytest.raises(UserError, match='a width of 8 is not divisible by 3 heads'):
    SoftmaxAttention(3).init(jax.random.key(0), make_tokens())


def test_unknown_activation_names_the_nearest():
  with pytest.raises(UserError, match="did you mean 'gelu'"):
    MLP(4, 'geluu', 1.0).init(jax.random.key(0), make_tokens())


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_a_block_runs_where_xla_does_not_choose_the_layout(kind):
  """The axes of shard_map and explicit axes have the names of this project's mesh here."""
  tokens = jnp.ones((4, N, D))
  params = jax.eval_shape(make_block().init, jax.random.key(0), tokens)
  mesh = jax.make_mesh((2, 1, 1), AXES, axis_types=(kind,) * len(AXES), devices=jax.devices()[:2])
  rows = PartitionSpec('data')
  with jax.set_mesh(mesh):
    run = jax.shard_map(make_block().apply, in_specs=(PartitionSpec(), rows), out_specs=rows)
    assert jax.eval_shape(run if kind == AxisType.Auto else make_block().apply, params, tokens).shape == tokens.shape


@pytest.mark.parametrize(
  'stage',
  [
    HyperBFCenters(16, centers_init='normal'),
    HyperBFCenters(64, centers_init='normal', normalization='none'),  # in blocks: the gradient is a loop
    HyperBFAttention(2, kernel='laplacian'),
    HyperBFAttention(2, memory=3),
    LinearAttention(2),
  ],
)
def test_the_gradient_of_a_stage_is_the_same_where_shard_map_splits_the_batch(stage):
  mesh = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  tokens = make_tokens()
  params, context = random_params(stage, tokens), Context(causal=isinstance(stage, LinearAttention))

  def loss(params, tokens):
    return jnp.sum(jnp.sin(stage.apply({'params': params}, tokens, context)))

  def split(params, tokens):
    return jax.lax.psum(loss(params, tokens), 'data')

  replicated, rows = PartitionSpec(), PartitionSpec('data')
  mapped = jax.shard_map(split, mesh=mesh, in_specs=(replicated, rows), out_specs=replicated)
  expected, result = (jax.jit(jax.grad(f, (0, 1)))(params, tokens) for f in (loss, mapped))
  inside = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(replicated, rows), out_specs=replicated)
  assert jax.eval_shape(inside, params, tokens) == jax.eval_shape(lambda z: z, params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), result, expected)
