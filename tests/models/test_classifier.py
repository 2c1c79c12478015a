import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn import drawn
from ops import reference

from hbf.errors import UserError
from hbf.models.classifier import ImageClassifier
from hbf.models.edited import EditedClassifier
from hbf.models.embedding import PatchEmbedding, neighborhoods, sincos, to_patches
from hbf.models.extended import ExtendedClassifier
from hbf.nn.context import Context
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk
from hbf.options import OptionError

WIDTH, CLASSES, PATCH = 8, 3, 2
TRAIN = Context(train=True)
UNIT = {'centers': 6, 'sigma_scale': 1.0, 'centers_init': 'normal', 'coefficients_scale': 1.0}
OPTIONS = {'hyperbf': ({'metric': 'full', 'memory': 1}, UNIT), 'vit': ({}, {'hidden': 6})}
EMBED = {'width': WIDTH, 'patch': PATCH, 'pool': 'mean', 'positions': 'learned'}


def make_model(name='vit', **changes):
  """Return a classifier with changed options of its embedding and its trunk."""
  stage1, stage2 = make_stages(name, 2, *OPTIONS[name])
  parts = []
  for kind, start in ((PatchEmbedding, EMBED), (Trunk, {'depth': 1, 'stage1': stage1, 'stage2': stage2})):
    fields = {field.name for field in dataclasses.fields(kind)}
    parts.append(kind(**start | {key: value for key, value in changes.items() if key in fields}))
  return ImageClassifier(*parts, CLASSES)


def make_images(shape=(2, 4, 6, 3), seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_params(model, images):
  return drawn.random_params(model, images, train=False)


def logits(model, params, images):
  return np.asarray(drawn.apply(model, params, images, train=False))


def test_patches_are_the_squares_of_the_image_row_by_row():
  images = np.asarray(make_images())
  patches = np.asarray(to_patches(jnp.asarray(images), PATCH))
  assert patches.shape == (2, 2, 3, PATCH * PATCH * 3)
  for b in range(2):
    for i in range(2):
      for j in range(3):
        square = images[b, i * PATCH : (i + 1) * PATCH, j * PATCH : (j + 1) * PATCH]
        np.testing.assert_array_equal(patches[b, i, j], square.reshape(-1))


@pytest.mark.parametrize('shape', [(1, 4, 5, 3), (1, 5, 4, 3)])
def test_a_patch_that_does_not_divide_the_image_is_a_user_error(shape):
  with pytest.raises(UserError, match=f"patches of 2 pixels don't divide images of {shape[1]}×{shape[2]}"):
    jax.eval_shape(functools.partial(make_model().init, train=False), jax.random.key(0), make_images(shape))


@pytest.mark.parametrize('shape', [(8, 8), (8, 8, 3), (1, 1, 8, 8, 3)])
def test_images_have_four_axes(shape):
  with pytest.raises(UserError, match=r'images have shape \[.*\]: expected \[B, height, width, channels\]'):
    jax.eval_shape(functools.partial(make_model().init, train=False), jax.random.key(0), make_images(shape))


def test_a_classifier_has_a_class():
  with pytest.raises(UserError, match='classes is 0: expected a whole number of 1 or more'):
    make_model().clone(classes=0)


def convolution(z, kernel, bias):
  """Compute a 3×3 convolution of z [B, H, W, C] by kernel [9 C, D], with a stride of 2 and a border of zeros."""
  batch, height, width, _ = z.shape
  padded = np.pad(np.asarray(z, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
  out = np.empty((batch, height // 2, width // 2, kernel.shape[1]))
  for i, j in np.ndindex(out.shape[1:3]):
    out[:, i, j] = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].reshape(batch, -1) @ kernel.astype(np.float64)
  return out + bias


def test_neighborhoods_are_what_a_convolution_multiplies():
  images = make_images()
  kernel = np.random.default_rng(1).normal(size=(3, 3, 3, 5)).astype(np.float32)
  layout = ('NHWC', 'HWIO', 'NHWC')
  expected = jax.lax.conv_general_dilated(images, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=layout)
  np.testing.assert_allclose(neighborhoods(images) @ kernel.reshape(27, 5), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('patch', [2, 8])
def test_the_stem_is_convolutions_down_to_the_patches(patch):
  model = PatchEmbedding(width=WIDTH, patch=patch, pool='mean', positions='none', stem='conv')
  images = make_images((2, 16, 8, 3))
  shapes = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda z: rng.normal(size=z.shape).astype('f'), shapes)
  z = np.asarray(images)
  for i, channels in enumerate({2: [], 8: [2, 4]}[patch]):
    z = convolution(z, **params[f'stem{i}'])
    assert z.shape[-1] == channels
    z = np.asarray(jax.nn.gelu(reference.layer_norm(z, **params[f'norm_stem{i}'])))
  expected = convolution(z, **params['embedding'])
  tokens, places = drawn.apply(model, params, images, train=False)
  np.testing.assert_allclose(tokens, expected.reshape(2, -1, WIDTH), rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(places, grid(16 // patch, 8 // patch))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'patch': 3, 'stem': 'conv'}, 'patch must be 2, 4, 8, … and divide the width; they are 3 and 8'),
    ({'patch': 16, 'stem': 'conv'}, 'they are 16 and 8'),
    ({'patch': 1, 'stem': 'conv'}, 'they are 1 and 8'),
    ({'patch': 32, 'stem': 'conv'}, "patches of 32 pixels don't divide images of 48×48"),
    ({'stem': 'cnov'}, "unknown stem 'cnov': did you mean 'conv'"),
    ({'pool': 'sequences'}, "unknown pool 'sequences': did you mean 'sequence'"),
  ],
)
def test_a_stem_that_can_not_be_is_a_user_error(options, message):
  with pytest.raises(UserError, match=message):
    jax.eval_shape(
      functools.partial(make_model(**options).init, train=False), jax.random.key(0), make_images((1, 48, 48, 3))
    )


@pytest.mark.parametrize(('stem', 'patch'), [('patch', 4), ('conv', 2)])
def test_whitening_needs_two_convolutions(stem, patch):
  model = make_model(stem=stem, patch=patch, whiten=True)
  with pytest.raises(UserError, match=f'needs stem conv and .* 4 or more; they are {stem} and {patch}'):
    jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), make_images((1, 48, 48, 3)))


def test_a_whitened_stem_starts_with_uncorrelated_channels_of_variance_1_and_their_negatives():
  """This holds over the windows inside the images. Neighboring pixels and channels of the images are correlated."""
  model = PatchEmbedding(width=WIDTH, patch=4, pool='mean', positions='none', stem='conv', whiten=True)
  noise = np.random.default_rng(0).normal(size=(64, 17, 17, 3))
  noise[..., 1:] += 2 * noise[..., :1]
  images = (noise[:, 1:, 1:] + noise[:, :-1, 1:] + noise[:, 1:, :-1]).astype(np.float32)
  params = model.init(jax.random.key(0), images, train=False)['params']
  assert jax.tree.map(jnp.shape, params) == {
    'stem0': {'whitening': (27, 54), 'bias': (54,)},
    'embedding': {'kernel': (9 * 54, WIDTH), 'bias': (WIDTH,)},
  }
  channels = convolution(images, np.asarray(params['stem0']['whitening']), 0.0)
  inside = channels[:, 1:, 1:].reshape(-1, 54)
  np.testing.assert_array_equal(params['stem0']['whitening'][:, 27:], -params['stem0']['whitening'][:, :27])
  np.testing.assert_allclose(inside[:, :27].T @ inside[:, :27] / len(inside), np.eye(27), atol=0.01)
  bias = np.random.default_rng(1).normal(size=54).astype(np.float32)
  params['stem0']['bias'] = bias
  expected = convolution(jax.nn.gelu(channels + bias), **jax.tree.map(np.asarray, params['embedding']))
  tokens, _ = drawn.apply(model, params, images, train=False)
  np.testing.assert_allclose(tokens, expected.reshape(64, -1, WIDTH), rtol=1e-4, atol=1e-4)


def grid(rows, columns):
  return np.array([(i, j) for i in range(rows) for j in range(columns)])


def test_sincos2d_positions_differ_and_lie_in_the_unit_interval():
  positions = sincos(grid(5, 7), 16)
  assert positions.shape == (35, 16) and positions.dtype == np.float32
  assert np.abs(positions).max() <= 1
  assert reference.squared_distances(positions, positions)[~np.eye(35, dtype=bool)].min() > 0.1


def test_sincos2d_products_depend_on_the_offset_only():
  """p(a)·p(b) = Σ cos(ω (a − b)), summed over frequencies, rows and columns: sines and cosines come in pairs."""
  places = grid(4, 6)
  positions = sincos(places, 16).astype(np.float64)
  frequencies = 10_000.0 ** -(np.arange(4) / 3)
  offsets = places[:, None] - places[None]
  expected = np.cos(offsets[..., None] * frequencies).sum(axis=(-1, -2))
  np.testing.assert_allclose(positions @ positions.T, expected, atol=1e-5)


def test_sincos2d_needs_a_width_divisible_by_four():
  with pytest.raises(UserError, match='divisible by 4: it is 10'):
    sincos(np.zeros((4, 2)), 10)


@pytest.mark.parametrize('positions', ['learned', 'sincos2d'])
@pytest.mark.parametrize('pool', ['cls', 'mean'])
@pytest.mark.parametrize('name', OPTIONS)
def test_parameters_are_those_the_options_ask_for(name, pool, positions):
  model, images = make_model(name, pool=pool, positions=positions, depth=2), make_images()
  out, variables = jax.eval_shape(functools.partial(model.init_with_output, train=False), jax.random.key(0), images)
  assert (out.shape, out.dtype) == ((2, CLASSES), jnp.float32)
  optional = {'class_token'} if pool == 'cls' else set()
  optional |= {'positions'} if positions == 'learned' else set()
  assert set(variables['params']) == {'embedding', 'block0', 'block1', 'norm', 'head'} | optional


def as_blocks_leave_them(model, params, images):
  """Return the output tokens [B, length, D] of the block."""
  filtered = functools.partial(model.apply, train=False, capture_intermediates=lambda m, _: m.name == 'block0')
  return np.asarray(filtered({'params': params}, images)[1]['intermediates']['block0']['__call__'][0])


@pytest.mark.parametrize('pool', ['cls', 'mean'])
def test_logits_are_read_from_the_class_token_or_the_mean_of_the_patches(pool):
  model, images = make_model(pool=pool), make_images()
  params = random_params(model, images)
  tokens = reference.layer_norm(as_blocks_leave_them(model, params, images), **params['norm'])
  assert tokens.shape[1] == 6 + (pool == 'cls')
  pooled = tokens[:, 0] if pool == 'cls' else tokens.mean(axis=1)
  expected = pooled @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(logits(model, params, images), expected, rtol=1e-4, atol=1e-4)


def test_sequence_pooling_is_a_mean_weighted_by_a_softmax_of_scores():
  model, images = make_model(pool='sequence'), make_images()
  params = random_params(model, images)
  tokens = reference.layer_norm(as_blocks_leave_them(model, params, images), **params['norm'])
  assert set(params['pool']) == {'kernel'}  # a bias would cancel
  scores = np.exp(tokens @ params['pool']['kernel'])
  pooled = (scores * tokens).sum(axis=1) / scores.sum(axis=1)
  expected = pooled @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(logits(model, params, images), expected, rtol=1e-4, atol=1e-4)


def test_every_norm_has_the_norm_epsilon():
  """A norm without scale and bias turns tokens of variance v into tokens of variance v / (v + ε)."""
  model, images = make_model(norm_epsilon=1e9), make_images()
  params = random_params(model, images)
  tree = params['norm'], params['block0']['norm_stage1'], params['block0']['norm_stage2']
  for norm in tree:
    norm.update(scale=np.ones(WIDTH, 'f'), bias=np.zeros(WIDTH, 'f'))
  filtered = functools.partial(model.apply, train=False, capture_intermediates=lambda m, _: 'norm' in (m.name or ''))
  normed = jax.tree.leaves(filtered({'params': params}, images)[1])
  assert len(normed) == len(tree)
  assert all(0 < np.var(z) < 1e-6 for z in normed)


def test_the_class_token_comes_before_the_patches_and_has_no_position():
  """The blocks change nothing here. So the tokens are the class token, and the embedded patches plus positions."""
  model, images = make_model(pool='cls', stage1=_Nothing, stage2=_Nothing), make_images()
  params = random_params(model, images)
  tokens = as_blocks_leave_them(model, params, images)
  patches = np.asarray(to_patches(images, PATCH), np.float64).reshape(2, 6, -1)
  embedded = patches @ params['embedding']['kernel'] + params['embedding']['bias'] + params['positions']
  np.testing.assert_allclose(tokens[:, 1:], embedded, rtol=1e-4, atol=1e-4)
  np.testing.assert_array_equal(tokens[:, 0], np.broadcast_to(params['class_token'][0, 0], (2, WIDTH)))


@pytest.mark.parametrize('pool', ['cls', 'mean'])
def test_stages_are_told_where_the_tokens_are(pool):
  """The positions of patches are their rows and columns. The class token has no position."""
  told = []

  class Listening(_Nothing):
    def __call__(self, tokens, context):
      told.append(context)
      return jnp.zeros_like(tokens)

  model = make_model(pool=pool, stage1=Listening, stage2=Listening)
  model.init(jax.random.key(0), make_images(), train=False)
  expected = grid(2, 3)
  for context in told:
    nowhere = [(np.nan, np.nan)] if pool == 'cls' else []
    np.testing.assert_array_equal(context.positions, [*nowhere, *expected.tolist()])
    assert not context.train
  assert len(told) == 2


class _Nothing:
  """A stage that adds nothing."""

  def __init__(self, name, dtype):
    del name, dtype

  def __call__(self, tokens, context):
    return jnp.zeros_like(tokens)


@pytest.mark.parametrize('pool', ['cls', 'mean'])
@pytest.mark.parametrize('name', OPTIONS)
def test_without_positions_the_order_of_the_patches_does_not_matter(name, pool):
  model, images = make_model(name, pool=pool), make_images()
  params = random_params(model, images)
  grid = np.asarray(images).reshape(2, 2, PATCH, 3, PATCH, 3).swapaxes(2, 3).reshape(2, 6, PATCH, PATCH, 3)
  mixed = grid[:, [3, 0, 5, 1, 4, 2]].reshape(2, 2, 3, PATCH, PATCH, 3).swapaxes(2, 3).reshape(images.shape)
  with_positions = logits(model, params, images), logits(model, params, mixed)
  assert np.abs(with_positions[0] - with_positions[1]).max() > 1e-2
  params['positions'] = np.zeros_like(params['positions'])
  expected = logits(model, params, images)
  np.testing.assert_allclose(logits(model, params, mixed), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('name', OPTIONS)
def test_images_of_a_batch_do_not_see_each_other(name):
  model, images = make_model(name), make_images()
  params = random_params(model, images)
  changed = logits(model, params, images.at[0].multiply(-2))
  np.testing.assert_allclose(logits(model, params, images)[1], changed[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', OPTIONS)
def test_bfloat16_keeps_parameters_and_logits_in_float32_near_those_of_float32(name):
  images = make_images()
  half = make_model(name, dtype=jnp.bfloat16)
  shapes = jax.eval_shape(functools.partial(half.init, train=False), jax.random.key(0), images)['params']
  assert {z.dtype for z in jax.tree.leaves(shapes)} == {jnp.dtype('float32')}
  params = random_params(half, images)
  result, expected = logits(half, params, images), logits(make_model(name), params, images)
  assert result.dtype == np.float32
  assert not np.array_equal(result, expected)
  np.testing.assert_allclose(result, expected, atol=0.1 * np.abs(expected).max())


def test_dropout_works_in_training_only():
  images = make_images()
  plain, dropping = make_model(), make_model(dropout=0.5)
  variables = {'params': random_params(plain, images)}
  expected = np.asarray(plain.apply(variables, images, train=False))
  np.testing.assert_array_equal(dropping.apply(variables, images, train=False), expected)
  trained = dropping.apply(variables, images, train=True, rngs={'dropout': jax.random.key(0)})
  assert not np.allclose(trained, expected)


FORMS = [{'scan_layers': True}, {'scan_layers': True, 'remat': True}]


def slopes(model, images):
  """Return a function from parameters to their gradients, of a loss in training, and the logits."""

  def loss(params):
    out = model.apply({'params': params}, images, train=True, rngs={'dropout': jax.random.key(5)})
    return jnp.square(out).mean(), out

  return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize('name', OPTIONS)
def test_every_form_of_the_blocks_computes_the_same(name):
  images, plain = make_images(), make_model(name, depth=2)
  params = random_params(plain, images)
  expected = slopes(plain, images)(params)
  for form in FORMS if name == 'hyperbf' else FORMS[-1:]:
    result = slopes(make_model(name, depth=2, **form), images)(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), result, expected)
    jax.eval_shape(slopes(make_model(name, depth=2, dtype=jnp.bfloat16, **form), images), params)


def test_a_looped_form_starts_from_the_same_parameters():
  plain, model = (make_model('hyperbf', depth=2, **options) for options in ({}, FORMS[-1]))
  init = [jax.jit(functools.partial(each.init, train=False)) for each in (plain, model)]
  params = [each(jax.random.key(0), make_images()) for each in init]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *params)


def blocks(model, params, tokens, context, **options):
  """Return the tokens after the blocks of a model, before the last norm."""
  return drawn.apply(model.trunk, params, tokens, context, method='_blocks', **options)


def test_scanned_blocks_drop_each_something_else():
  model = make_model(stage1=_Ones, stage2=_Ones, depth=2, dropout=0.5, scan_layers=True)
  params, tokens = random_params(model, make_images()), jnp.zeros((2, 5, WIDTH))
  out = blocks(model, params, tokens, TRAIN, rngs={'dropout': jax.random.key(0)})
  # A stage adds 0 or 2. If both blocks dropped the same, each sum would be twice that of a block: 0, 4 or 8.
  assert set(np.unique(out)) == {0, 2, 4, 6, 8}


class _Ones(_Nothing):
  """A stage that adds 1."""

  def __call__(self, tokens, context):
    return jnp.ones_like(tokens)


def test_recomputed_blocks_drop_the_same_as_kept_ones():
  images = make_images()
  plain, model = (make_model(depth=2, dropout=0.5, remat=remat) for remat in (False, True))
  params = random_params(plain, images)
  kept, recomputed = (slopes(each, images)(params) for each in (plain, model))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), kept, recomputed)


def lowered(name='vit', shape=(2, 4, 6, 3), **options):
  model, images = make_model(name, **options), make_images(shape)
  return slopes(model, images).lower(random_params(model, images))


@pytest.mark.slow
def test_recomputed_blocks_need_less_memory():
  """The blocks are scanned. In unrolled blocks, XLA's CPU backend drops the barriers that make recomputation late."""
  kept, recomputed = (
    lowered(shape=(64, 8, 8, 3), depth=6, scan_layers=True, remat=remat).compile().memory_analysis()
    for remat in (False, True)
  )
  assert recomputed.temp_size_in_bytes < 0.5 * kept.temp_size_in_bytes
  assert lowered(depth=3, remat=True).as_text().count('optimization_barrier') == 3


@pytest.mark.slow
def test_a_scanned_program_does_not_grow_with_depth():
  def products(depth, scan_layers):
    return lowered('hyperbf', depth=depth, scan_layers=scan_layers).as_text().count('dot_general')

  assert products(2, True) == products(5, True) < products(2, False) < products(5, False)


@pytest.mark.parametrize('option,wrong,near', [('pool', 'clss', 'cls'), ('positions', 'learnd', 'learned')])
def test_unknown_options_name_the_nearest(option, wrong, near):
  with pytest.raises(UserError, match=f"unknown {option} '{wrong}': did you mean '{near}'"):
    make_model(**{option: wrong})


def test_stochastic_depth_grows_from_no_drop_in_the_first_block_to_its_rate_in_the_last():
  """Each of the two stages of a block adds 1. If block i is kept, this 1 is divided by 1 − rate i."""
  depth, count = 3, 2000
  model = make_model(stage1=_Ones, stage2=_Ones, depth=depth, drop_path=0.5, scan_layers=True)
  params, tokens = random_params(model, make_images()), jnp.zeros((count, 1, WIDTH))
  out = blocks(model, params, tokens, TRAIN, rngs={'dropout': jax.random.key(0)})
  added = np.asarray(out)[:, 0]
  assert np.ptp(added, axis=-1).max() == 0
  # 2 of the first block, 4/3 for each of two stages with rate 1/4, 2 for each of two with rate 1/2.
  possible = {2 + 4 / 3 * second + 2 * third for second in range(3) for third in range(3)}
  np.testing.assert_allclose(sorted(set(added[:, 0].round(3))), sorted({round(z, 3) for z in possible}), atol=2e-3)
  np.testing.assert_allclose(added.mean(), 2 * depth, rtol=0.03)
  evaluated = blocks(model, params, tokens[:1], Context())
  np.testing.assert_array_equal(evaluated, np.full((1, 1, WIDTH), 2 * depth))


def test_stochastic_depth_is_that_of_scanned_blocks_in_unrolled_ones():
  model, images = make_model(stage1=_Ones, stage2=_Ones, depth=3, drop_path=0.5), make_images((500, 2, 2, 3))
  params = random_params(model, images)
  blocks = functools.partial(model.apply, capture_intermediates=lambda m, _: 'block' in (m.name or ''))
  seen = blocks({'params': params}, images, train=True, rngs={'dropout': jax.random.key(0)})[1]['intermediates']
  outs = [np.asarray(seen[f'block{i}']['__call__'][0])[:, 0, 0] for i in range(3)]
  still = blocks({'params': params}, images, train=False)[1]['intermediates']['block0']['__call__'][0]
  np.testing.assert_array_equal(outs[0], still[:, 0, 0])
  for i, step in ((1, 4 / 3), (2, 2)):
    stages = (outs[i] - outs[i - 1]) / step
    np.testing.assert_allclose(stages, stages.round(), atol=1e-4)
    assert set(stages.round()) == {0, 1, 2}


@pytest.mark.parametrize('rate', [-0.1, 1.0])
def test_a_rate_of_stochastic_depth_that_is_none_is_refused(rate):
  with pytest.raises(UserError, match=f'drop_path is {rate}: expected a number from 0 to below 1'):
    make_model(drop_path=rate)


def test_without_positions_patches_are_only_embedded():
  none, model, images = make_model(positions='none'), make_model(), make_images()
  params = random_params(model, images)
  params['positions'] = np.zeros_like(params['positions'])
  expected = logits(model, params, images)
  del params['positions']
  np.testing.assert_array_equal(logits(none, params, images), expected)


@pytest.mark.parametrize('wrap', [lambda z: z, lambda z: EditedClassifier(z, 2), lambda z: ExtendedClassifier(z, 2)])
def test_a_classifier_can_be_called_twice_with_the_same_parameters(wrap):
  """A network that compares two images (a Siamese network) does so. The parts are not given a scope a second time."""
  model, images = wrap(make_model(pool='sequence')), jax.ShapeDtypeStruct((2, 4, 6, 3), jnp.float32)
  params = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)

  def twice(params, images):
    bound = model.bind(params)
    return bound(images, train=False), bound(images[::-1], train=False)

  first, second = jax.eval_shape(twice, params, images)
  assert first.shape == second.shape and first.shape[0] == 2


@pytest.mark.parametrize('kind', [EditedClassifier, ExtendedClassifier])
def test_edits_and_learned_classes_need_tokens_that_scan_layers_hides(kind):
  model, images = kind(make_model(scan_layers=True), 2), jax.ShapeDtypeStruct((2, 4, 6, 3), jnp.float32)
  with pytest.raises(OptionError, match=r'scan_layers hides .*: give hbf\.models\.build\.unrolled\(model\)'):
    jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
