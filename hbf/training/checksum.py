"""Checksums of arrays: of a state, however it is sharded over devices and processes, and of weights on the host."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hbf.training.on_host import on_host


def checksum(tree: Any) -> int:
  """Return a 32-bit checksum of a tree of arrays, from all bits and their positions.

  A change of one element always changes the checksum. Any other change is missed with a probability of 1 in 2³².
  """
  # One leaf after another: if many programs run at once and their devices wait for each other, a CPU can deadlock.
  return sum(_hash(leaf, np.full(1, number, np.uint32)) for number, leaf in enumerate(jax.tree.leaves(tree))) % 2**32


def sha256(tree: Any) -> str:
  """Return the SHA-256 of a tree of arrays on the host. The names in the tree do not count."""
  digests = (hashlib.sha256(np.asarray(leaf).tobytes()).digest() for leaf in jax.tree.leaves(tree))
  return hashlib.sha256(b''.join(digests)).hexdigest()


def _hash(leaf: Any, number: np.ndarray) -> int:
  here = on_host(leaf)
  return int(_hash_on_devices(leaf, number)) if here is None else int(_sum(_bits_on_host(here), number, np))


@jax.jit  # for one leaf: leaves share shapes, and a program for all of them takes long to compile
def _hash_on_devices(leaf: jax.Array, number: jax.Array) -> jax.Array:
  return _sum(_bits(leaf), number, jnp)


def _sum(bits: Any, number: Any, xp: Any) -> Any:
  """Hash each element with its position and with `number`, the index of the leaf. Sum the hashes modulo 2³².

  Args:
    bits: uint32, an array of the module `xp`.
    number: uint32 [1].
    xp: numpy or jax.numpy.
  """
  position = xp.broadcast_to(number.reshape((1,) * bits.ndim), bits.shape)
  for axis, size in enumerate(bits.shape):
    index = xp.arange(size, dtype=xp.uint32).reshape(-1, *(1,) * (bits.ndim - axis - 1))
    position = position * xp.uint32(size) + index
  return xp.sum(_mix(bits + _mix(position + _mix(number))), dtype=xp.uint32)


def _bits(array: jax.Array) -> jax.Array:
  """Return the bits of an array as uint32. An element of eight bytes becomes two numbers."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.uint32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
  return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _bits_on_host(array: np.ndarray) -> np.ndarray:
  unsigned = np.dtype(f'u{min(array.dtype.itemsize, 4)}')
  pair = (2,) if array.dtype.itemsize == 8 else ()
  return np.ascontiguousarray(array).reshape(-1).view(unsigned).reshape((*array.shape, *pair)).astype(np.uint32)


def _mix(z: Any) -> Any:
  """Apply the last step of 32-bit MurmurHash3, which is a bijection, to each element of z (uint32)."""
  z = (z ^ (z >> np.uint32(16))) * np.uint32(0x85EBCA6B)
  z = (z ^ (z >> np.uint32(13))) * np.uint32(0xC2B2AE35)
  return z ^ (z >> np.uint32(16))
