"""Tests of models on a mesh with explicit axes, as `jax.make_mesh` makes them by default, whose batches are split."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import hbf
from configs import digits, text
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_language_model, build_model
from hbf.nn.block import Block
from hbf.nn.context import Context
from hbf.nn.dropout import Dropout
from hbf.nn.registry import MODELS, STAGE1, make_stages, stage_options
from hbf.nn.traits import traits_of
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf

ROWS = PartitionSpec('rows')  # an axis that hbf does not know
OPTIONS = [
  *((model, {}) for model in MODELS),
  ('hyperbf', {'stage1.memory': 2, 'stage1.relative_positions': 'adaptive', 'pool': 'cls', 'layer_scale': 0.1}),
  ('hyperbf', {'stage2.kernel': 'ball_silu', 'stage2.normalization': 'none', 'stage2.coefficients': 'linear'}),
  ('hyperbf', {'stage2.nested': True, 'scan_layers': True, 'depth': 2, 'remat': True}),
  ('hyperbf', {'window': 2, 'depth': 2, 'pool': 'mean', 'patch': 1}),
  ('positional', {'merge': (1,), 'depth': 2, 'pool': 'mean'}),
  ('positional', {'pool': 'cls', 'drop_path': 0.1, 'dropout': 0.1}),
  ('vit', {'stage1.relative_positions': 'rotary', 'pool': 'sequence', 'stem': 'conv', 'whiten': True, 'patch': 4}),
  ('convolution+hyperbf', {'pool': 'mean'}),
  ('gated_softmax+none', {'dtype': 'bfloat16'}),
]


@pytest.fixture
def mesh():
  return jax.make_mesh((2,), ('rows',), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])


def small(data, name, changes):
  config = resolve(data.get_config(f'model={name}')).model
  with config.unlocked():
    config.update_from_flattened_dict({'width': 16, 'depth': 1, 'heads': 2, **changes})
  return config


def make_model(name, **changes):
  return build_model(small(digits, name, changes), 10)


def make_language_model(name, **changes):
  return build_language_model(small(text, name, changes), 11, 8, causal=True)


def check_types(mesh, apply, params, shape):
  """Check that results are split like the inputs, and that gradients are not split. Nothing is compiled."""
  inputs = jax.ShapeDtypeStruct((4, *shape), jnp.float32, sharding=NamedSharding(mesh, ROWS))
  with jax.set_mesh(mesh):
    result = jax.eval_shape(apply, params, inputs)
    gradients = jax.eval_shape(jax.grad(lambda *arguments: jnp.square(apply(*arguments)).mean()), params, inputs)
  assert result.shape[0] == 4 and result.sharding.spec[0] == 'rows'
  splits = [leaf.sharding.spec if leaf.sharding else () for leaf in jax.tree.leaves(gradients)]
  assert {axis for split in splits for axis in split} <= {None}


@pytest.mark.parametrize(('name', 'changes'), OPTIONS)
def test_every_image_model_takes_a_split_batch(mesh, name, changes):
  model = make_model(name, **changes)
  apply = functools.partial(model.apply, train=True, rngs={'dropout': jax.random.key(0)})
  check_types(mesh, apply, {'params': abstract_params(model, (8, 8, 1))}, (8, 8, 1))


@pytest.mark.parametrize('name', [name for name, module in STAGE1.items() if traits_of(module).causal])
def test_every_causal_block_takes_a_split_batch(mesh, name):
  model = f'{name}+hyperbf'
  block = Block(*make_stages(model, 2, *stage_options(model, 16)), 0.0)
  context = Context(train=True, causal=True, positions=jnp.arange(6, dtype=jnp.float32)[:, None])
  params = jax.eval_shape(block.init, jax.random.key(0), jnp.ones((4, 6, 16)), context)
  check_types(mesh, lambda params, tokens: block.apply(params, tokens, context), params, (6, 16))


def test_a_language_model_takes_split_texts(mesh):
  model = make_language_model('hyperbf', tied=False, positions='sincos', dropout=0.1)
  rngs = {'dropout': jax.random.key(0)}
  mask = jnp.arange(6) < jnp.array([6, 5, 4, 3])[:, None]
  texts = jax.random.randint(jax.random.key(0), (4, 6), 0, 11)
  params = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), texts)

  def loss(params, texts, mask):
    logits = model.apply(params, texts, train=True, mask=mask, rngs=rngs)
    return jnp.square(logits).mean(), logits

  both = jax.jit(jax.grad(loss, has_aux=True))
  with jax.set_mesh(mesh):
    split = both(jax.device_put(params, PartitionSpec()), *jax.device_put((texts, mask), ROWS))
  assert split[1].sharding.spec[0] == 'rows'
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), split, both(params, texts, mask))


@pytest.mark.parametrize('name', [name for name, module in STAGE1.items() if traits_of(module).causal])
def test_a_cache_is_split_like_the_texts(mesh, name):
  """The first axis of every array of the cache is the batch, or has it as its first part."""
  model, texts = make_language_model(f'{name}+hyperbf'), jax.ShapeDtypeStruct((4, 8), jnp.int32)
  params = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), texts)

  def two_parts(params, texts):
    _, cache = model.apply(params, texts, train=False, start=jnp.int32(0), mutable=['cache'])
    logits, _ = model.apply({**params, **cache}, texts, train=False, start=jnp.int32(3), mutable=['cache'])
    return logits, cache

  split = jax.ShapeDtypeStruct((4, 3), jnp.int32, sharding=NamedSharding(mesh, ROWS))
  with jax.set_mesh(mesh):
    results = jax.eval_shape(two_parts, params, split)
  assert name == 'identity' or jax.tree.leaves(results[1])
  assert all(leaf.sharding.spec[0] == 'rows' for leaf in jax.tree.leaves(results))


def test_dropout_draws_the_same_numbers_for_a_split_batch(mesh):
  """The random key may lie on the mesh, as after a step of training."""
  values, key = jnp.ones((4, 6)), jax.random.key(0)

  class Ones(nn.Module):
    dropout: type

    @nn.compact
    def __call__(self, z):
      return self.dropout(0.5, deterministic=False)(z)

  def apply(z, key, dropout=Dropout):
    return Ones(dropout).apply({}, z, rngs={'dropout': key})

  expected = apply(values, key, nn.Dropout)
  assert 0 < expected.mean() < 2
  np.testing.assert_array_equal(apply(values, key), expected)
  with jax.set_mesh(mesh):
    split, placed = jax.device_put(values, ROWS), jax.device_put(key, PartitionSpec())
    for result in (apply(split, placed), jax.jit(apply)(split, placed), jax.jit(apply)(split, key)):
      assert result.sharding.spec[0] == 'rows'
      np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize('eager', [False, True])
@pytest.mark.parametrize('start', ['tokens', 'kmeans'])
def test_centers_start_from_a_split_batch_as_from_a_whole_one(mesh, start, eager):
  stage, key = hbf.HyperBFCenters(3, heads=2, centers_init=start), jax.random.key(0)
  tokens = jax.random.normal(jax.random.key(1), (4, 6, 8))
  compiled = jax.jit(stage.init)
  init = stage.init if eager else compiled
  with jax.set_mesh(mesh):
    params = init(key, jax.device_put(tokens, ROWS))
  assert params['params']['centers'].sharding.is_fully_replicated
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), params, compiled(key, tokens))


@pytest.mark.parametrize('name', ['hyperbf', 'softmax', 'gated_softmax', 'gmlp'])
def test_cudnn_sees_no_explicit_axes(mesh, name, monkeypatch):
  """JAX's call of cuDNN forgets how its arrays are split."""
  seen, attention = [], jax.nn.dot_product_attention

  def standing_in(q, *arrays, implementation=None, **options):
    if implementation == 'cudnn':
      seen.append(jax.typeof(q).sharding.mesh.explicit_axes)
    return attention(q, *arrays, **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', standing_in)
  model = f'{name}+none'
  first, second = stage_options(model, 16)
  given = {**first, 'attention': 8} if name == 'gmlp' else first
  block = Block(*make_stages(model, 2, given, second), 0.0, jnp.bfloat16)
  params = jax.eval_shape(block.init, jax.random.key(0), jnp.ones((4, 6, 16)))
  check_types(mesh, block.apply, params, (6, 16))
  assert seen and set(seen) == {()}


def test_whitening_starts_from_a_split_batch(mesh):
  model = make_model('vit', stem='conv', whiten=True, patch=4)
  images = jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32, sharding=NamedSharding(mesh, ROWS))
  with jax.set_mesh(mesh):
    params = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)['params']
  assert params['stem0']['whitening'].shape == (9, 18)


def test_a_split_batch_brings_its_own_mesh(mesh):
  """Arrays know their mesh, so `jax.set_mesh` is not needed."""
  block, key = Block(hbf.HyperBFAttention(2), hbf.HyperBFCenters(3)), jax.random.key(0)
  tokens = jax.random.normal(jax.random.key(1), (4, 6, 8))
  split = jax.device_put(tokens, NamedSharding(mesh, ROWS))
  params = jax.jit(block.init)(key, tokens)
  placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
  gradient = jax.jit(jax.grad(lambda params, tokens: jnp.square(block.apply(params, tokens)).mean()))
  compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(compare, gradient(placed, split), gradient(params, tokens))


def test_a_wrong_number_is_refused_on_explicit_axes_too(mesh):
  points = jax.device_put(jnp.ones((4, 6, 3)), NamedSharding(mesh, ROWS))
  with jax.set_mesh(mesh), pytest.raises(UserError, match='sigma'):
    hyperbf(points, jnp.ones((5, 3)), jnp.ones((5, 2)), RadialBasis('gaussian', -1.0))


@pytest.mark.parametrize('split', [PartitionSpec('rows'), PartitionSpec(None, 'rows')], ids=str)
@pytest.mark.parametrize('options', [
  {},
  {'kernel': 'laplacian', 'normalization': 'layer'},
  {'kernel': 'ball_silu', 'normalization': 'none', 'radius': 1.0},
  {'sigma': np.arange(1, 7, dtype='f'), 'causal': True},
  {'metric': np.arange(3, dtype='f'), 'mask': np.tri(6, dtype=bool)},
], ids=str)  # fmt: skip
def test_the_operator_of_split_arrays_equals_that_of_whole_ones(mesh, options, split):
  """The points are split along an axis of examples, or along that of the points themselves."""
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=shape), 'f') for shape in ((4, 6, 3), (6, 3), (6, 2))]

  def program(*arrays):
    y = hbf.hyperbf(*arrays, **options)
    return y, jnp.square(y).sum()

  def both(*arrays):
    return program(*arrays)[0], jax.grad(lambda *z: program(*z)[1], argnums=(0, 1, 2))(*arrays)

  expected = both(*arrays)
  with jax.set_mesh(mesh):
    given = [jax.device_put(arrays[0], split), *(jax.device_put(z, PartitionSpec()) for z in arrays[1:])]
    result = jax.jit(both)(*given)
  assert tuple(result[0].sharding.spec)[: len(split)] == tuple(split)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result, expected)


@pytest.mark.parametrize('splits', [
  (PartitionSpec(None, 'rows'), PartitionSpec(), PartitionSpec('rows')),
  (PartitionSpec(), PartitionSpec('rows'), PartitionSpec()),
  (PartitionSpec(None, None, 'rows'), PartitionSpec('rows'), PartitionSpec('rows')),
], ids=str)  # fmt: skip
def test_points_centers_and_coefficients_may_be_split_along_different_axes(mesh, splits):
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(4, 2, *shape)), 'f') for shape in ((6, 3), (5, 3), (5, 2))]
  compute = jax.jit(hbf.hyperbf)
  with jax.set_mesh(mesh):
    result = compute(*jax.device_put(arrays, list(splits)))
  assert 'rows' in result.sharding.spec
  np.testing.assert_allclose(result, compute(*arrays), rtol=1e-5, atol=1e-6)
