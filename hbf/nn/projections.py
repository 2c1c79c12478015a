"""Several dense layers of one input, as one matrix product. Also helper functions of attention stages."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hbf.nn.cache import cache_mask
from hbf.nn.context import Context, with_three_axes
from hbf.ops.layout import interleave_shards, split_parts
from hbf.options import OptionError


class Projections(nn.Module):
  """Several dense layers of one input. The parameters are stored like one `flax.linen.Dense` for all outputs.

  If a mesh splits units over devices, each device has a part of the outputs of every layer.

  Attributes:
    parts: number of layers.
    width: W, number of outputs of each layer.
    use_bias: True if the layers have a bias.
    normalize: True to scale points, and the weights of each output, to norm 1. All products are then multiplied by
      one learned number, which starts at 2√D.
    dtype: type of the matrix product. Parameters are float32.
    kernel_init: initializer of the kernel [D, parts · W].
  """

  parts: int
  width: int
  use_bias: bool = True
  normalize: bool = False
  dtype: Any = jnp.float32
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(
    self, points: Float[Array, 'T D'], divisors: Float[Array, ' O'] | None = None
  ) -> list[Float[Array, 'T W']]:
    """Return the outputs [T, W] of each layer for points [T, D].

    Each of the O = parts · W outputs is divided by its number in `divisors`.
    """
    outputs = self.parts * self.width
    kernel = self.param('kernel', self.kernel_init, (points.shape[-1], outputs), jnp.float32)
    if self.normalize:
      # With this initial scale, σ² = 1/scale is 0.5/√D, like the initial σ² of a HyperBF on points of norm 1.
      scale = self.param('scale', nn.initializers.constant(2 * points.shape[-1] ** 0.5), (), jnp.float32)
      points, kernel = of_norm_1(points.astype(self.dtype)), scale * of_norm_1(kernel.mT).mT
    bias = self.param('bias', nn.initializers.zeros_init(), (outputs,), jnp.float32) if self.use_bias else None
    if divisors is not None:  # there are fewer parameters than outputs, also in the gradient of the divisors
      kernel, bias = kernel / divisors, None if bias is None else bias / divisors
    # XLA's CPU backend multiplies arrays with two axes faster than arrays with more axes.
    z = points.astype(self.dtype) @ interleave_shards(kernel.astype(self.dtype), self.parts)
    if bias is not None:
      z += interleave_shards(bias.astype(self.dtype), self.parts)
    return split_parts(z, self.parts)


def of_norm_1(z: Float[Array, '... D']) -> Float[Array, '... D']:
  """Scale rows to norm 1, computed in float32."""
  rows = z.astype(jnp.float32)
  if z.shape[0] == 1:  # on XLA's CPU backend, gradients of row sums are slow below an axis of length 1
    rows = rows[0]
  return (rows * jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) + 1e-12)).reshape(z.shape).astype(z.dtype)


def mimetic_init(heads: int, strength: float) -> nn.initializers.Initializer:
  """Return an initializer of a kernel [D, parts · D]. The kernel's first two parts give queries and keys.

  If the strength is above 0, the parts of queries and keys start as in `mimetic` with α = β = strength, and the other
  parts with LeCun's initialization (variance 1/D). If it is 0, all parts start with LeCun's.

  Args:
    heads: number of heads, a divisor of the D columns of each part.
    strength: α = β, the factor of the random matrix Z and of the identity I. Trockman & Kolter 2023 take 0.7.
  """
  plain = nn.initializers.lecun_normal()
  if not strength:
    return plain

  def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    pair = mimetic(jax.random.fold_in(key, 1), shape[0], heads, strength, strength)
    return jnp.concatenate([*pair, plain(key, shape, dtype)[:, 2 * shape[0] :]], axis=1).astype(dtype)

  return init


def mimetic(
  key: jax.Array, width: int, heads: int, alpha: float, beta: float
) -> tuple[Float[Array, 'D D'], Float[Array, 'D D']]:
  """Draw weights of queries and keys so that Wq Wkᵀ ≈ αZ + βI in every head (Trockman & Kolter 2023, section 4).

  Every head has its own Z, with Gaussian random numbers of variance 1/D. The product Wq Wkᵀ of a head has rank
  d = D/heads. It is the best approximation of αZ + βI of this rank, from the singular value decomposition. Wq and Wk
  each contain the square roots of the singular values.

  Returns:
    The matrices Wq and Wk [D, D]. Each head has D/heads columns of both.
  """
  d = width // heads
  z = jax.random.normal(key, (heads, width, width)) / width**0.5
  u, s, v = jnp.linalg.svd(alpha * z + beta * jnp.eye(width))
  root = jnp.sqrt(s[:, None, :d])
  parts = (u[:, :, :d] * root, v.swapaxes(1, 2)[:, :, :d] * root)  # [heads, D, d]
  q, k = (part.swapaxes(0, 1).reshape(width, heads * d) for part in parts)
  return q, k


def project_qkv(
  tokens: Float[Array, 'B N D'],
  heads: int,
  dtype: Any,
  bias: bool = False,
  mimetic: float = 0.0,
  sigma: Float[Array, '#H 1 1'] | None = None,
  parts: str = 'qkv',
) -> tuple[Float[Array, 'B N H d'], ...]:
  """Return queries, keys and values [B, N, heads, D/heads] of tokens [B, N, D], by one matrix product.

  This function makes the layer `qkv` or `qk`, so call it from a compact method.

  Args:
    tokens: [B, N, D].
    heads: number of heads, a divisor of D.
    dtype: type of the matrix product.
    bias: True if queries, keys and values have a bias.
    mimetic: the strength in `mimetic_init`. 0: the usual initialization.
    sigma: σ of every head, by which its queries and keys are divided. None: they are not divided.
    parts: 'qkv', or 'qk' for queries and keys without values. It is also the name of the layer.

  Raises:
    OptionError: D is not divisible by the number of heads.
  """
  batch, length, width = tokens.shape
  check_heads(width, heads)
  init = mimetic_init(heads, mimetic)
  divisors = None
  if sigma is not None:
    of_head = jnp.broadcast_to(sigma.reshape(-1, 1), (heads, width // heads)).ravel()
    divisors = jnp.concatenate([of_head, of_head, jnp.ones((len(parts) - 2) * width)])
  project = Projections(len(parts), width, use_bias=bias, dtype=dtype, kernel_init=init, name=parts)
  outputs = project(tokens.reshape(-1, width), divisors)
  return tuple(split_heads(z.reshape(batch, length, width), heads) for z in outputs)


def split_heads(z: Float[Array, '... D'], heads: int) -> Float[Array, '... H d']:
  """Split the last axis of an array into one axis for the heads and one for their dimensions."""
  # Rows are split apart before or after this: JAX refuses both at once if an explicit mesh axis splits the rows.
  return z.reshape(*z.shape[:-1], heads, z.shape[-1] // heads)


def join_heads(z: Float[Array, '... H d']) -> Float[Array, '... D']:
  """Join the axes of the heads and of their dimensions, as the inverse of `split_heads`."""
  return z.reshape(*z.shape[:-2], z.shape[-2] * z.shape[-1])


def project_out(values: Float[Array, 'B N H d'], dtype: Any) -> Float[Array, 'B N D']:
  """Join the heads of values [B, N, H, d] and apply the dense layer `out`. Return [B, N, H d]."""
  joined = join_heads(values)
  out = nn.Dense(joined.shape[-1], dtype=dtype, name='out')
  return out(joined.reshape(-1, joined.shape[-1])).reshape(joined.shape)


def mask_and_causality(context: Context, count: int) -> tuple[Bool[Array, '...'] | None, bool]:
  """Return the attention mask of `count` tokens, and True if a causal mask must be added to it.

  The mask is broadcastable to [B, H, count, number of keys]. It is None if there is no mask.
  """
  if context.continued is not None:  # the cache's mask hides all tokens that `mask` may hide
    return cache_mask(context.continued, count), False
  return None if context.mask is None else with_three_axes(context.mask)[:, None], context.causal


def check_heads(width: int, heads: int) -> None:
  """Raise OptionError unless `heads` is 1 or more, and `width` is divisible by it."""
  if heads < 1 or width % heads:
    raise OptionError(
      f'a width of {width} is not divisible by {heads} heads: change one of them', width=width, heads=heads
    )
