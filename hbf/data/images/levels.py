"""Mean and standard deviation of the channels of images, from exact sums over their levels, 0 to 255."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

BLOCK = 2**16  # Images of which squared levels add up to less than 2³².


def column_sums(image: jax.Array, sharding: NamedSharding) -> jax.Array:
  """Sum levels and squared levels over images. Every device sums the images that it holds.

  Args:
    image: uint8 [M, K].
    sharding: sharding of M.

  Returns:
    uint32 [2, G, K] for G blocks of images, which cannot overflow, sharded over G.
  """
  of_blocks = PartitionSpec(None, *sharding.spec)
  return jax.shard_map(_block_sums, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=of_blocks)(image)


def _block_sums(image: jax.Array) -> jax.Array:
  starts = range(0, len(image), BLOCK)
  return jnp.stack([_sums(image[start : start + BLOCK].astype(jnp.uint32)) for start in starts], axis=1)


def _sums(z: jax.Array) -> jax.Array:
  """Compute both sums, [2, K], in one reduction.

  With two reductions XLA's CPU backend would keep `z`, four times the images, and its squares.
  """

  def add(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    return [one + other for one, other in zip(sums, more, strict=True)]

  zero = np.uint32(0)
  return jnp.stack(jax.lax.reduce([z, z * z], [zero, zero], add, dimensions=(0,)))


def statistics(pixels: int, sums: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Return the mean and the standard deviation of each channel, in units of 1 = white.

  A channel that hardly varies gets the deviation of one gray level, 1/255, so that it can be a divisor.

  Args:
    pixels: number of pixels.
    sums: sums of each channel's levels and squared levels, int [2, C].
  """
  mean, std = zip(*(_moments(pixels, *channel) for channel in sums.T.tolist()), strict=True)
  return mean, std


def _moments(pixels: int, first: int, second: int) -> tuple[float, float]:
  """Return mean and standard deviation of a channel from its sums over pixels; Python's integers can't overflow."""
  variance = (pixels * second - first**2) / pixels**2
  return first / pixels / 255, max(math.sqrt(variance), 1) / 255
