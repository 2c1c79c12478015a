"""Arrays that XLA stores row by row on a CPU, where matrix products with them are then faster."""

import jax
from jaxtyping import Array, Float


def row_major(z: Float[Array, '... N M']) -> Float[Array, '... N M']:
  """Return z, stored row by row on a CPU.

  XLA may otherwise store its columns, or compute with its transpose and not store z. On other platforms, and on a
  mesh of several devices, z is returned as it is.
  """

  def stored(z: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(z.reshape(*z.shape[:-2], z.shape[-2] * z.shape[-1])).reshape(z.shape)

  if jax.sharding.get_abstract_mesh().size > 1:  # the reshaped array could not be split over the devices like z
    return z
  return jax.lax.platform_dependent(z, cpu=stored, default=lambda z: z)


def transposed(z: Float[Array, '... N M']) -> Float[Array, '... M N']:
  """Swap the last two axes, on a CPU in memory too.

  For y = x zᵀ, the gradient of `transposed(z)` is xᵀ ∂y, and that of z would be ∂yᵀ x. On a CPU, XLA computes the
  first in two thirds of the time or less, if ∂y has more columns than x.
  """
  return row_major(z.mT)
