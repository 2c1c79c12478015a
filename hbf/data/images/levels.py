"""Mean and standard deviation of the channels of images, from exact sums of their pixels' levels, 0 to 255."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

BLOCK = 2**16  # number of images in a block. Their squared levels at one pixel sum to less than 2³².


def column_sums(image: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Sum levels and squared levels over blocks of images, for each pixel and channel. Every device sums its shard.

  A block has at most `BLOCK` images of a shard, so that its sums do not overflow.

  Args:
    image: M images, uint8 [M, K]. Each image is flat: a row of K levels, one for each pixel and channel.
    sharding: sharding of the images over their first axis.

  Returns:
    The sums of the levels and of the squared levels over each of G blocks, uint32 [2, G, K], sharded over G.
  """
  block_spec = PartitionSpec(None, *sharding.spec)
  return jax.shard_map(_block_sums, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=block_spec)(image)


def _block_sums(image: jax.Array) -> jax.Array:
  starts = range(0, len(image), BLOCK)
  return jnp.stack([_sums(image[start : start + BLOCK].astype(jnp.uint32)) for start in starts], axis=1)


def _sums(z: jax.Array) -> jax.Array:
  # This is one reduction. With two, XLA on CPU would store `z`, four times as large as the images, and its squares.
  def add(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    return [one + other for one, other in zip(sums, more, strict=True)]

  zero = np.uint32(0)
  return jnp.stack(jax.lax.reduce([z, z * z], [zero, zero], add, dimensions=(0,)))


def statistics(pixels: int, sums: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Return the mean and the standard deviation of each channel, on a scale from 0 (black) to 1 (white).

  The deviation is at least one gray level, 1/255, so that division by it is safe.

  Args:
    pixels: number of pixels in the sums.
    sums: each channel's sum of levels and sum of squared levels, int [2, C].
  """
  mean, std = zip(*(_moments(pixels, *channel) for channel in sums.T.tolist()), strict=True)
  return mean, std


def _moments(pixels: int, first: int, second: int) -> tuple[float, float]:
  # The sums are Python's integers, which cannot overflow.
  variance = (pixels * second - first**2) / pixels**2
  return first / pixels / 255, max(math.sqrt(variance), 1) / 255
