"""Functions that set the order in which XLA stores a matrix on a CPU, so that products with it are faster."""

import jax
from jaxtyping import Array, Float


def row_major(z: Float[Array, '... N M']) -> Float[Array, '... N M']:
  """Return z, stored row by row on a CPU.

  Otherwise XLA may store z column by column, or compute with the transpose of z and never store z. On other
  platforms, and on a mesh of several devices, z is returned as it is.
  """

  def stored(z: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(z.reshape(*z.shape[:-2], z.shape[-2] * z.shape[-1])).reshape(z.shape)

  if jax.sharding.get_abstract_mesh().size > 1:  # the reshaped array could not be split over the devices like z
    return z
  return jax.lax.platform_dependent(z, cpu=stored, default=lambda z: z)


def by_columns(z: Float[Array, '... N M']) -> Float[Array, '... N M']:
  """Return z, stored column by column on a CPU.

  In the gradient of a product with z, XLA then swaps the factors. For y = x z, the gradient of z is computed as
  ∂yᵀ x instead of xᵀ ∂y. On a CPU this takes two thirds of the time or less, if ∂y has fewer columns than x.
  """
  return row_major(z.mT).mT
