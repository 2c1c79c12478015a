"""The normalised Gaussian as softmax attention (facts 2 and 3 of docs/design.md)."""

from typing import Literal

import jax
import jax.numpy as jnp

from hbf.ops.distances import metric_product, products, row_dots

# Responses of a head that may lie in memory; beyond about a thousand tokens blocks of them are better.
_MOST_PAIRS = 2**20
_TILE = 8  # cuDNN wants heads of a multiple of 8 dimensions
_PARTS = 3  # bfloat16 numbers that hold a float32


def is_attention(points: jax.Array, centres: jax.Array, coefficients: jax.Array, width: jax.Array) -> bool:
  """Whether `gaussian_attention` is the way to a normalised Gaussian: one width a head, not too many responses."""
  shared_width = width.ndim == 0 or width.shape[-1] == 1
  few = points.shape[-2] * centres.shape[-2] <= _MOST_PAIRS
  return shared_width and (few or cudnn_applies(points, coefficients))


def gaussian_attention(
  points: jax.Array,
  centres: jax.Array,
  coefficients: jax.Array,
  *,
  width: jax.Array,
  metric: str,
  weights: jax.Array | None,
) -> jax.Array:
  """Σ_a K_a c_a / Σ_a K_a for the Gaussian K of one width a head: the softmax of xᵀMt/σ² − tᵀMt/2σ².

  The norm of the points cancels, and the metric is needed on the centres' side only, so it costs what attention
  costs. Where cuDNN's fused attention applies, it does the work.

  Args:
    points: x [..., N, D].
    centres: t [..., A, D].
    coefficients: c [..., A, V].
    width: σ, broadcastable to [..., 1, 1].
    metric: with `weights`, as in `hbf.ops.distances.distances`.
    weights: the metric's parameters.

  Returns:
    [..., N, V] in the coefficients' type.
  """
  scale = 1 / jnp.square(width)
  mapped = metric_product(centres, metric, weights)
  norms = 0.5 * row_dots(centres, mapped)
  if cudnn_applies(points, coefficients):
    return augmented_attention(points, scale * mapped, -scale * norms, coefficients, 'cudnn')
  if points.dtype == jnp.float32:
    log_k = products(points, scale * mapped) - (scale * norms).mT
  else:
    log_k = scale * (products(points, mapped) - norms.mT)
  return jnp.einsum('...na,...av->...nv', jax.nn.softmax(log_k, axis=-1).astype(coefficients.dtype), coefficients)


def augmented_attention(
  points: jax.Array,
  keys: jax.Array,
  bias: jax.Array,
  coefficients: jax.Array,
  implementation: Literal['xla', 'cudnn'],
) -> jax.Array:
  """The softmax of x·k + b as plain attention: keys [k, b, 0, …], queries [x, 1, 0, …].

  A bias in bfloat16 would be too coarse (it is of order √D), so it takes three coordinates: its rounding, the
  rounding of the rest, and so on. Filling up to a multiple of 8 leaves room for them.

  Args:
    points: x [B, H, N, D].
    keys: k [B, H, A, D].
    bias: b, float32 [B, H, A, 1].
    coefficients: c [B, H, A, D].
    implementation: of `jax.nn.dot_product_attention`.
  """
  d, dtype = points.shape[-1], points.dtype
  parts, rest = [], bias
  for _ in range(_PARTS):
    parts.append(rest.astype(dtype))
    rest = rest - parts[-1].astype(jnp.float32)
  padding = jnp.zeros((*keys.shape[:-1], -(d + _PARTS) % _TILE), dtype)
  ones = jnp.ones((*points.shape[:-1], _PARTS), dtype)
  queries = jnp.concatenate([points, ones, jnp.zeros((*points.shape[:-1], padding.shape[-1]), dtype)], axis=-1)
  keys = jnp.concatenate([keys.astype(dtype), *parts, padding], axis=-1)
  values = jnp.pad(coefficients, [(0, 0)] * 3 + [(0, keys.shape[-1] - coefficients.shape[-1])])
  q, k, v = (z.swapaxes(1, 2) for z in (queries, keys, values))
  out = jax.nn.dot_product_attention(q, k, v, scale=1.0, implementation=implementation)
  return out.swapaxes(1, 2)[..., : coefficients.shape[-1]]


def cudnn_applies(points: jax.Array, coefficients: jax.Array) -> bool:
  """Whether cuDNN's fused attention takes [B, H, N, D] points and coefficients: an NVIDIA GPU, and half precision."""
  if jax.default_backend() != 'gpu' or points.dtype not in (jnp.bfloat16, jnp.float16) or points.ndim != 4:
    return False
  capability = getattr(jax.local_devices()[0], 'compute_capability', None)
  if not capability or float(capability) < 8:
    return False
  most = 256 if float(capability) >= 9 else 128
  return max(points.shape[-1] + _PARTS, coefficients.shape[-1]) <= most - most % _TILE
