"""Tests of geometric transforms, policies and erasing against their definitions, and of config errors."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import stats

import hbf
from hbf.data.augment import color, geometry, policies, transforms
from hbf.data.augment.pairs import read_mix
from hbf.data.augment.transforms import TRANSFORMS, check_size, read_transforms, transform
from hbf.errors import UserError

KEYS = jax.random.split(jax.random.key(1), 400)
SIZE = (10, 8)


def smooth_image(size=SIZE):
  rows, columns = np.mgrid[: size[0], : size[1]]
  return jnp.asarray(np.stack([20 * rows + 10, 25 * columns + 20, 9 * (rows + columns)], -1).astype(np.uint8))


def drawn(function, *arguments):
  return [np.asarray(z) for z in jax.tree.leaves(jax.jit(jax.vmap(lambda key: function(key, *arguments)))(KEYS))]


@pytest.mark.parametrize(('name', 'argument'), [('flip', 0.5), ('shift', 3)])
def test_a_slice_is_the_warp_bit_for_bit(name, argument):
  image, kind = jnp.asarray(np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)), TRANSFORMS[name]
  warped = drawn(lambda key: geometry.warp(image, kind.geometry(key, SIZE, argument)))[0]
  exact = drawn(kind.exact, image, argument)[0]
  np.testing.assert_array_equal(warped, exact)
  assert len(np.unique(exact, axis=0)) == {'flip': 2, 'shift': 49}[name]


def naive_warp(image, mapping):
  """Return a bilinear warp in float64, pixel by pixel."""
  height, width, _ = image.shape
  out = np.zeros(image.shape)
  for i, j in np.ndindex(height, width):
    x, y = mapping @ np.array([j + 0.5, i + 0.5, 1.0])
    if 0 <= x < width and 0 <= y < height:
      for row, column in np.ndindex(2, 2):
        a, b = int(np.floor(y - 0.5)) + row, int(np.floor(x - 0.5)) + column
        weight = (1 - abs(y - 0.5 - a)) * (1 - abs(x - 0.5 - b))
        out[i, j] += weight * image[np.clip(a, 0, height - 1), np.clip(b, 0, width - 1)]
  return out


@pytest.mark.parametrize('channels', [1, 3])
def test_a_warp_is_bilinear_and_black_outside(channels):
  random = np.random.default_rng(2)
  image = random.integers(1, 256, (*SIZE, channels), np.uint8)
  warp = jax.jit(geometry.warp)
  for _ in range(10):
    mapping = np.c_[random.normal(size=(2, 2)), random.uniform(0, 8, 2)].astype(np.float32)
    expected = naive_warp(image, mapping.astype(np.float64))
    found = np.asarray(warp(image, mapping))
    assert np.abs(found - expected).max() < 0.501
    assert (found == 0).any()


def test_a_warp_is_pillows_but_for_rounding():
  image, mapping = smooth_image((30, 30)), np.array([[0.9, 0.3, -2.0], [-0.2, 1.1, 3.0]], np.float32)
  picture = Image.fromarray(np.asarray(image)).transform(
    (30, 30), Image.Transform.AFFINE, mapping.ravel(), Image.Resampling.BILINEAR
  )
  assert np.abs(np.asarray(picture).astype(int) - np.asarray(geometry.warp(image, mapping))).max() <= 1


def test_maps_are_composed_in_the_order_in_which_they_are_done():
  """Mirroring and then shifting differs from shifting and then mirroring."""
  image = smooth_image()
  mirror, right = np.array([[-1.0, 0, 8], [0, 1, 0]], np.float32), np.array([[1.0, 0, -2], [0, 1, 0]], np.float32)
  found = geometry.warp(image, geometry.compose(mirror, right))
  expected = np.pad(image[:, ::-1], ((0, 0), (2, 0), (0, 0)))[:, :8]
  np.testing.assert_array_equal(found, expected)
  assert (found != geometry.warp(image, geometry.compose(right, mirror))).any()


@pytest.mark.parametrize('size', [(20, 20), (10, 40)], ids=str)
def test_boxes_fit_and_their_areas_are_even(size):
  corner, box = drawn(geometry.draw_box, size, (0.2, 1.0), geometry.ASPECTS)
  sides = np.array(size[::-1])
  assert (corner >= 0).all() and (corner + box <= sides + 1e-4).all()
  areas = box.prod(axis=1) / sides.prod()
  assert stats.kstest(areas, stats.uniform(0.2, 0.8).cdf).pvalue > 1e-3
  aspects = box[:, 0] / box[:, 1]
  fits = (np.maximum(3 / 4, areas * size[1] / size[0]), np.minimum(4 / 3, size[1] / size[0] / areas))
  usual = fits[0] < fits[1] if size[0] == size[1] else areas * sides.prod() <= 4 / 3 * size[0] ** 2
  assert (aspects[usual] > 3 / 4 - 1e-4).all() and (aspects[usual] < 4 / 3 + 1e-4).all()
  np.testing.assert_allclose(box[~usual, 1], size[0], rtol=1e-4)  # the nearest aspect is that of the whole height
  room = (sides - box > 1).all(axis=1)
  assert stats.kstest((corner[room] / (sides - box[room])).ravel(), stats.uniform.cdf).pvalue > 1e-3


def test_a_resized_crop_shows_its_box():
  (mapping,) = drawn(geometry.resized_crop, SIZE, 0.3, 0.9)
  corner, box = drawn(geometry.draw_box, SIZE, (0.3, 0.9), geometry.ASPECTS)
  np.testing.assert_allclose(mapping @ np.array([0, 0, 1]), corner, atol=1e-5)
  np.testing.assert_allclose(mapping @ np.array([8, 10, 1]), corner + box, atol=1e-5)
  image = smooth_image()
  np.testing.assert_array_equal(geometry.warp(image, geometry.resized_crop(KEYS[0], SIZE, 1.0, 1.0)), image)


def operation(name, magnitude, sign=1):
  return policies.Drawn(*(jnp.array([z]) for z in (policies.OPERATIONS.index(name), magnitude, sign)))


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('identity', lambda x, y, m: (x, y)),
    ('shear_x', lambda x, y, m: (x + 0.3 * m * y, y)),
    ('shear_y', lambda x, y, m: (x, y + 0.3 * m * x)),
    ('translate_x', lambda x, y, m: (x + np.trunc(150 / 331 * 8 * m), y)),
    ('translate_y', lambda x, y, m: (x, y + np.trunc(150 / 331 * 10 * m))),
    ('rotate', lambda x, y, m: tuple(rotation(np.radians(30 * m)) @ (x - 4, y - 5) + (4, 5))),
    ('equalize', lambda x, y, m: (x, y)),
  ],
)
def test_moves_of_rand_augment(name, expected):
  for magnitude, sign in ((0, 1), (9, 1), (9, -1), (30, -1)):
    mapping = np.asarray(policies.move(operation(name, magnitude, sign), SIZE, policies.RAND))
    for x, y in ((0.0, 0.0), (3.5, 7.0)):
      np.testing.assert_allclose(mapping @ (x, y, 1), expected(x, y, sign * magnitude / 30), atol=1e-4)


def rotation(angle):
  return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def test_colors_of_the_policies_have_torchvisions_strengths(monkeypatch):
  """The expected strengths are in torchvision's tables for 31 magnitudes."""
  monkeypatch.setattr(color, 'operate', lambda image, number, **how: how)
  for space, dropped in ((policies.RAND, 4), (policies.WIDE, 6)):
    for magnitude in range(31):
      how = policies.recolor(operation('contrast', magnitude, -1), None, space)
      assert how['factor'] == round(4096 * (1 - np.float32(space.factor) * magnitude / 30))
      assert how['bits'] == 8 - round(magnitude / (30 / dropped))
      assert how['threshold'] == np.linspace(255, 0, 31)[magnitude]


@pytest.mark.parametrize('draw', [lambda key: policies.draw_rand(key, 3, 9), policies.draw_trivial])
def test_policies_draw_every_operation_sign_and_magnitude_alike(draw):
  numbers, magnitudes, signs = drawn(draw)
  counts = np.bincount(numbers.ravel())
  assert len(counts) == 14 and stats.chisquare(counts).pvalue > 1e-3
  assert stats.binomtest(int((signs == 1).sum()), signs.size).pvalue > 1e-3 and set(signs.ravel()) == {-1, 1}
  assert set(magnitudes.ravel()) == ({9} if numbers.shape[1] == 3 else set(range(31)))


@pytest.mark.parametrize('entry', [('rand_augment', 2, 9), ('trivial_augment',)], ids=lambda entry: entry[0])
def test_a_policy_moves_first_and_then_does_its_operations(entry):
  """The policy draws a move and a color change together, and applies each of them once."""
  draw = {'rand_augment': lambda key: policies.draw_rand(key, 2, 9), 'trivial_augment': policies.draw_trivial}[
    entry[0]
  ]
  space = {'rand_augment': policies.RAND, 'trivial_augment': policies.WIDE}[entry[0]]
  image = smooth_image((16, 16))

  def stepwise(key):
    key = jax.random.split(key, len(TRANSFORMS))[[*TRANSFORMS].index(entry[0])]
    moved = geometry.warp(image, policies.move(draw(key), (16, 16), space))
    return policies.recolor(draw(key), moved, space)

  (found,), (expected,) = drawn(transform, image, (entry,)), drawn(stepwise)
  np.testing.assert_array_equal(found, expected)
  changed = (found != image).any(axis=(1, 2, 3)).mean()
  assert 0.75 < changed < 1.0  # two of 14 are the identity, or nearly so


def test_erasing_fills_a_box_with_noise_at_its_rate():
  image = jnp.full((24, 24, 3), 7, jnp.uint8)
  (found,) = drawn(transforms.erase, image, 0.4)
  erased = (found != 7).any(axis=-1)
  hit = erased.any(axis=(1, 2))
  assert stats.binomtest(int(hit.sum()), len(hit), 0.4).pvalue > 1e-3
  assert 0.02 < erased[hit].mean() < 0.33 and erased[hit].mean(axis=(1, 2)).max() < 0.36
  for box in erased[hit]:
    rows, columns = box.any(axis=1), box.any(axis=0)
    assert (np.outer(rows, columns) == box).mean() > 0.99  # noise may be 7 in all channels
    assert all(np.abs(np.diff(np.r_[0, side, 0])).sum() == 2 for side in (rows, columns))
  noise = found[erased]
  assert stats.chisquare(np.bincount(noise.ravel(), minlength=256)[8:]).pvalue > 1e-3


@pytest.mark.parametrize('side', [4, 5])
def test_cutout_fills_a_clipped_square_around_any_pixel_with_the_mean(side):
  image, entries = smooth_image(), read_transforms((('cutout', side),))
  (found,) = drawn(transform, image, entries, transforms.Facts(jnp.array([1, 2, 3], jnp.uint8)))
  rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
  possible = {}
  for center in np.ndindex(SIZE):
    inside = [
      (z - c + side // 2 >= 0) & (z - c + side // 2 < side) for z, c in zip((rows, columns), center, strict=True)
    ]
    possible[np.where((inside[0] & inside[1])[..., None], [1, 2, 3], image).astype(np.uint8).tobytes()] = center
  counts = np.zeros(SIZE)
  for result in found:
    counts[possible[result.tobytes()]] += 1
  assert len(possible) == 80 and stats.chisquare(counts.ravel()).pvalue > 1e-3


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    (('flip',), r"data.transforms must be a tuple of tuples, each a name and numbers, as \(\('flip',\),\): it is"),
    ('flip', 'must be a tuple of tuples'),
    ((('flp',),), "unknown name in data.transforms 'flp': did you mean 'flip'"),
    ((('flip', 1.5),), 'data.transforms: rate of flip must be a number from 0 to 1: it is 1.5'),
    ((('flip', True),), 'must be a number from 0 to 1: it is True'),
    ((('flip', 0.5, 2),), r'flip takes rate \(or 0.5\); expected that many numbers: it has \[0.5, 2\]'),
    ((('trivial_augment', 2),), 'trivial_augment takes no arguments'),
    ((('shift',),), 'shift takes pixels'),
    ((('shift', 1.5),), 'pixels of shift must be a whole number from 0 up: it is 1.5'),
    ((('rand_augment', 2, 31),), 'magnitude of rand_augment must be a whole number from 0 to 30: it is 31'),
    ((('rand_augment', 2, 'strong'),), "it is 'strong'"),
    ((('erase', -0.1),), 'rate of erase must be a number from 0 to 1'),
    ((('flip',), ('flip',)), 'has flip 2 times: name each transform once'),
    ((('flip',), ('alternate_flip',)), 'both mirror images; name one of them'),
    ((('resized_crop', 0.9, 0.5),), r'must be the least, then the most: they are \[0.9, 0.5\]'),
    ((('shift', 8),), "shift must be less than an image's side of 8 pixels: it is 8"),
  ],
)
def test_wrong_transforms_are_named(value, message):
  with pytest.raises(UserError, match=message):
    check_size(read_transforms(value), (10, 8, 3))


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    ((('mixpu', 0.8, 0.5),), "unknown name in data.mix 'mixpu': did you mean 'mixup'"),
    ((('mixup', 0.8),), 'data.mix: mixup takes alpha, share'),
    ((('mixup', 0.0, 0.5),), 'alpha of mixup must be a number from 0.01 up: it is 0.0'),
    ((('cutmix', 1.0, 2),), 'share of cutmix must be a number from 0 to 1: it is 2'),
    ((('mixup', 0.8, 0.5), ('cutmix', 1.0, 0.6)), 'must sum to at most 1: they sum to 1.1'),
  ],
)
def test_wrong_mixes_are_named(value, message):
  with pytest.raises(UserError, match=message):
    read_mix(value)


def test_what_json_made_of_a_config_is_read_alike():
  assert read_transforms([['flip'], ['shift', 4]]) == read_transforms((('flip', 0.5), ('shift', 4)))


def test_a_new_transform_leaves_the_keys_of_the_others_whatever_jax_was_told():
  jax.config.update('jax_threefry_partitionable', False)  # as JAX_THREEFRY_PARTITIONABLE=0 does
  importlib.reload(hbf)
  now, later = (jax.random.key_data(jax.random.split(jax.random.key(1), count)) for count in (7, 8))
  np.testing.assert_array_equal(later[:7], now)
