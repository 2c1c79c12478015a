"""What a causal stage remembers of earlier tokens, so that a text goes on at the cost of its new tokens.

It lies in the collection 'cache', which whoever continues a text gives, and has changed, at each call:
`out, state = module.apply({'params': params, 'cache': cache}, ..., mutable=['cache'])`. Without one it starts empty.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.context import Context, Continued


def update_cache(module: nn.Module, name: str, z: jax.Array, context: Context, axis: int) -> jax.Array:
  """What z is of all tokens so far, with room for those to come, from what it is of the new ones.

  Args:
    module: in whose scope it is remembered.
    name: of the variable.
    z: an array with the new tokens along an axis.
    context: of the call; if it continues nothing, z is all there is.
    axis: of the tokens.
  """
  if context.continued is None:
    return z
  shape = list(z.shape)
  shape[axis] = context.continued.room
  cache = module.variable('cache', name, jnp.zeros, shape, z.dtype)
  cache.value = jax.lax.dynamic_update_slice_in_dim(cache.value, z, context.continued.start, axis)
  return cache.value


def new_tokens(z: jax.Array, context: Context, count: int, axis: int) -> jax.Array:
  """The part of an array that belongs to the new tokens, of one with all there can be along an axis.

  Args:
    z: the array; if the context continues nothing, it is that part.
    context: of the call.
    count: of the new tokens.
    axis: of the tokens.
  """
  if context.continued is None:
    return z
  return jax.lax.dynamic_slice_in_dim(z, context.continued.start, count, axis)


def cache_mask(continued: Continued, count: int) -> jax.Array:
  """Which of all tokens there can be the new ones see, each those up to itself: [count, room]."""
  return jnp.arange(continued.room) <= continued.start + jnp.arange(count)[:, None]
