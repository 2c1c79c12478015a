"""Tests that color operations are bit-identical to Pillow's."""

import jax
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from hbf.data.augment import color

DRAWS = 150
ENHANCE = {
  'brightness': ImageEnhance.Brightness,
  'contrast': ImageEnhance.Contrast,
  'saturation': ImageEnhance.Color,
  'sharpness': ImageEnhance.Sharpness,
}
operate = jax.jit(jax.vmap(color.operate, in_axes=(None, 0, 0, 0, 0)))


def pillow(image, name, factor, bits, threshold):
  picture = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
  if name in ENHANCE:
    picture = ENHANCE[name](picture).enhance(factor / color.ONE)
  elif name == 'posterize':
    picture = ImageOps.posterize(picture, int(bits))
  elif name == 'solarize':
    picture = ImageOps.solarize(picture, float(threshold))
  else:
    picture = getattr(ImageOps, name)(picture)
  return np.asarray(picture).reshape(image.shape)


def pictures(height, width):
  """Return images of noise, dull noise, gradients, one color, black and white, and few dark levels."""
  random, shape = np.random.default_rng(0), (height, width, 3)
  rows, columns = np.mgrid[:height, :width]
  gradients = (rows * 255 // height, columns * 255 // width, (rows + columns) * 127 // (height + width))
  kinds = [random.integers(0, 256, shape), random.integers(90, 140, shape), np.stack(gradients, -1)]
  kinds += [np.full(shape, 77), 255 * random.integers(0, 2, shape), random.poisson(3, shape)]
  return [kind.astype(np.uint8) for kind in kinds]


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('size', [(32, 32), (20, 17), (2, 3)], ids=str)
def test_every_operation_is_pillows(size, channels):
  random = np.random.default_rng(1)
  numbers = random.integers(-1, len(color.OPERATIONS), DRAWS)
  factors = np.r_[[0, 1, 4095, 4096, 4097, 8191], random.integers(0, 4 * color.ONE, DRAWS - 6)]
  bits, thresholds = random.integers(1, 9, DRAWS), random.integers(0, 511, DRAWS) / 2
  for image in pictures(*size):
    image = image[..., :channels]
    found = np.asarray(operate(image, numbers, factors, bits, thresholds))
    for number, *how, result in zip(numbers, factors, bits, thresholds, found, strict=True):
      name = 'nothing' if number < 0 else color.OPERATIONS[number]
      np.testing.assert_array_equal(
        result, image if number < 0 else pillow(image, name, *how), err_msg=f'{name} {how}'
      )


def test_autocontrast_is_pillows_for_every_least_and_greatest_level():
  """Pillow truncates a float64, which may be just below the exact integer."""
  low, high = np.triu_indices(256)
  tables = jax.jit(jax.vmap(color.autocontrast_table))(np.stack([low, high], -1)[:, :, None, None].astype(np.uint8))
  inexact = 0
  for least, greatest, table in zip(low.tolist(), high.tolist(), np.asarray(tables)[..., 0], strict=True):
    levels = np.arange(least, greatest + 1)
    scale = 255.0 / max(greatest - least, 1)
    expected = levels if least == greatest else (levels * scale + -least * scale).astype(int)
    inexact += (expected != levels).any() and (expected != 255 * (levels - least) // max(greatest - least, 1)).any()
    np.testing.assert_array_equal(table[levels], expected)
  assert inexact > 1000


@pytest.mark.parametrize('channels', [1, 3])
def test_jitter_is_three_enhancements_by_what_it_drew(channels):
  strengths, key = (0.4, 0.6, 0.8), jax.random.key(3)
  factors = np.asarray(color.to_factor(1 + np.array(strengths) * jax.random.uniform(key, (3,), minval=-1.0)))
  assert (abs(factors / color.ONE - 1) <= strengths).all() and len(set(factors.tolist())) == 3
  for image in pictures(12, 10):
    expected = image[..., :channels]
    found = jax.jit(color.jitter, static_argnums=(2, 3, 4))(key, expected, *strengths)
    for name, factor in zip(('brightness', 'contrast', 'saturation'), factors.tolist(), strict=True):
      expected = pillow(expected, name, factor, 0, 0)
    np.testing.assert_array_equal(found, expected)
