"""A checksum of arrays that does not depend on their sharding over devices and processes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksum(tree: Any) -> int:
  """Return a 32-bit checksum of a tree of arrays, from all bits and their positions.

  A change of one element always changes the checksum. Any other change is missed with a probability of 1 in 2³².
  """
  # One leaf after another: if many programs run at once and their devices wait for each other, a CPU can deadlock.
  return sum(int(_sum(leaf, np.uint32(number))) for number, leaf in enumerate(jax.tree.leaves(tree))) % 2**32


@jax.jit  # for one leaf: leaves share shapes, and a program for all of them takes long to compile
def _sum(leaf: jax.Array, number: jax.Array) -> jax.Array:
  """Hash each element with its position and with `number`, the index of the leaf. Sum the hashes modulo 2³²."""
  bits = _bits(leaf)
  position = jnp.full(bits.shape, number)
  for axis, size in enumerate(bits.shape):
    position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(_mix(bits + _mix(position + _mix(number))), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
  """Return the bits of an array as uint32. An element of eight bytes becomes two numbers."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
  return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _mix(z: jax.Array) -> jax.Array:
  """Apply the last step of 32-bit MurmurHash3, which is a bijection, to each element of z (uint32)."""
  z = (z ^ (z >> 16)) * jnp.uint32(0x85EBCA6B)
  z = (z ^ (z >> 13)) * jnp.uint32(0xC2B2AE35)
  return z ^ (z >> 16)
