"""Softmax attention: one rule for all of which kernel computes it; and the normalised Gaussian as such attention.

(Facts 2 and 3 of docs/design.md.)
"""

import functools
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from hbf.ops.distances import apart, metric_product, products, row_dots

# Responses of a head that may lie in memory; beyond about a thousand tokens blocks of them are better.
_MOST_PAIRS = 2**20
_TILE = 8  # cuDNN wants heads of a multiple of 8 dimensions
_EVEN = 2  # and, for the gradient, even numbers of queries and keys: so JAX checks it, whether there is a bias or not
_PARTS = 3  # bfloat16 numbers that hold a float32
_CAPABILITY = 8  # Ampere, the first NVIDIA GPUs on which cuDNN fuses attention


def attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  scale: float | None = None,
  mask: jax.Array | None = None,
  causal: bool = False,
) -> jax.Array:
  """softmax(scale q·k) v over the keys, by cuDNN's fused kernel where it applies, else by XLA.

  Args:
    queries: [B, N, H, d].
    keys: [B, A, H, d].
    values: [B, A, H, v], v up to d.
    scale: default 1/√d.
    mask: booleans broadcastable to [B, H, N, A], which queries see which keys; with one XLA does the work.
    causal: whether query i sees keys 0 to i only (of those that the mask lets it see).
  """
  if (v := values.shape[3]) < (d := queries.shape[3]):  # JAX takes heads of one size
    return attention(queries, keys, _fill(values, 3, d - v), scale, mask, causal)[..., :v]
  how: dict[str, Any] = {'scale': scale, 'is_causal': causal}
  default = functools.partial(jax.nn.dot_product_attention, mask=mask, **how)
  if mask is not None or _any_batch(queries) or not cudnn_applies(queries.dtype, queries.shape[-1]):
    return default(queries, keys, values)
  return jax.lax.platform_dependent(
    queries, keys, values, cuda=functools.partial(padded_attention, **how), default=default
  )


def padded_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  scale: float | None = None,
  is_causal: bool = False,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> jax.Array:
  """`attention` in the shapes that cuDNN takes: zeros fill up tokens and dimensions, and padded keys are masked."""
  (_, length, _, d), (batch, keys_length, _, v) = queries.shape, values.shape
  scale = d**-0.5 if scale is None else scale
  width = max(d, v)
  queries, keys, values = (_fill(z, 3, -(-width // _TILE) * _TILE - z.shape[3]) for z in (queries, keys, values))
  queries, keys, values = (_fill(z, 1, -z.shape[1] % _EVEN) for z in (queries, keys, values))
  masked = keys.shape[1] != keys_length
  out = jax.nn.dot_product_attention(
    queries,
    keys,
    values,
    scale=scale,
    is_causal=is_causal,
    key_value_seq_lengths=jnp.full(batch, keys_length, jnp.int32) if masked else None,
    implementation=implementation,
  )
  return out[:, :length, :, :v]


def cudnn_applies(dtype: jnp.dtype, d: int) -> bool:
  """Whether a program for an NVIDIA GPU is to compute attention of heads of d dimensions by cuDNN's fused kernel.

  The platform is chosen when the program is lowered, by whoever asks here. But what cuDNN takes has to be known when
  it is traced, for JAX's checks run then: they want cuDNN's library, and head sizes by the capability of this
  process's GPU. A program for GPUs that this process doesn't have is taken to be for recent ones, with heads of at
  most 128 dimensions.
  """
  if dtype not in (jnp.bfloat16, jnp.float16) or any(c < _CAPABILITY for c in _capabilities()):
    return False
  head = jax.ShapeDtypeStruct((1, _EVEN, 1, d), dtype)
  training = jax.grad(lambda *qkv: padded_attention(*qkv).astype(jnp.float32).sum(), (0, 1, 2))
  try:
    jax.eval_shape(training, head, head, head)
  except (NotImplementedError, RuntimeError):  # heads that are too large; no CUDA, or no cuDNN
    return False
  return True


def _any_batch(z: jax.Array) -> bool:
  """Whether the program is exported for batches of any size (`jax.export`).

  cuDNN's kernel is made for one size, and JAX refuses to export its custom call, which may change.
  """
  return bool(jax.export.is_symbolic_dim(z.shape[0]))


def _capabilities() -> list[float]:
  """Compute capabilities of this process's NVIDIA GPUs; AMD's have names, such as gfx90a."""
  names = [getattr(device, 'compute_capability', '') for device in jax.local_devices()]
  return [float(name) for name in names if name.replace('.', '', 1).isdigit()]


def _fill(z: jax.Array, axis: int, count: int) -> jax.Array:
  """z with so many zeros behind it along an axis."""
  return jnp.pad(z, [(0, count if i == axis else 0) for i in range(z.ndim)])


def is_attention(points: jax.Array, centres: jax.Array, coefficients: jax.Array, width: jax.Array) -> bool:
  """Whether `gaussian_attention` is the way to a normalised Gaussian: one width a head, not too many responses."""
  shared_width = width.ndim == 0 or width.shape[-1] == 1
  pairs = points.shape[-2] * centres.shape[-2]
  few = not jax.export.is_symbolic_dim(pairs) and pairs <= _MOST_PAIRS  # all points of a batch may be of one head
  return shared_width and (few or _cudnn_takes(points, centres, coefficients))


def gaussian_attention(
  points: jax.Array,
  centres: jax.Array,
  coefficients: jax.Array,
  *,
  scale: jax.Array,
  metric: str,
  weights: jax.Array | None,
  null: int = 0,
  mask: jax.Array | None = None,
  causal: bool = False,
) -> jax.Array:
  """Σ_a K_a c_a / Σ_a K_a for the Gaussian K of one width a head: the softmax of scale (xᵀMt − tᵀMt/2 + x'·t').

  The norm of the points cancels, and the metric is needed on the centres' side only, so it costs what attention
  costs. Where cuDNN's fused attention applies, it does the work.

  Args:
    points: x [..., N, D].
    centres: t [..., A, D].
    coefficients: c [..., A, V].
    scale: 1/σ², broadcastable to [..., 1, 1]; negative if K grows with the distance.
    metric: with `weights`, as in `hbf.ops.distances.distances`.
    weights: the metric's parameters.
    null: how many of the last coordinates are x' and t', see `hbf.ops.distances.distances`.
    mask: booleans broadcastable to [..., N, A], which points see which centres; with one XLA does the work.
    causal: whether point i sees centres 0 to i only (of those that the mask lets it see).

  Returns:
    [..., N, V] in the coefficients' type.
  """
  if centres.dtype != jnp.float32:
    # The gradient needs the centres: by themselves, or XLA would keep queries and values with them.
    centres = jax.lax.optimization_barrier(centres)
  centres, beside = apart(centres, null)
  mapped = metric_product(centres, metric, weights)
  norms = 0.5 * row_dots(centres, mapped)
  if null:
    mapped = jnp.concatenate([mapped, beside], axis=-1)
  arrays = (points, mapped, norms, coefficients, scale)
  fused = functools.partial(augmented_attention, is_causal=causal)
  default = functools.partial(_biased_attention, mask=mask, is_causal=causal)
  if mask is not None or not _cudnn_takes(points, mapped, coefficients):
    return default(*arrays)
  return jax.lax.platform_dependent(*arrays, cuda=fused, default=default)


def _cudnn_takes(points: jax.Array, centres: jax.Array, coefficients: jax.Array) -> bool:
  heads = points.ndim == 4 and points.shape[:2] == centres.shape[:2] == coefficients.shape[:2]
  width = max(points.shape[-1] + _PARTS, coefficients.shape[-1])
  return heads and not _any_batch(points) and cudnn_applies(points.dtype, width)


def _biased_attention(
  points: jax.Array,
  keys: jax.Array,
  norms: jax.Array,
  coefficients: jax.Array,
  scale: jax.Array,
  mask: jax.Array | None,
  is_causal: bool,
) -> jax.Array:
  """The softmax of scale (x·k − norm), all of it in memory."""
  log_k = products(points, (scale * keys).astype(points.dtype)) - (scale * norms).mT
  if mask is not None:
    log_k = jnp.where(mask, log_k, -jnp.inf)
  if is_causal:
    log_k = jnp.where(np.tri(log_k.shape[-2], log_k.shape[-1]) > 0, log_k, -jnp.inf)
  return jnp.einsum('...na,...av->...nv', jax.nn.softmax(log_k, axis=-1).astype(coefficients.dtype), coefficients)


def augmented_attention(
  points: jax.Array,
  keys: jax.Array,
  norms: jax.Array,
  coefficients: jax.Array,
  scale: jax.Array,
  is_causal: bool = False,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> jax.Array:
  """The softmax of scale (x·k − norm) as plain attention: keys [scale k, −scale norm], queries [x, 1].

  A bias in bfloat16 would be too coarse (it is of order √D), so it takes three coordinates: its rounding, the
  rounding of the rest, and so on. Filling up to a multiple of 8 leaves room for them.

  Args:
    points: x [B, H, N, D].
    keys: k [B, H, A, D].
    norms: float32 [B, H, A, 1].
    coefficients: c [B, H, A, V].
    scale: broadcastable to [B, H, 1, 1].
    is_causal: whether point i sees keys 0 to i only.
    implementation: of `jax.nn.dot_product_attention`.
  """
  dtype = points.dtype
  parts = short_parts(-scale * norms, dtype, _PARTS)
  queries = jnp.concatenate([points, jnp.ones((*points.shape[:-1], _PARTS), dtype)], axis=-1)
  keys = jnp.concatenate([(scale * keys).astype(dtype), *parts], axis=-1)
  q, k, v = (z.swapaxes(1, 2) for z in (queries, keys, coefficients))
  return padded_attention(q, k, v, 1.0, is_causal, implementation).swapaxes(1, 2)


def short_parts(z: jax.Array, dtype: jnp.dtype, count: int) -> list[jax.Array]:
  """Numbers of a type, largest first, whose sum is z, float32, but for the last one's rounding."""
  kind, parts = jnp.finfo(dtype), []
  for _ in range(count):
    # Not a conversion there and back, which XLA leaves out on a GPU, and the rest with it.
    rounded = jax.lax.reduce_precision(z, kind.nexp, kind.nmant)
    parts.append(rounded.astype(dtype))
    z = z - rounded
  return parts
