"""Softmax attention by cuDNN's fused kernel or by XLA. It also computes the HyperBF with a normalized Gaussian.

The normalized Gaussian is kernel 'gaussian' with normalization 'sum'. Facts 2 and 3 of docs/explanation/attention.md
show that it equals softmax attention.
"""

import functools
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hbf.ops.basis import RadialBasis
from hbf.ops.distances import metric_product, split_dot_only
from hbf.ops.layout import explicit_split, laid_out_by_xla
from hbf.ops.masks import joint_mask
from hbf.ops.products import before_ampere, einsum, is_short, keep_short, products, row_dots, tangent_products
from hbf.ops.row_major import by_columns

# Largest number of responses of a head that are in memory at once. Beyond about a thousand tokens, it is better to
# compute blocks of points one after another.
_MOST_PAIRS = 2**20
_TILE = 8  # cuDNN takes heads of a multiple of 8 dimensions
_EVEN = 2  # for the gradient, cuDNN takes even numbers of queries and keys
_PARTS = 3  # a float32 number is the sum of this many bfloat16 numbers


def attention(
  queries: Float[Array, '... N d'],
  keys: Float[Array, '... A d'],
  values: Float[Array, '... A V'],
  scale: Float[Array, '...'] | float | None = None,
  centers: Float[Array, '... A D'] | None = None,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
  full_precision: bool = False,
) -> Float[Array, '... N V']:
  """Compute softmax(scale (q·k − t·k/2)) v over the keys. Without centers t it is softmax(scale q·k) v.

  Softmax attention and the normalized Gaussian both call this function. On NVIDIA GPUs, cuDNN's fused kernel computes
  the result if it supports the arrays. Otherwise XLA computes it.

  Args:
    queries: q [..., N, d].
    keys: k [..., A, d].
    values: v [..., A, V].
    scale: a number, or an array broadcastable to [..., 1, 1]. The default is 1/√d.
    centers: t [..., A, D], the centers of a HyperBF. The key of a center is M t, followed by d − D dot-only
      dimensions. The product t·k leaves out these dimensions.
    mask: booleans broadcastable to [..., N, A], True where a query sees a key. With a mask, cuDNN is not used.
    causal: True if query i sees keys 0 to i only. A mask may hide some of these keys too.
    full_precision: True if q·k needs full precision in float32, because large terms of it cancel. With centers, it
      always has full precision.

  Returns:
    The outputs [..., N, V] in the type of the values.
  """
  queries, keys, values = (jnp.asarray(z) for z in (queries, keys, values))  # NumPy's types may not be JAX's
  scale = queries.shape[-1] ** -0.5 if scale is None else scale
  # JAX's call of cuDNN forgets how its arrays are split over explicit mesh axes.
  options = scale, centers, mask, causal, full_precision
  return laid_out_by_xla(_fastest, explicit_split(queries), queries, keys, values, *options)


def _fastest(queries: jax.Array, keys: jax.Array, values: jax.Array, *options: Any) -> jax.Array:
  """Compute `attention` by cuDNN or by XLA. `options` are the others of its arguments."""
  scale, centers, mask, causal, full_precision = options
  default = functools.partial(
    _xla_attention, scale=scale, centers=centers, mask=mask, causal=causal, full_precision=full_precision
  )
  if mask is not None or not _cudnn_takes(queries, keys, values, 0 if centers is None else _PARTS):
    return default(queries, keys, values)
  fused = functools.partial(fused_attention, scale=scale, centers=centers, causal=causal)
  return jax.lax.platform_dependent(queries, keys, values, cuda=fused, default=default)


def _xla_attention(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  *,
  scale: jax.Array | float,
  centers: jax.Array | None,
  mask: jax.Array | None,
  causal: bool,
  full_precision: bool,
) -> jax.Array:
  """Compute `attention` with all logits in memory."""
  dtype, full_precision = values.dtype, full_precision or centers is not None
  if is_short(queries.dtype) and isinstance(scale, jax.Array):
    # A factor of 1 on the keys carries the scale's gradient. The gradient of a factor on the logits would keep all
    # logits in memory.
    fixed = jax.lax.stop_gradient(scale)
    scale, factor = fixed, scale / jnp.where(fixed == 0, 1, fixed)
    keys = (factor * keys).astype(keys.dtype)
  parts = [keys] if centers is None else split_dot_only(keys, keys.shape[-1] - centers.shape[-1])
  norms = None if centers is None else 0.5 * row_dots(centers, parts[0])
  if is_short(queries.dtype):  # a scaled key would be rounded, and would no longer fit its norm
    pairs = _products(queries, keys, full_precision)
    logits = scale * (pairs if norms is None else pairs - norms.mT)
  else:  # one pass over the keys is cheaper than one over all logits
    scaled = jnp.concatenate([scale * z for z in parts], axis=-1)
    logits = _pair_products(queries, scaled, full_precision)
    logits = logits if norms is None else logits - (scale * norms).mT
    values = _stored(values, queries)
  seen = joint_mask(mask, causal, *logits.shape[-2:])
  if seen is not None:
    logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
  if is_short(queries.dtype):
    return jnp.einsum('...na,...av->...nv', jax.nn.softmax(logits, axis=-1).astype(dtype), values)
  weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
  # The sums over the keys are divided, and not the weights, because there are fewer sums than weights.
  outputs = _weighted_sums(weights, values) / weights.sum(axis=-1, keepdims=True)
  return outputs.astype(dtype)


def _stored(z: jax.Array, queries: jax.Array) -> jax.Array:
  """Return an array z, such as keys or values. If there is more than one query, z is stored by columns on a CPU."""
  # For one query, copies of all keys and values would cost more than the products.
  return z if queries.shape[-2] == 1 else by_columns(z)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _pair_products(
  queries: Float[Array, '... N d'], keys: Float[Array, '... A d'], full_precision: bool
) -> Float[Array, '... N A']:
  """Compute q·k for all queries q and keys k."""
  return _products(queries, _stored(keys, queries), full_precision)


@_pair_products.defjvp
def _pair_products_jvp(
  full_precision: bool, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  # In these forms, no gradient is a product Aᵀ B of stored matrices A and B. It would take up to twice as long as A B
  # on a CPU.
  (queries, keys), (of_queries, of_keys) = primals, tangents
  from_queries = _products(of_queries, _stored(keys, queries), full_precision, exact=1)
  from_keys = _products(_stored(queries, queries), _stored(of_keys, queries), full_precision, exact=0)
  return _pair_products(*primals, full_precision), from_keys + from_queries


def _products(a: jax.Array, b: jax.Array, full_precision: bool, exact: Literal[0, 1] | None = None) -> jax.Array:
  """Compute a bᵀ at the default precision, at full precision, or as `tangent_products` if `exact` is given."""
  if not full_precision:
    return einsum('...nd,...ad->...na', a, b)
  return products(a, b) if exact is None else tangent_products(a, b, exact=exact)


@jax.custom_jvp
def _weighted_sums(weights: Float[Array, '... N A'], values: Float[Array, '... A V']) -> Float[Array, '... N V']:
  """Compute the sums of the values with the weights of each query."""
  return jnp.einsum('...na,...av->...nv', weights, values)


@_weighted_sums.defjvp
def _weighted_sums_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (weights, values), (of_weights, of_values) = primals, tangents
  # The gradient reads the derivatives of the sums by columns, which is faster (see `_pair_products_jvp`).
  from_values = _stored(_weighted_sums(weights, of_values), weights)
  return _weighted_sums(*primals), _weighted_sums(of_weights, values) + from_values


def fused_attention(
  queries: Float[Array, 'B H N d'],
  keys: Float[Array, 'B H A d'],
  values: Float[Array, 'B H A V'],
  *,
  scale: Float[Array, '...'] | float,
  centers: Float[Array, 'B H A D'] | None = None,
  causal: bool = False,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> Float[Array, 'B H N V']:
  """Compute `attention` of arrays [B, H, N, d] by one call of cuDNN's kernel.

  This kernel takes one scale for all heads, and no bias for each key. The bias of `attention` is −scale t·k/2. So the
  scale and the bias become part of the coordinates: a key becomes [scale k, bias] and a query becomes [q, 1].

  With implementation 'xla', XLA computes the same function in place of cuDNN, on any device.
  """
  dtype = queries.dtype
  if centers is None and isinstance(scale, float):
    return padded_attention(queries, keys, values, scale, causal, implementation)
  if centers is not None:
    # The bias is of order √D, and a single bfloat16 number would be too coarse for it. So it is split over three
    # coordinates. The padding of dimensions to a multiple of 8 leaves room for them.
    parts = short_parts(keep_short(_bias, dtype)(centers, keys, scale), dtype, _PARTS)
    queries = jnp.concatenate([queries, jnp.ones((*queries.shape[:-1], _PARTS), dtype)], axis=-1)
    keys = jnp.concatenate([(scale * keys).astype(dtype), *parts], axis=-1)
  else:
    keys = (scale * keys).astype(dtype)
  return padded_attention(queries, keys, values, 1.0, causal, implementation)


def _bias(centers: jax.Array, keys: jax.Array, scale: jax.Array | float) -> jax.Array:
  """Compute the biases −scale·(t·k)/2 + t·e of all centers t, float32 [..., A, 1], with the keys k = M t.

  The term t·e corrects a rounding error. `fused_attention` rounds scale·k to the type of k. The error of the key is
  e = scale·k − round(scale·k), so the logit of a query q lacks q·e. If q is near the center t, then q·e ≈ t·e.
  """
  kind, scaled = jnp.finfo(keys.dtype), scale * keys[..., : centers.shape[-1]].astype(jnp.float32)
  error = jax.lax.stop_gradient(scaled - jax.lax.reduce_precision(scaled, kind.nexp, kind.nmant))
  return row_dots(centers, error - 0.5 * scaled)


def padded_attention(
  queries: Float[Array, 'B H N d'],
  keys: Float[Array, 'B H A d'],
  values: Float[Array, 'B H A V'],
  scale: float,
  causal: bool = False,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> Float[Array, 'B H N V']:
  """Pad the arrays with zeros to sizes that cuDNN supports, then compute softmax(scale q·k) v.

  Keys that are padding are masked. `implementation` is as in `fused_attention`.
  """
  (length, d), (keys_length, v) = queries.shape[2:], values.shape[2:]
  size = max(d, v)
  queries, keys, values = (z.swapaxes(1, 2) for z in (queries, keys, values))
  queries, keys, values = (_fill(z, 3, -(-size // _TILE) * _TILE - z.shape[3]) for z in (queries, keys, values))
  queries, keys, values = (_fill(z, 1, -z.shape[1] % _EVEN) for z in (queries, keys, values))
  masked = keys.shape[1] != keys_length
  out = jax.nn.dot_product_attention(
    queries,
    keys,
    values,
    scale=scale,
    is_causal=causal,
    key_value_seq_lengths=jnp.full(len(keys), keys_length, jnp.int32) if masked else None,
    implementation=implementation,
  )
  return out[:, :length, :, :v].swapaxes(1, 2)


def cudnn_applies(dtype: jnp.dtype, d: int) -> bool:
  """Return True if cuDNN's fused kernel can compute attention in the type `dtype`, with heads of d dimensions.

  The limit on d depends on the NVIDIA GPU of this process. Without a GPU, the limit is 128, and the program is
  assumed to run on an Ampere GPU or a newer one. Without cuDNN's library, the result is False.
  """
  # The platform is chosen later, when the program is lowered. But JAX checks cuDNN's limits when the program is
  # traced, and these checks need cuDNN's library.
  if dtype not in (jnp.bfloat16, jnp.float16) or before_ampere():
    return False
  head = jax.ShapeDtypeStruct((1, 1, _EVEN, d), dtype)
  training = jax.grad(lambda q, k, v: padded_attention(q, k, v, 1.0).astype(jnp.float32).sum(), (0, 1, 2))
  try:
    jax.eval_shape(training, head, head, head)
  except (NotImplementedError, RuntimeError):  # heads are too large, or there is no CUDA or no cuDNN
    return False
  return True


def _any_batch(z: jax.Array) -> bool:
  """Return True if the first axis of z has no fixed length, because `jax.export` exports for any batch size."""
  # cuDNN's kernel is compiled for one batch size. JAX also refuses to export the custom call of this kernel, because
  # the call may change.
  return bool(jax.export.is_symbolic_dim(z.shape[0]))


def _fill(z: jax.Array, axis: int, count: int) -> jax.Array:
  """Append `count` zeros to an array along an axis."""
  return jnp.pad(z, [(0, count if i == axis else 0) for i in range(z.ndim)])


def _cudnn_takes(queries: jax.Array, keys: jax.Array, values: jax.Array, extra: int) -> bool:
  """Return True if cuDNN supports these arrays after `extra` coordinates are added to queries and keys."""
  heads = queries.ndim == 4 and queries.shape[:2] == keys.shape[:2] == values.shape[:2]
  size = max(queries.shape[-1] + extra, values.shape[-1])
  if not queries.dtype == keys.dtype == values.dtype:  # a cache or a user may have values of a longer type
    return False
  return heads and not _any_batch(queries) and cudnn_applies(queries.dtype, size)


def is_attention(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  scale: Float[Array, '...'],
) -> bool:
  """Return True if `gaussian_attention` should compute a HyperBF whose kernel is the normalized Gaussian.

  Two conditions must hold. First, all centers of a head have the same sigma, and so the same `scale`. Second, a
  head has at most `_MOST_PAIRS` responses, which fit in memory at once, or cuDNN supports the arrays.
  """
  shared_scale = scale.ndim == 0 or scale.shape[-1] == 1
  pairs = points.shape[-2] * centers.shape[-2]
  few = not jax.export.is_symbolic_dim(pairs) and pairs <= _MOST_PAIRS
  return shared_scale and (few or _cudnn_takes(points, centers, coefficients, _PARTS))


def gaussian_attention(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
) -> Float[Array, '... N V']:
  """Compute Σ_a K_a c_a / Σ_a K_a as attention, for the Gaussian K with one sigma for each head.

  The responses are the softmax of (xᵀMt − tᵀMt/2 + x'·t') / σ² over the centers. x' and t' are the dot-only
  dimensions of a point and a center (`dot_only_dims` of the basis). The norm xᵀMx of a point cancels, and only the
  centers are multiplied by M. So the cost is that of attention.

  Args:
    points: x [..., N, D].
    centers: t [..., A, D].
    coefficients: c [..., A, V].
    basis: a basis with kernel 'gaussian', normalization 'sum', and sigma broadcastable to [..., 1, 1].
    mask: booleans as in `attention`.
    causal: as in `attention`.

  Returns:
    f(x), [..., N, V] in the type of the coefficients.
  """
  scale = 2 * basis.scale(points.dtype)
  if is_short(centers.dtype):
    # The gradient needs the centers. Without the optimization barrier XLA would keep queries and values in memory
    # with them.
    centers = jax.lax.optimization_barrier(centers)
  centers, beside = split_dot_only(centers, basis.dot_only_dims)
  keys = metric_product(centers, basis.metric, basis.weights)
  if basis.dot_only_dims:
    keys = jnp.concatenate([keys, beside], axis=-1)
  return attention(points, keys, coefficients, scale, centers, mask, causal)


def short_parts(z: jax.Array, dtype: jnp.dtype, count: int) -> list[jax.Array]:
  """Split float32 numbers z into `count` arrays of a short type, such as bfloat16, whose sum is nearly z.

  The first array is z, rounded. Each further array is z minus the sum of the previous arrays, rounded. The sum of all
  arrays differs from z only by the rounding error of the last array. So a matrix
  product with z is nearly the sum of the products with the arrays.
  """
  kind, parts = jnp.finfo(dtype), []
  for _ in range(count):
    # On a GPU, XLA would remove a conversion to the short type and back. The rest z − rounded would then be 0.
    rounded = jax.lax.reduce_precision(z, kind.nexp, kind.nmant)
    parts.append(rounded.astype(dtype))
    z = z - rounded
  return parts
