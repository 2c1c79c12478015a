"""A checksum of arrays that doesn't depend on how they lie on devices and processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksum(tree: Any) -> int:
  """A number of 32 bits, of all bits of a tree of arrays and of their places.

  It differs if one element does, and otherwise unless by a chance of one in 2³².
  """
  # One after another: many programs in flight whose devices wait for each other can block a CPU's threads for ever.
  return sum(int(_sum(leaf, np.uint32(number))) for number, leaf in enumerate(jax.tree.leaves(tree))) % 2**32


@jax.jit  # by leaf, as leaves share their shapes: a program of all of them takes long to compile
def _sum(leaf: jax.Array, number: jax.Array) -> jax.Array:
  """Of every element mixed with its place; whole numbers that wrap have the same sum in any order."""
  bits = _bits(leaf)
  place = jnp.full(bits.shape, number)
  for axis, size in enumerate(bits.shape):
    place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(_mixed(bits + _mixed(place + _mixed(number))), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
  """As uint32 of the array's shape; elements of eight bytes become two."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
  return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _mixed(z: jax.Array) -> jax.Array:
  """MurmurHash3's last step, one to one."""
  z = (z ^ (z >> 16)) * jnp.uint32(0x85EBCA6B)
  z = (z ^ (z >> 13)) * jnp.uint32(0xC2B2AE35)
  return z ^ (z >> 16)
