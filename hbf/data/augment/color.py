"""Operations on the colors of uint8 images [H, W, C], with C of 1 or 3. They equal Pillow's bit for bit.

The references are Pillow's ImageEnhance and ImageOps. All arithmetic is in integers. A factor is a multiple of 1/4096
and below 8. Pillow's float32 arithmetic is then exact, so the result is the same on every device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.pipeline.memory import keep

ONE = 4096  # a factor of 1
LEVELS = 256
# In the order of their numbers. The first ones take a pixel's level to another whatever the others are; the last two
# look at other channels or pixels.
POINTWISE = ('brightness', 'contrast', 'posterize', 'solarize', 'autocontrast', 'equalize')
OPERATIONS = (*POINTWISE, 'saturation', 'sharpness')


def to_factor(value: jax.Array) -> jax.Array:
  """Return the multiple of 1/4096 nearest to a number, as int32."""
  return jnp.round(value * ONE).astype(jnp.int32)


def operate(
  image: jax.Array, number: jax.Array, factor: jax.Array, bits: jax.Array, threshold: jax.Array
) -> jax.Array:
  """Apply one operation to an image.

  Under vmap all operations are computed. Pointwise operations are therefore tables of the 256 levels, not of the
  pixels.

  Args:
    image: uint8 [H, W, C].
    number: index of the operation in `OPERATIONS`. −1: none.
    factor: factor of brightness, contrast, saturation and sharpness, in 1/4096.
    bits: number of bits, 1 … 8, that posterize keeps.
    threshold: level from which on solarize inverts.

  Returns:
    uint8 [H, W, C].
  """
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
  """Change brightness, then contrast, then saturation by factors drawn evenly from 1 − strength … 1 + strength.

  torchvision's ColorJitter also draws the order, and can change the hue.
  """
  strengths = jnp.array([brightness, contrast, saturation])
  factors = to_factor(1 + strengths * jax.random.uniform(key, (3,), minval=-1.0))
  image = blend(0, image, factors[0])
  image = blend(mean_gray(image), image, factors[1])
  return blend(gray(image), image, factors[2]).astype(jnp.uint8)


def blend(base: jax.Array | int, image: jax.Array, factor: jax.Array) -> jax.Array:
  """Blend the base (factor 0) and the image (factor 1, `ONE`), or go beyond: Pillow's Image.blend, int32."""
  image = image.astype(jnp.int32)
  return jnp.clip((base * ONE + factor * (image - base)) >> 12, 0, LEVELS - 1)


def gray(image: jax.Array) -> jax.Array:
  """Return the luma, int32 [H, W, 1]: Pillow's conversion to L."""
  image = image.astype(jnp.int32)
  if image.shape[-1] == 1:
    return image
  red, green, blue = (image[..., i : i + 1] for i in range(3))
  return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def mean_gray(image: jax.Array) -> jax.Array:
  """Return the mean luma, rounded, int32. It is right for up to 4 million pixels."""
  luma = gray(image)
  return (2 * jnp.sum(luma) + luma.size) // (2 * luma.size)


def smooth(image: jax.Array) -> jax.Array:
  """Apply Pillow's filter SMOOTH, int32: a mean over 3×3 in which the middle counts five times. The border stays."""
  image = image.astype(jnp.int32)
  rows = image[:-2] + image[1:-1] + image[2:]
  total = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + 4 * image[1:-1, 1:-1]
  return image.at[1:-1, 1:-1].set((2 * total + 13) // 26)


def _entries(image: jax.Array) -> jax.Array:
  """Return the index of every number of an image in a flat table [256, C], int32 [H · W · C]."""
  channels = image.shape[-1]
  return (image.astype(jnp.int32) * channels + jnp.arange(channels)).reshape(-1)


def _look_up(table: jax.Array, image: jax.Array) -> jax.Array:
  """Look up every number of an image in a table [256, C]."""
  return keep(table).reshape(-1).at[_entries(image)].get(mode='promise_in_bounds').reshape(image.shape)


def equalize_table(image: jax.Array) -> jax.Array:
  """Return the table that flattens the histogram of each channel, int32 [256, C]."""
  channels = image.shape[-1]
  counts = jnp.zeros(LEVELS * channels, jnp.int32).at[_entries(image)].add(1, mode='promise_in_bounds')
  counts = counts.reshape(LEVELS, channels)
  greatest = image.max(axis=(0, 1)).astype(jnp.int32)
  step = (image.shape[0] * image.shape[1] - counts[greatest, jnp.arange(channels)]) // (LEVELS - 1)
  before = jnp.cumsum(counts, axis=0) - counts
  table = jnp.minimum(_divide(step // 2 + before, jnp.maximum(step, 1)), LEVELS - 1)
  return jnp.where(step > 0, table, jnp.arange(LEVELS)[:, None])


def autocontrast_table(image: jax.Array) -> jax.Array:
  """Return the table that maps the least and greatest level of each channel to 0 and 255, int32 [256, C].

  Entries of levels that the channel does not have are arbitrary.
  """
  low, high = (limit(image, axis=(0, 1)).astype(jnp.int32) for limit in (jnp.min, jnp.max))
  levels = jnp.arange(LEVELS)[:, None]
  rows, index = _rounded_down()
  one_less = jnp.unpackbits(jnp.asarray(rows)[jnp.asarray(index)[low, high]], axis=-1).T
  above = jnp.clip(levels - low, 0, high - low)
  table = _divide((LEVELS - 1) * above, jnp.maximum(high - low, 1)) - one_less
  return jnp.where(high > low, table, levels)


@functools.cache
def _rounded_down() -> tuple[np.ndarray, np.ndarray]:
  """Return the levels for which Pillow's autocontrast, computed in float64, is one below the exact result.

  Returns:
    Sets of levels, uint8 [n, 32], with 8 levels in a byte, and the set of each pair of least and greatest level,
    uint16 [256, 256].
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
  """Return ⌊a / b⌋ of integers, a from 0 to 2 million, b from 1, int32.

  CPUs divide floats many times faster than integers. The added half keeps the quotient farther from an integer than
  the rounding of any device.
  """
  return jnp.floor((a + 0.5) / b).astype(jnp.int32)
