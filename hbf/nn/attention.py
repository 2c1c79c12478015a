"""Softmax attention, the baseline stage 1, and the projections that every attention shares."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.errors import UserError


class SoftmaxAttention(nn.Module):
  """Multi-head softmax(q·k/√d) v (Vaswani et al. 2017, eq. 1).

  Attributes:
    heads: H; the tokens' width D must be divisible by it.
    dtype: of the products; parameters are float32.
  """

  heads: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    q, k, v = project_qkv(tokens, self.heads, self.dtype)
    return project_out(jax.nn.dot_product_attention(q, k, v), self.dtype)


def project_qkv(tokens: jax.Array, heads: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Queries, keys and values [B, N, heads, D/heads] from tokens [B, N, D], by one product without bias.

  Call it from a compact method: it makes the layer `qkv` there.

  Raises:
    UserError: D isn't divisible by the number of heads.
  """
  batch, length, width = tokens.shape
  check_heads(width, heads)
  # XLA's CPU backend runs a 2-D product faster than the same product of 3-D tokens.
  qkv = nn.Dense(3 * width, use_bias=False, dtype=dtype, name='qkv')(tokens.reshape(-1, width))
  q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, width // heads), 2, 0)
  return q, k, v


def project_out(values: jax.Array, dtype: Any) -> jax.Array:
  """Joins the heads of values [B, N, H, d] and projects them: [B, N, H d]. Makes the layer `out`."""
  batch, length, heads, d = values.shape
  joined = values.reshape(batch * length, heads * d)
  return nn.Dense(heads * d, dtype=dtype, name='out')(joined).reshape(batch, length, heads * d)


def check_heads(width: int, heads: int) -> None:
  """Raises UserError unless `width` divides into `heads`."""
  if heads < 1 or width % heads:
    raise UserError(f'a width of {width} is not divisible by {heads} heads: change model.width or the heads')
