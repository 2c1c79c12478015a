"""Tests that models and the operator take arrays without examples, such as the end of a data set that was cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hbf
from configs import digits, shakespeare
from hbf.config.resolve import resolve
from hbf.models.build import abstract_params, build_language_model, build_model
from hbf.nn.registry import MODELS

OPTIONS = [
  *((model, {}) for model in MODELS),
  ('hyperbf', {'stage1.memory': 2, 'stage2.centers_init': 'kmeans'}),
  ('vit', {'pool': 'sequence', 'stem': 'conv', 'whiten': True, 'patch': 4}),
  ('positional', {'pool': 'mean', 'patch': 1, 'window': 4, 'merge': (1,), 'depth': 2}),
]


def small(config, **changes):
  config = resolve(config).model
  with config.unlocked():
    config.update_from_flattened_dict({'width': 16, 'depth': 1, **changes})
  return config


def shape_of(model, shape, dtype):
  """Return the shape of the logits of no examples."""
  params, inputs = {'params': abstract_params(model, shape)}, jax.ShapeDtypeStruct((0, *shape), dtype)
  return jax.eval_shape(functools.partial(model.apply, train=False), params, inputs).shape


@pytest.mark.parametrize(('name', 'changes'), OPTIONS)
def test_no_images_have_no_logits(name, changes):
  model = build_model(small(digits.get_config(f'model={name}'), heads=2, **changes), 10)
  assert shape_of(model, (8, 8, 1), jnp.float32) == (0, 10)


@pytest.mark.parametrize('name', ['hyperbf', 'gmlp', 'linear'])
def test_no_texts_have_no_logits(name):
  model = build_language_model(small(shakespeare.get_config(f'model={name}'), heads=2), 11, 6, causal=True)
  assert shape_of(model, (6,), jnp.int32) == (0, 6, 11)


@pytest.mark.parametrize('options', [
  {'kernel': 'laplacian'},
  {'kernel': 'laplacian', 'causal': True},
  {'sigma': np.ones(4, 'f'), 'causal': True},
  {'normalization': 'none'},
  {'normalization': 'layer'},
], ids=str)  # fmt: skip
@pytest.mark.parametrize('shape', [(0, 5, 3), (0, 3), (2, 0, 3)], ids=str)
def test_no_points_have_no_sums(shape, options):
  call = functools.partial(hbf.hyperbf, **options)
  arrays = [jax.ShapeDtypeStruct(z, jnp.float32) for z in (shape, (4, 3), (4, 2))]
  assert jax.eval_shape(call, *arrays).shape == (*shape[:-1], 2)
  gradients = jax.grad(lambda *arrays: call(*arrays).sum(), argnums=(0, 1, 2))
  assert [z.shape for z in jax.eval_shape(gradients, *arrays)] == [z.shape for z in arrays]


@pytest.mark.parametrize(
  'options',
  [{}, {'normalization': 'none'}, {'normalization': 'none', 'kernel': 'ball_relu', 'radius': 'absolute'}],
  ids=str,
)
def test_centers_start_without_examples(options):
  params = hbf.HyperBFCenters(3, **options).init(jax.random.key(0), jnp.zeros((0, 4, 8)))['params']
  assert params['centers'].shape == (1, 3, 8)
  assert all(np.all(np.isfinite(z)) for z in jax.tree.leaves(params))
