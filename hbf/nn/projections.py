"""Several dense layers of one input, computed as one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.cache import cache_mask
from hbf.nn.context import Context, of_pairs
from hbf.ops.layout import interleave_shards, split_parts
from hbf.options import OptionError


class Projections(nn.Module):
  """`parts` dense layers side by side, with the parameters of one `flax.linen.Dense` of all their outputs.

  Under a mesh that splits units over devices, each device has its share of every part.

  Attributes:
    parts: number of layers.
    width: W, outputs of each.
    use_bias: whether they have a bias.
    normalize: points, and the weights of each output, have norm 1; one learned scale of all products starts at 2√D.
    dtype: of the product; parameters are float32.
    kernel_init: of the kernel [D, parts · W].
  """

  parts: int
  width: int
  use_bias: bool = True
  normalize: bool = False
  dtype: Any = jnp.float32
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, points: jax.Array) -> list[jax.Array]:
    """Maps points [T, D] to [T, W] by each of the layers."""
    outputs = self.parts * self.width
    kernel = self.param('kernel', self.kernel_init, (points.shape[-1], outputs))
    if self.normalize:
      # So σ² = 1/scale starts where that of a HyperBF on points of norm 1 does, at 0.5/√D.
      scale = self.param('scale', nn.initializers.constant(2 * points.shape[-1] ** 0.5), ())
      points, kernel = of_norm_1(points.astype(self.dtype)), scale * of_norm_1(kernel.mT).mT
    # XLA's CPU backend multiplies matrices faster than the same numbers with more axes.
    z = points.astype(self.dtype) @ interleave_shards(kernel.astype(self.dtype), self.parts)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros_init(), (outputs,))
      z += interleave_shards(bias.astype(self.dtype), self.parts)
    return split_parts(z, self.parts)


def of_norm_1(z: jax.Array) -> jax.Array:
  """Scale rows to norm 1, computed in float32."""
  rows = z.astype(jnp.float32)
  if z.shape[0] == 1:  # XLA's CPU backend takes 15 times as long for gradients of row sums below an axis of one
    rows = rows[0]
  return (rows * jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) + 1e-12)).reshape(z.shape).astype(z.dtype)


def mimetic_init(heads: int, strength: float) -> nn.initializers.Initializer:
  """Return an initializer of a kernel [D, parts · D] that begins with queries and keys.

  With a strength they start as in `mimetic`, with α = β = strength, and the other parts as without; with 0 all parts
  start by LeCun's rule.

  Args:
    heads: number of heads, which divide the D columns of each part.
    strength: of the noise and the identity; Trockman & Kolter 2023 take 0.7.
  """
  plain = nn.initializers.lecun_normal()
  if not strength:
    return plain

  def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    pair = mimetic(jax.random.fold_in(key, 1), shape[0], heads, strength, strength)
    return jnp.concatenate([*pair, plain(key, shape, dtype)[:, 2 * shape[0] :]], axis=1)

  return init


def mimetic(key: jax.Array, width: int, heads: int, alpha: float, beta: float) -> tuple[jax.Array, jax.Array]:
  """Draw queries and keys whose products Wq Wkᵀ are about αZ + βI (Trockman & Kolter 2023, section 4).

  Z is normal with variance 1/D, and every head has its own. A head's product has rank d = D/heads: it is the best
  approximation of that rank, from the singular value decomposition, whose values queries and keys share evenly.

  Returns:
    Wq and Wk, [D, D] each, with the columns of one head after those of another.
  """
  d = width // heads
  z = jax.random.normal(key, (heads, width, width)) / width**0.5
  u, s, v = jnp.linalg.svd(alpha * z + beta * jnp.eye(width))
  root = jnp.sqrt(s[:, None, :d])
  parts = (u[:, :, :d] * root, v.swapaxes(1, 2)[:, :, :d] * root)  # [heads, D, d]
  q, k = (part.swapaxes(0, 1).reshape(width, heads * d) for part in parts)
  return q, k


def project_qkv(
  tokens: jax.Array, heads: int, dtype: Any, bias: bool = False, mimetic: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return queries, keys and values [B, N, heads, D/heads] of tokens [B, N, D], by one product.

  Call it from a compact method: it makes the layer `qkv` there.

  Raises:
    OptionError: D isn't divisible by the number of heads.
  """
  batch, length, width = tokens.shape
  check_heads(width, heads)
  init = mimetic_init(heads, mimetic)
  qkv = Projections(3, width, use_bias=bias, dtype=dtype, kernel_init=init, name='qkv')(tokens.reshape(-1, width))
  q, k, v = (z.reshape(batch, length, heads, width // heads) for z in qkv)
  return q, k, v


def project_out(values: jax.Array, dtype: Any) -> jax.Array:
  """Joins the heads of values [B, N, H, d] and projects them: [B, N, H d]. Makes the layer `out`."""
  batch, length, heads, d = values.shape
  joined = values.reshape(batch * length, heads * d)
  return nn.Dense(heads * d, dtype=dtype, name='out')(joined).reshape(batch, length, heads * d)


def visible(context: Context, count: int) -> dict[str, Any]:
  """Return what `count` tokens see, as arguments of `hbf.ops.fast.attention.attention`: a mask and causality."""
  if context.continued is not None:  # what a mask may hide then comes later than all that count
    return {'mask': cache_mask(context.continued, count), 'causal': False}
  return {'mask': None if context.mask is None else of_pairs(context.mask)[:, None], 'causal': context.causal}


def check_heads(width: int, heads: int) -> None:
  """Raise OptionError unless `width` divides into `heads`."""
  if width % heads:
    raise OptionError(
      f'a width of {width} is not divisible by {heads} heads: change one of them', width=width, heads=heads
    )
