"""Color operations on uint8 images [H, W, C], C = 1 or 3, bit-identical to Pillow (ImageEnhance, ImageOps).

The operations compute with integers, so the results are the same on every device. A factor is a multiple of 1/4096
and below 8. For such factors Pillow's float32 arithmetic is exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.pipeline.memory import keep

ONE = 4096  # a factor of 1
LEVELS = 256
# The operations in the order of their numbers. A pointwise operation maps each level of a channel to another level.
# The last two operations depend on other channels or pixels.
POINTWISE = ('brightness', 'contrast', 'posterize', 'solarize', 'autocontrast', 'equalize')
OPERATIONS = (*POINTWISE, 'saturation', 'sharpness')


def to_factor(value: jax.Array) -> jax.Array:
  """Round a number to the nearest multiple of 1/4096. Return it in units of 1/4096, int32."""
  return jnp.round(value * ONE).astype(jnp.int32)


def operate(
  image: jax.Array, number: jax.Array, factor: jax.Array, bits: jax.Array, threshold: jax.Array
) -> jax.Array:
  """Apply one operation to an image.

  Args:
    image: uint8 [H, W, C].
    number: index of the operation in `OPERATIONS`. A negative index applies no operation.
    factor: factor of brightness, contrast, saturation or sharpness, in units of 1/4096.
    bits: number of bits that posterize keeps, 1 … 8.
    threshold: the least level that solarize inverts.

  Returns:
    uint8 [H, W, C].
  """
  # Under vmap, JAX computes all operations for every image. To save time, the pointwise operations are computed for a
  # table of the 256 levels, not for the pixels.
  levels = jnp.arange(LEVELS)[:, None]
  tables = (
    blend(0, levels, factor),
    blend(mean_gray(image), levels, factor),
    levels >> (8 - bits) << (8 - bits),
    jnp.where(levels < threshold, levels, LEVELS - 1 - levels),
    autocontrast_table(image),
    equalize_table(image),
  )
  chosen = levels
  for i, table in enumerate(tables):
    chosen = jnp.where(number == i, table, chosen)
  looked_up = _look_up(jnp.broadcast_to(chosen, (LEVELS, image.shape[-1])).astype(jnp.uint8), image)
  sharp = number == OPERATIONS.index('sharpness')
  blended = blend(jnp.where(sharp, smooth(image), gray(image)), image, factor).astype(jnp.uint8)
  return jnp.where(number >= len(POINTWISE), blended, looked_up)


def jitter(key: jax.Array, image: jax.Array, brightness: float, contrast: float, saturation: float) -> jax.Array:
  """Change first the brightness, then the contrast, then the saturation of an image by random factors.

  The numbers `brightness`, `contrast` and `saturation` are strengths. A factor is uniform in [1 − strength,
  1 + strength].
  """
  # torchvision's ColorJitter also draws the order at random, and it can change the hue.
  strengths = jnp.array([brightness, contrast, saturation])
  factors = to_factor(1 + strengths * jax.random.uniform(key, (3,), minval=-1.0))
  image = blend(0, image, factors[0])
  image = blend(mean_gray(image), image, factors[1])
  return blend(gray(image), image, factors[2]).astype(jnp.uint8)


def blend(base: jax.Array | int, image: jax.Array, factor: jax.Array) -> jax.Array:
  """Return base + factor · (image − base), clipped to 0 … 255, int32, like Pillow's `Image.blend`.

  The argument `factor` is in units of 1/4096.
  """
  image = image.astype(jnp.int32)
  return jnp.clip((base * ONE + factor * (image - base)) >> 12, 0, LEVELS - 1)


def gray(image: jax.Array) -> jax.Array:
  """Return the luma of each pixel, int32 [H, W, 1], as Pillow's conversion to mode L computes it."""
  image = image.astype(jnp.int32)
  if image.shape[-1] == 1:
    return image
  red, green, blue = (image[..., i : i + 1] for i in range(3))
  return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def mean_gray(image: jax.Array) -> jax.Array:
  """Return the rounded mean luma of all pixels, int32 []. The sum overflows for more than 4 million pixels."""
  luma = gray(image)
  return (2 * jnp.sum(luma) + luma.size) // (2 * luma.size)


def smooth(image: jax.Array) -> jax.Array:
  """Return the result of Pillow's filter SMOOTH, int32.

  The filter is a mean over 3×3 pixels in which the middle pixel counts five times. It does not change the pixels at
  the border.
  """
  image = image.astype(jnp.int32)
  rows = image[:-2] + image[1:-1] + image[2:]
  total = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + 4 * image[1:-1, 1:-1]
  return image.at[1:-1, 1:-1].set((2 * total + 13) // 26)


def _table_indices(image: jax.Array) -> jax.Array:
  # For each pixel and channel, the index of its level in a flattened table [256, C].
  channels = image.shape[-1]
  return (image.astype(jnp.int32) * channels + jnp.arange(channels)).reshape(-1)


def _look_up(table: jax.Array, image: jax.Array) -> jax.Array:
  return keep(table).reshape(-1).at[_table_indices(image)].get(mode='promise_in_bounds').reshape(image.shape)


def equalize_table(image: jax.Array) -> jax.Array:
  """Return the table of Pillow's equalize: the new level for each level and channel, int32 [256, C].

  The new levels make the histogram of a channel nearly flat.
  """
  channels = image.shape[-1]
  counts = jnp.zeros(LEVELS * channels, jnp.int32).at[_table_indices(image)].add(1, mode='promise_in_bounds')
  counts = counts.reshape(LEVELS, channels)
  greatest = image.max(axis=(0, 1)).astype(jnp.int32)
  step = (image.shape[0] * image.shape[1] - counts[greatest, jnp.arange(channels)]) // (LEVELS - 1)
  before = jnp.cumsum(counts, axis=0) - counts
  table = jnp.minimum(_divide(step // 2 + before, jnp.maximum(step, 1)), LEVELS - 1)
  return jnp.where(step > 0, table, jnp.arange(LEVELS)[:, None])


def autocontrast_table(image: jax.Array) -> jax.Array:
  """Return the table of Pillow's autocontrast: the new level for each level and channel, int32 [256, C].

  The new levels of a channel range from 0 to 255. Only the entries for levels that occur in the image are valid.
  """
  low, high = (limit(image, axis=(0, 1)).astype(jnp.int32) for limit in (jnp.min, jnp.max))
  levels = jnp.arange(LEVELS)[:, None]
  rows, index = _pillow_rounds_down()
  one_less = jnp.unpackbits(jnp.asarray(rows)[jnp.asarray(index)[low, high]], axis=-1).T
  above = jnp.clip(levels - low, 0, high - low)
  table = _divide((LEVELS - 1) * above, jnp.maximum(high - low, 1)) - one_less
  return jnp.where(high > low, table, levels)


@functools.cache
def _pillow_rounds_down() -> tuple[np.ndarray, np.ndarray]:
  """Find the levels for which Pillow's autocontrast is one below the exact value, because of float64 rounding.

  These levels depend on the lowest level `low` and the highest level `high` of a channel.

  Returns:
    (rows, index). Row `index[low, high]` of `rows` has a bit for each of the 256 levels: 1 for these levels, else 0.
    `rows` is uint8 [n, 32], and `index` is uint16 [256, 256].
  """
  high, level = np.ogrid[:LEVELS, :LEVELS]
  sets = []
  for low in range(LEVELS):
    width = np.maximum(high - low, 1)
    scale = 255.0 / width
    found, exact = (level * scale - low * scale).astype(int), 255 * (level - low) // width
    sets.append(np.packbits((low <= level) & (level <= high) & (found != exact), axis=-1))
  rows, index = np.unique(np.concatenate(sets), axis=0, return_inverse=True)
  return rows, index.reshape(LEVELS, LEVELS).astype(np.uint16)


def _divide(a: jax.Array, b: jax.Array) -> jax.Array:
  """Return ⌊a / b⌋, int32, for integers a from 0 to 2 million and b of at least 1. On CPUs, a // b is much slower."""
  # CPUs divide floats many times faster than integers. The result is exact, because the distance of (a + 1/2) / b
  # from an integer exceeds the rounding error of every device.
  return jnp.floor((a + 0.5) / b).astype(jnp.int32)
