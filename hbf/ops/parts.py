"""Arrays in parts that are computed one after another."""

import jax
import jax.numpy as jnp


def split(z: jax.Array, count: int, axis: int = -2, fill: float = 0.0) -> jax.Array:
  """Split an array along an axis into `count` parts, stacked along a new first axis.

  The parts are padded to equal length with `fill`. Row i goes to part i mod count. So the rows of a sharded array
  stay on their devices, and each part has rows on every device.
  """
  axis %= z.ndim
  padding = [(0, 0)] * z.ndim
  padding[axis] = (0, -z.shape[axis] % count)
  padded = jnp.pad(z, padding, constant_values=fill)
  parts = padded.reshape(*z.shape[:axis], padded.shape[axis] // count, count, *z.shape[axis + 1 :])
  return jnp.moveaxis(parts, axis + 1, 0)


def join(parts: jax.Array, length: int, axis: int = -2) -> jax.Array:
  """Undo `split`. `length` is the length of the original array along the axis, without the padding."""
  axis %= parts.ndim - 1
  rows = jnp.moveaxis(parts, 0, axis + 1)
  padded = rows.shape[axis] * rows.shape[axis + 1]
  joined = rows.reshape(*rows.shape[:axis], padded, *rows.shape[axis + 2 :])
  return jax.lax.slice_in_dim(joined, 0, length, axis=axis)
