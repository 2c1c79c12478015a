"""Tests of every shipped config: its network, its costs, and the health of its HyperBF units at initialization."""

import functools
import importlib
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from ops.keywords import log_responses

import hbf.models.build
import hbf.nn.trunk
from hbf.config.recipes import RECIPES, SIZES
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model, count_parameters, flops_per_example
from hbf.nn.block import Block
from hbf.nn.registry import make_stages
from hbf.ops.normalization import normalize

# Image shape and classes of every shipped config.
SETS = {
  'digits': ((8, 8, 1), 10),
  'cifar10': ((32, 32, 3), 10),
  'cifar100': ((32, 32, 3), 100),
  'tiny_imagenet': ((64, 64, 3), 200),
  'image_folder': ((64, 64, 3), 10),
  'imagenet': ((224, 224, 3), 1000),
}
EVERY = [(data, recipe) for data in SETS for recipe in RECIPES if (data == 'imagenet') == (recipe == 'plain')]
# Every recipe on CIFAR-10 and every set with recipe small; all pairs with the slow tests.
MATCHED = [
  pytest.param(*case, marks=() if {'cifar10', 'small', 'plain'} & {*case} else pytest.mark.slow) for case in EVERY
]
# Units take long to compile; other images give them other tokens only, and each recipe's way to them is tried once.
USUAL = [('cifar10', 'small'), ('cifar10', 'laptop')]
UNITS = [*((*case, 2) for case in USUAL), *(pytest.param(*case, 4, marks=pytest.mark.slow) for case in EVERY)]


def model_config(data, model, recipe, more=''):
  config = importlib.import_module(f'configs.{data}').get_config(f'model={model},recipe={recipe}{more}')
  return resolve(config).model


def toy(model='vit', **changes):
  """Return the `model` part of recipe small for digits, with one block unless changed."""
  config = model_config('digits', model, 'small').copy_and_resolve_references()
  config.unlock()
  config.update({'depth': 1, **changes})
  return config


@pytest.mark.parametrize('data,recipe', MATCHED)
def test_hyperbf_and_vit_of_a_recipe_build_with_the_same_number_of_parameters(data, recipe):
  shape, classes = SETS[data]
  counts = [
    count_parameters(build_model(model_config(data, model, recipe), classes), shape) for model in ('hyperbf', 'vit')
  ]
  assert abs(counts[0] / counts[1] - 1) < 0.01, counts


@pytest.mark.parametrize('size', SIZES)
def test_sizes_keep_the_parameters_matched(size):
  """The test counts two blocks, because each block adds the same number."""
  counts = []
  for model in ('hyperbf', 'vit'):
    config = model_config('cifar10', model, 'small', f',size={size}').copy_and_resolve_references()
    assert (config.width, config.depth) == SIZES[size][:2]
    config.unlock().depth = 2
    counts.append(count_parameters(build_model(config, 10), (32, 32, 3)))
  assert abs(counts[0] / counts[1] - 1) < 0.01, counts


def test_count_is_that_of_the_parameters_made():
  model = build_model(toy('vit'), 10)
  params = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), jnp.ones((1, 8, 8, 1)))['params']
  assert count_parameters(model, (8, 8, 1)) == sum(np.size(z) for z in jax.tree.leaves(params))


@pytest.mark.parametrize('model', ['hyperbf', 'vit'])
def test_flops_grow_linearly_with_depth(model):
  one, two, four = (flops_per_example(build_model(toy(model, depth=depth), 10), (8, 8, 1)) for depth in (1, 2, 4))
  assert 0 < one < two
  np.testing.assert_allclose(four - two, 2 * (two - one), rtol=1e-3)


def test_flops_of_scanned_blocks_are_those_of_all():
  scanned, unrolled = (build_model(toy('vit', depth=3, scan_layers=scan), 10) for scan in (True, False))
  assert flops_per_example(scanned, (8, 8, 1)) == flops_per_example(unrolled, (8, 8, 1))


@pytest.mark.parametrize('model', ['hyperbf', 'vit'])
def test_flops_are_near_those_of_the_products(model):
  """A block's products are projections, scores, mixing and stage 2. Other operations add at most a third."""
  config = toy(model)
  one, two = (flops_per_example(build_model(toy(model, depth=depth), 10), (8, 8, 1)) for depth in (1, 2))
  d, length = config.width, (8 // config.patch) ** 2 + 1
  hidden = config.stage2.hidden if model == 'vit' else config.stage2.centers
  products = 2 * length * (4 * d * d + 2 * length * d + 2 * d * hidden)
  assert products <= two - one <= 1.33 * products


@pytest.mark.parametrize(
  'changes,message',
  [
    ({'heads': 5}, 'a width of 64 is not divisible by 5 heads'),
    ({'heads': 0}, 'heads is 0: expected a whole number of 1 or more'),
    ({'dtype': 'float23'}, "unknown model.dtype 'float23': did you mean 'float32'"),
    ({'name': 'vitt'}, "unknown model 'vitt': did you mean 'vit'"),
    ({'name': 'hyperbf'}, 'if you change the model, change its options'),
  ],
)
def test_impossible_models_are_user_errors(changes, message):
  config = toy()
  config.update(changes)
  with pytest.raises(UserError, match=message):
    abstract_params(build_model(config, 10), (8, 8, 1))


TOKENS = 128  # to look at, at least
# Floors of a living unit. σ² = D, nearly constant, has a spread of 1/√D from noise, of 0.7 from tokens at width 64.
SPREAD = 1.0
# Centers that respond to a token, (ΣK)² / ΣK²: all if they respond alike, 1 if only one does. The more a token's
# dimensions, the fewer of those that start as other tokens: 20 to 40 at width 64, 2 to 6 at width 768.
RESPONDING = 2
# How a response changes from token to token, over its size. The digits' few tokens leave many centers asleep.
CHANGING = 0.2
# What a step that moves a parameter by a hundredth of its norm does to the loss, to first order.
REACH = 1e-5


class CompiledOnce:
  """A context in which blocks of equal options and shapes are compiled only once, for all blocks and models."""

  def __enter__(self):
    self._patch = pytest.MonkeyPatch()
    self._patch.setattr(hbf.nn.trunk, 'Block', COMPILED_BLOCK)
    self._patch.setattr(hbf.models.build, 'make_stages', same_stages)

  def __exit__(self, *_):
    self._patch.undo()


COMPILED_BLOCK = nn.jit(Block)
STAGES = {}


def same_stages(*arguments):
  """Return the stages of `make_stages`, the same objects for equal options: JAX's cache compares identities."""
  return STAGES.setdefault(repr(arguments), make_stages(*arguments))


@functools.partial(jax.jit, static_argnums=(1, 2))
def smooth_images(seed, count, shape):
  """Return images of mean 0 and variance 1 with similar neighboring pixels. Tokens of noise would be far apart."""
  coarse_key, fine_key = jax.random.split(jax.random.key(seed))
  coarse = jax.random.normal(coarse_key, (count, 4, 4, shape[-1]))
  images = jax.image.resize(coarse, (count, *shape), 'cubic') + 0.1 * jax.random.normal(fine_key, (count, *shape))
  return (images - images.mean()) / images.std()


@functools.cache
def units_at_init(config_json, shape):
  """Return, for every stage 2 of a model: its parameters, their gradients, log K and the responses.

  The images are not those from which the centers were initialized. There are two, or more if an image has few tokens.
  The loss is the cross-entropy of 10 classes.
  """
  config = ConfigDict(json.loads(config_json))
  tokens_an_image = shape[0] // config.patch * (shape[1] // config.patch)
  first_batch = smooth_images(1, config.stage2.centers // tokens_an_image + 1, shape)
  images = smooth_images(2, max(2, TOKENS // tokens_an_image), shape)

  def loss(params):
    logits, seen = model.apply(
      {'params': params}, images, train=False, capture_intermediates=lambda module, _: module.name == 'norm_stage2'
    )
    labels = (3 + 4 * jnp.arange(len(images))) % 10
    return -jax.nn.log_softmax(logits)[jnp.arange(len(images)), labels].mean(), seen['intermediates']

  with CompiledOnce():
    model = build_model(config, 10)
    # This kind of key compiles in half the time.
    params = model.init(jax.random.key(0, impl='unsafe_rbg'), first_batch, train=False)['params']
    gradients, seen = jax.jit(jax.grad(loss, has_aux=True))(params)
  heads, options = config.stage2.heads, config.stage2

  @jax.jit
  def respond(tokens, mine):
    points, centers = tokens.reshape(-1, heads, config.width // heads).swapaxes(0, 1), mine['centers']
    if options.normalize_inputs:
      points, centers = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (points, centers))
    sigma, weights = jnp.exp(mine['log_sigma']), mine.get('metric')
    log_k = log_responses(points, centers, kernel=options.kernel, sigma=sigma, metric=options.metric, weights=weights)
    return log_k, normalize(log_k, options.normalization, mine.get('log_gain', 0.0))

  result = []
  for block in (f'block{i}' for i in range(config.depth)):
    mine, slopes = params[block]['stage2'], gradients[block]['stage2']
    (tokens,) = seen[block]['norm_stage2']['__call__']
    result.append((mine, slopes, *(np.asarray(z, np.float64) for z in respond(tokens, mine))))
  return result


def units_of(data, recipe, depth):
  """Return the units of the first blocks. What reaches a later one differs little at initialization."""
  config = model_config(data, 'hyperbf', recipe)
  config.depth = min(config.depth, depth)
  return units_at_init(config.to_json(), SETS[data][0])


@pytest.mark.parametrize('data,recipe,depth', UNITS)
def test_no_response_of_a_shipped_unit_is_dead_or_constant_at_init(data, recipe, depth):
  for _, _, log_k, responses in units_of(data, recipe, depth):
    assert np.all(np.isfinite(responses))
    assert np.all(np.any(responses != 0, axis=-1)), 'a token wakes no center'
    assert np.all(np.any(responses != 0, axis=-2)), 'no token wakes this center'
    k = np.exp(log_k - log_k.max(-1, keepdims=True))
    assert (k.std(-1) / k.mean(-1)).min() > SPREAD
    responding = k.sum(-1) ** 2 / np.square(k).sum(-1)
    assert np.median(responding) > RESPONDING, 'a token wakes few centers'
    across_tokens = responses.std(-2) / np.sqrt(np.square(responses).mean(-2))
    assert np.median(across_tokens) > CHANGING, 'all tokens have the same response'


@pytest.mark.parametrize('data,recipe,depth', UNITS)
def test_every_parameter_of_a_shipped_unit_learns_from_the_start(data, recipe, depth):
  for params, gradients, _, _ in units_of(data, recipe, depth):
    for name in set(params) - {'bias'}:
      norm = np.linalg.norm(params[name])
      assert 0.01 * norm * np.linalg.norm(gradients[name]) > REACH, name


def test_the_floors_catch_a_constant_unit():
  """With σ² = D in place of √D, units are nearly constant: log K is divided by √D. The floors must notice this."""
  for _, _, log_k, _ in units_of('cifar10', 'small', 2):
    k = np.exp(log_k / model_config('cifar10', 'hyperbf', 'small').width ** 0.5)
    assert (k.std(-1) / k.mean(-1)).max() < SPREAD
