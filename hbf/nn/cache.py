"""The cache of a causal stage. With the cache, a stage processes only the new tokens of a text.

The cache has the arrays of earlier tokens that a stage needs. They are in Flax's collection 'cache'. At each call the
caller passes the collection and gets the new one back:
`out, state = module.apply({'params': params, 'cache': cache}, ..., mutable=['cache'])`. If the caller passes no
collection, the cache starts empty.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from hbf.nn.context import Context, Continued


def update_cache(module: nn.Module, name: str, z: jax.Array, context: Context, axis: int) -> jax.Array:
  """Write an array of the new tokens into the cache. Return the whole array in the cache.

  Args:
    module: the module that has the cache.
    name: name of the array in the cache.
    z: array with an entry for each new token along `axis`. The array in the cache has `context.continued.room`
      entries along this axis.
    context: the context of the call. If `context.continued` is None, there is no cache, and z is returned.
    axis: the axis of z along which the tokens lie.
  """
  if context.continued is None:
    return z
  shape = (*z.shape[:axis], context.continued.room, *z.shape[axis + 1 :])

  def empty() -> jax.Array:  # split over devices like z
    return jnp.broadcast_to(jnp.zeros_like(jax.lax.slice_in_dim(z, 0, 1, axis=axis)), shape)

  cache = module.variable('cache', name, empty)
  cache.value = jax.lax.dynamic_update_slice_in_dim(cache.value, z, context.continued.start, axis)
  return cache.value


def new_tokens(z: jax.Array, context: Context, count: int, axis: int) -> jax.Array:
  """Return the part of an array that belongs to the new tokens.

  Args:
    z: array with an entry along `axis` for every token that the text can have (`context.continued.room`).
    context: the context of the call. If `context.continued` is None, all tokens are new, and z is returned.
    count: number of new tokens.
    axis: the axis of z along which the tokens lie.
  """
  if context.continued is None:
    return z
  return jax.lax.dynamic_slice_in_dim(z, context.continued.start, count, axis)


def cache_mask(continued: Continued, count: int) -> Bool[Array, 'count room']:
  """Return the attention mask of `count` new tokens, booleans [count, room].

  Each new token attends to itself and to all tokens before it. `room` is the largest number of tokens that the text
  can have.
  """
  return jnp.arange(continued.room) <= continued.start + jnp.arange(count)[:, None]
