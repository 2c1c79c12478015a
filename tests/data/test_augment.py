import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.data.augment import geometry
from hbf.data.augment.batches import augment, normalize
from hbf.data.augment.transforms import read_transforms
from hbf.data.pipeline.order import TrainOrder

KEY = jax.random.key(5)
ALL = (('resized_crop', 0.3), ('flip',), ('color_jitter', 0.4, 0.4, 0.4), ('trivial_augment',), ('erase', 0.5))
FLIP_AND_SHIFT = (('flip',), ('shift', 2))


@functools.cache
def jitted(transforms):
  entries = read_transforms(transforms)
  return jax.jit(lambda key, images, index: augment(key, images, index, entries))


def augmented(images, index, transforms, key=KEY):
  return np.asarray(jitted(transforms)(key, images, index))


def _images(count, seed=0, size=6):
  return np.random.default_rng(seed).integers(1, 256, (count, size, size, 3), dtype=np.uint8)


def _shifts(image, crop):
  """Return all shifts of an image by their offsets (down, left)."""
  padded = np.pad(image, ((crop, crop), (crop, crop), (0, 0)))
  size = image.shape[0]
  span = range(2 * crop + 1)
  return {(top, left): padded[top : top + size, left : left + size] for top in span for left in span}


def test_every_result_is_a_shift_of_the_image_or_its_mirror_and_all_occur():
  images = np.repeat(_images(1), 400, axis=0)
  out = augmented(images, jnp.arange(400), FLIP_AND_SHIFT)
  assert out.dtype == np.uint8
  kinds = {}
  for flipped, image in ((False, images[0]), (True, images[0][:, ::-1])):
    kinds |= {shift.tobytes(): (flipped, offset) for offset, shift in _shifts(image, 2).items()}
  found = [kinds[result.tobytes()] for result in out]
  assert set(found) == set(kinds.values())
  assert 150 < sum(flipped for flipped, _ in found) < 250


@pytest.mark.parametrize('rate', [0.0, 1.0])
def test_a_rate_of_0_flips_no_image_and_one_of_1_all(rate):
  images = _images(20)
  out = augmented(images, jnp.arange(20), (('flip', rate),))
  np.testing.assert_array_equal(out, images[:, :, ::-1] if rate else images)


def test_without_transforms_images_stay_as_they_are():
  images = _images(20)
  np.testing.assert_array_equal(augmented(images, jnp.arange(20), ()), images)


@pytest.mark.parametrize('transforms', [FLIP_AND_SHIFT, (('shift', 2),), (('flip',),)])
def test_flip_and_shift_draw_what_they_did_when_they_were_keys_of_the_config(transforms):
  """Older runs can be continued, whichever of the two transforms they name."""
  images, index = _images(50), np.arange(7, 57)
  flip, crop = (any(name == kind for name, *_ in transforms) for kind in ('flip', 'shift'))
  expected = []
  for image, number in zip(images, index, strict=True):
    flip_key, crop_key = jax.random.split(jax.random.fold_in(KEY, number))
    if flip and jax.random.bernoulli(flip_key):
      image = image[:, ::-1]
    corner = jax.random.randint(crop_key, (2,), 0, 5)
    expected.append(_shifts(image, 2)[tuple(map(int, corner))] if crop else image)
  np.testing.assert_array_equal(augmented(images, index, transforms), expected)


def test_a_transform_draws_the_same_whatever_else_is_named():
  images, index = _images(20), np.arange(20)
  first = augmented(images, index, (('erase', 1.0),))
  flipped = augmented(images[:, :, ::-1], index, (('flip', 1.0), ('erase', 1.0)))
  np.testing.assert_array_equal(flipped, first)


@pytest.mark.parametrize('transforms', [FLIP_AND_SHIFT, ALL], ids=['slices', 'warp'])
def test_augmentation_is_a_function_of_the_index_not_of_the_row(transforms):
  images, index = _images(32), np.arange(100, 132)
  whole = augmented(images, index, transforms)
  rows = np.random.default_rng(1).permutation(32)  # all of them, for the same program
  np.testing.assert_array_equal(augmented(images[rows], index[rows], transforms), whole[rows])


@pytest.mark.parametrize('transforms', [FLIP_AND_SHIFT, ALL], ids=['slices', 'warp'])
def test_steps_differ(transforms):
  images = _images(32)
  a, b = (augmented(images, jnp.arange(32), transforms, jax.random.fold_in(KEY, step)) for step in (0, 1))
  assert (a != b).any()


@pytest.mark.parametrize('transforms', [FLIP_AND_SHIFT, ALL], ids=['slices', 'warp'])
def test_sharded_augmentation_is_identical_and_stays_on_its_device(sharding, transforms):
  images, index = _images(32), np.arange(32)
  sharded = jax.device_put((images, index), sharding)
  compiled = jitted(transforms).lower(KEY, *sharded).compile()
  np.testing.assert_array_equal(compiled(KEY, *sharded), augmented(images, index, transforms))
  assert not any(word in compiled.as_text() for word in ('all-gather', 'all-reduce', 'collective-permute'))


def test_normalize():
  images = _images(3)
  mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
  expected = (images / 255.0 - np.array(mean)) / np.array(std)
  out = normalize(jnp.asarray(images), mean, std)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('most', [1, 4])
def test_a_choice_among_slices_is_the_slice(most):
  """The implementation for TPUs and the one for other devices give the same slice."""
  image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8))
  padded = jnp.pad(image, ((most, most), (most, most), (0, 0)))
  for corner in np.ndindex(2 * most + 1, 2 * most + 1):
    expected = np.asarray(padded)[corner[0] : corner[0] + 8, corner[1] : corner[1] + 6]
    corner = jnp.asarray(corner)
    slices = (
      geometry._slice_dynamically(padded, corner, image.shape),
      geometry._slice_by_selection(padded, corner, most),
    )
    for found in slices:
      np.testing.assert_array_equal(found, expected)


def test_for_a_tpu_nothing_loops_over_the_images():
  """A TPU's compiler makes a loop of a gather that takes more than one number from each image."""
  images, index = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.uint8), jax.ShapeDtypeStruct((4,), jnp.int32)
  entries = read_transforms((('flip',), ('shift', 1)))
  traced = jax.jit(lambda images, index: augment(KEY, images, index, entries)).trace(images, index)
  gathers = {
    name: 'stablehlo.gather' in traced.lower(lowering_platforms=(name,)).as_text() for name in ('tpu', 'cpu')
  }
  assert gathers == {'tpu': False, 'cpu': True}


@pytest.mark.parametrize('others', [(), (('resized_crop', 1.0),)], ids=['slices', 'warp'])
def test_two_epochs_of_alternate_flip_show_each_image_once_on_each_side(others):
  """The result does not depend on the step's key. Batches of 5 of 8 images extend over several epochs."""
  images, order = _images(8, size=4), TrainOrder(3, 8, 5)
  entries = read_transforms((('alternate_flip',), *others))
  run = jax.jit(
    lambda key, index, step: augment(key, jnp.asarray(images)[index], index, entries, (), KEY, order.epochs(step))
  )
  shown = {}
  for step in range(8):  # 40 images, 5 epochs
    index = order(step)
    sides = np.asarray(run(jax.random.fold_in(KEY, step), index, step))
    for number, image in zip(index, sides, strict=True):
      assert (image == images[number]).all() or (image == images[number, :, ::-1]).all()
      shown.setdefault(int(number), []).append(bool((image == images[number]).all()))
  assert all(len(sides) == 5 and sides == [sides[0] ^ bool(i % 2) for i in range(5)] for sides in shown.values())
  assert {sides[0] for sides in shown.values()} == {False, True}
