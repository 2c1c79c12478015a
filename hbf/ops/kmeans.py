"""k-means by Lloyd's iteration. It gives initial centers (Moody & Darken 1989)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.distances import squared_distances


def sample(key: jax.Array, points: Float[Array, 'N D'], count: int) -> Float[Array, 'count D']:
  """Draw `count` of the points [N, D] at random, and return them as [count, D].

  A point can be drawn twice only if `count` is larger than N. If there are no points, the result is 0.
  """
  if not len(points):  # Flax asks for the shape of parameters that exist, also in a call without examples
    return jnp.zeros((count, *points.shape[1:]), points.dtype)
  return jax.random.choice(key, points, (count,), replace=count > len(points))


def kmeans(key: jax.Array, points: Float[Array, 'N D'], count: int, iterations: int = 10) -> Float[Array, 'count D']:
  """Compute means [count, D] of the points [N, D], starting from `count` random points.

  A mean that is nearest to no point keeps its value. The function works under `jax.jit`.
  """

  def update(_: int, means: jax.Array) -> jax.Array:
    nearest = jnp.argmin(squared_distances(points, means), axis=-1)
    members = jax.nn.one_hot(nearest, count, dtype=points.dtype)
    sizes = members.sum(axis=0)[:, None]
    return jnp.where(sizes > 0, members.T @ points / jnp.maximum(sizes, 1), means)

  return jax.lax.fori_loop(0, iterations, update, sample(key, points, count))
