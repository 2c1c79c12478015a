import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.data import augment as augment_module
from hbf.data.augment import normalise

augment = jax.jit(augment_module.augment, static_argnames=('flip', 'crop'))

KEY = jax.random.key(5)


def _images(count, seed=0, size=6):
  return np.random.default_rng(seed).integers(1, 256, (count, size, size, 3), dtype=np.uint8)


def _shifts(image, crop):
  """All that a crop can make of an image, by (down, left)."""
  padded = np.pad(image, ((crop, crop), (crop, crop), (0, 0)))
  size = image.shape[0]
  span = range(2 * crop + 1)
  return {(top, left): padded[top : top + size, left : left + size] for top in span for left in span}


def test_every_result_is_a_shift_of_the_image_or_its_mirror_and_all_occur():
  images = np.repeat(_images(1), 400, axis=0)
  out = np.asarray(augment(KEY, images, jnp.arange(400), flip=True, crop=2))
  assert out.dtype == np.uint8
  kinds = {}
  for flipped, image in ((False, images[0]), (True, images[0][:, ::-1])):
    kinds |= {shift.tobytes(): (flipped, offset) for offset, shift in _shifts(image, 2).items()}
  found = [kinds[result.tobytes()] for result in out]
  assert set(found) == set(kinds.values())
  assert 150 < sum(flipped for flipped, _ in found) < 250


@pytest.mark.parametrize(('flip', 'crop'), [(False, 0), (True, 0), (False, 1)])
def test_switched_off_parts_do_nothing(flip, crop):
  images = _images(64)
  out = np.asarray(augment(KEY, images, jnp.arange(64), flip=flip, crop=crop))
  for image, result in zip(images, out, strict=True):
    allowed = list(_shifts(image, crop).values()) + ([image[:, ::-1]] if flip else [])
    assert any((result == other).all() for other in allowed)
  assert (out == images).all() == (not flip and not crop)


def test_augmentation_is_a_function_of_the_index_not_of_the_row():
  images, index = _images(32), np.arange(100, 132)
  whole = np.asarray(augment(KEY, images, index, flip=True, crop=2))
  rows = np.random.default_rng(1).permutation(32)[:7]
  part = np.asarray(augment(KEY, images[rows], index[rows], flip=True, crop=2))
  np.testing.assert_array_equal(part, whole[rows])


def test_steps_differ():
  images = _images(32)
  a, b = (augment(jax.random.fold_in(KEY, step), images, jnp.arange(32), flip=True, crop=2) for step in (0, 1))
  assert (np.asarray(a) != np.asarray(b)).any()


def test_sharded_augmentation_is_identical_and_stays_on_its_device(sharding):
  images, index = _images(16), np.arange(16)
  function = jax.jit(lambda z, i: augment(KEY, z, i, flip=True, crop=2))
  sharded = jax.device_put((images, index), sharding)
  compiled = function.lower(*sharded).compile()
  np.testing.assert_array_equal(compiled(*sharded), function(images, index))
  assert not any(word in compiled.as_text() for word in ('all-gather', 'all-reduce', 'collective-permute'))


def test_normalise():
  images = _images(3)
  mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
  expected = (images / 255.0 - np.array(mean)) / np.array(std)
  out = normalise(jnp.asarray(images), mean, std)
  assert out.dtype == jnp.float32
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('most', [1, 4])
def test_a_choice_among_slices_is_the_slice(most):
  """A TPU's way and the others'."""
  image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 6, 3), np.uint8))
  padded = jnp.pad(image, ((most, most), (most, most), (0, 0)))
  for corner in np.ndindex(2 * most + 1, 2 * most + 1):
    expected = np.asarray(padded)[corner[0] : corner[0] + 8, corner[1] : corner[1] + 6]
    corner = jnp.asarray(corner)
    for found in (augment_module._cut(padded, corner, image.shape), augment_module._choose(padded, corner, most)):
      np.testing.assert_array_equal(found, expected)


def test_for_a_tpu_nothing_loops_over_the_images():
  """Its compiler makes a loop of a gather that takes more than a number of each image."""
  images, index = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.uint8), jax.ShapeDtypeStruct((4,), jnp.int32)
  crop = jax.jit(lambda images, index: augment_module.augment(jax.random.key(0), images, index, flip=True, crop=1))
  traced = crop.trace(images, index)
  gathers = {
    name: 'stablehlo.gather' in traced.lower(lowering_platforms=(name,)).as_text() for name in ('tpu', 'cpu')
  }
  assert gathers == {'tpu': False, 'cpu': True}
