"""Colors of uint8 images [H, W, C], C of 1 or 3, as Pillow changes them, bit for bit (ImageEnhance, ImageOps).

All is whole numbers. A factor is a multiple of 1/4096 and below 8: Pillow's float32 arithmetic is then exact, so that
this is the same on every device, whatever its compiler makes of a product and a sum.
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
  """The multiple of 1/4096 nearest to a number, as int32."""
  return jnp.round(value * ONE).astype(jnp.int32)


def operate(
  image: jax.Array, number: jax.Array, factor: jax.Array, bits: jax.Array, threshold: jax.Array
) -> jax.Array:
  """Does one of the operations to an image.

  Under vmap all of them are computed, so those that are pointwise are made of the 256 levels, not of the pixels.

  Args:
    image: uint8 [H, W, C].
    number: of the operation in `OPERATIONS`; −1 for none.
    factor: of brightness, contrast, saturation and sharpness, in 1/4096.
    bits: 1 … 8 that posterize keeps.
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
  """Changes brightness, then contrast, then saturation by factors drawn evenly from 1 − strength … 1 + strength.

  (torchvision's ColorJitter draws the order too, and can change the hue.)
  """
  strengths = jnp.array([brightness, contrast, saturation])
  factors = to_factor(1 + strengths * jax.random.uniform(key, (3,), minval=-1.0))
  image = blend(0, image, factors[0])
  image = blend(mean_gray(image), image, factors[1])
  return blend(gray(image), image, factors[2]).astype(jnp.uint8)


def blend(base: jax.Array | int, image: jax.Array, factor: jax.Array) -> jax.Array:
  """The base at factor 0, the image at 1 (`ONE`), and so on beyond: Pillow's Image.blend; int32."""
  image = image.astype(jnp.int32)
  return jnp.clip((base * ONE + factor * (image - base)) >> 12, 0, LEVELS - 1)


def gray(image: jax.Array) -> jax.Array:
  """Luma, int32 [H, W, 1]: Pillow's conversion to L."""
  image = image.astype(jnp.int32)
  if image.shape[-1] == 1:
    return image
  red, green, blue = (image[..., i : i + 1] for i in range(3))
  return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def mean_gray(image: jax.Array) -> jax.Array:
  """The mean of luma, rounded; int32, right for up to 4 million pixels."""
  luma = gray(image)
  return (2 * jnp.sum(luma) + luma.size) // (2 * luma.size)


def smooth(image: jax.Array) -> jax.Array:
  """Pillow's filter SMOOTH, a mean over 3×3 in which the middle counts five times; the border stays. int32."""
  image = image.astype(jnp.int32)
  rows = image[:-2] + image[1:-1] + image[2:]
  total = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] + 4 * image[1:-1, 1:-1]
  return image.at[1:-1, 1:-1].set((2 * total + 13) // 26)


def _entries(image: jax.Array) -> jax.Array:
  """Where in a table [256, C], laid out in a row, each number of an image stands; int32 [H · W · C]."""
  channels = image.shape[-1]
  return (image.astype(jnp.int32) * channels + jnp.arange(channels)).reshape(-1)


def _look_up(table: jax.Array, image: jax.Array) -> jax.Array:
  """The entries, of a table [256, C], of all numbers of an image."""
  return keep(table).reshape(-1).at[_entries(image)].get(mode='promise_in_bounds').reshape(image.shape)


def equalize_table(image: jax.Array) -> jax.Array:
  """What each level of each channel becomes when its histogram is made flat; int32 [256, C]."""
  channels = image.shape[-1]
  counts = jnp.zeros(LEVELS * channels, jnp.int32).at[_entries(image)].add(1, mode='promise_in_bounds')
  counts = counts.reshape(LEVELS, channels)
  greatest = image.max(axis=(0, 1)).astype(jnp.int32)
  step = (image.shape[0] * image.shape[1] - counts[greatest, jnp.arange(channels)]) // (LEVELS - 1)
  before = jnp.cumsum(counts, axis=0) - counts
  table = jnp.minimum(_divide(step // 2 + before, jnp.maximum(step, 1)), LEVELS - 1)
  return jnp.where(step > 0, table, jnp.arange(LEVELS)[:, None])


def autocontrast_table(image: jax.Array) -> jax.Array:
  """What each level of each channel becomes when its least and greatest become 0 and 255; int32 [256, C].

  Of levels that the channel doesn't have it says nothing.
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
  """For which levels Pillow's autocontrast, computed in float64, is one below what it is exactly.

  Returns:
    Sets of levels, uint8 [n, 32], 8 levels in a byte; and which of them belongs to a least and a greatest level,
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
  """⌊a / b⌋ of whole numbers, a from 0 to 2 million, b from 1; int32.

  CPUs divide floats many times faster than whole numbers. The half keeps the quotient farther from a whole number
  than any device rounds it.
  """
  return jnp.floor((a + 0.5) / b).astype(jnp.int32)
