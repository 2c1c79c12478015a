"""The cache of a causal stage. With it, a text is continued at the cost of its new tokens alone.

A stage keeps in the cache the arrays that it needs of earlier tokens. The cache lies in the collection 'cache'. At
each call the caller passes the collection in and gets the changed one back: `out, state = module.apply({'params':
params, 'cache': cache}, ..., mutable=['cache'])`. If the caller passes none in, the cache starts empty.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from hbf.nn.context import Context, Continued


def update_cache(module: nn.Module, name: str, z: jax.Array, context: Context, axis: int) -> jax.Array:
  """Append new tokens to the cache and return the whole cache.

  Args:
    module: the module in whose scope the cache lies.
    name: name of the variable.
    z: an array with the new tokens along an axis.
    context: the context of the call. If the context continues nothing, z is returned.
    axis: axis of the tokens.
  """
  if context.continued is None:
    return z
  shape = list(z.shape)
  shape[axis] = context.continued.room
  cache = module.variable('cache', name, jnp.zeros, shape, z.dtype)
  cache.value = jax.lax.dynamic_update_slice_in_dim(cache.value, z, context.continued.start, axis)
  return cache.value


def new_tokens(z: jax.Array, context: Context, count: int, axis: int) -> jax.Array:
  """Return the part of an array that belongs to the new tokens.

  Args:
    z: an array with an entry for each token that the text can have. If the context continues nothing, z is returned.
    context: the context of the call.
    count: number of new tokens.
    axis: axis of the tokens.
  """
  if context.continued is None:
    return z
  return jax.lax.dynamic_slice_in_dim(z, context.continued.start, count, axis)


def cache_mask(continued: Continued, count: int) -> Bool[Array, 'count room']:
  """Return the attention mask of `count` new tokens, booleans [count, room].

  Each new token attends to itself and to all tokens before it. The text can have at most `room` tokens.
  """
  return jnp.arange(continued.room) <= continued.start + jnp.arange(count)[:, None]
