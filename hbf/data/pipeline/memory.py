"""What is written into memory before it is read."""

import jax
import jax.numpy as jnp


def keep(z: jax.Array) -> jax.Array:
  """Returns `z`, which on a CPU XLA then computes once.

  It would fuse the computation into all that reads the result, and repeat it for every number that is read there;
  optimization barriers it takes out before. What is scattered it keeps.
  """
  return jax.lax.platform_dependent(z, cpu=_scatter, default=lambda z: z)


def _scatter(z: jax.Array) -> jax.Array:
  return jnp.zeros_like(z).at[jnp.arange(len(z))].set(z, mode='promise_in_bounds', unique_indices=True)
