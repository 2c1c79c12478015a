"""Sums over the centers, from which the HyperBF operator can be computed under every normalization.

Let k_a = K(s_a) / max_b K(s_b), with mean k̄ over the centers. The sums are k̄, the variance of k over the centers,
and Σ_a (k_a − k̄) c_a. If the responses hardly differ, sums of k would lose the differences to rounding. So an
implementation sums u = k − p. The number p, the pivot, is the mean of k over the first F of the A centers. Each
implementation has its own F. The pivot differs from k̄ by at most √(A / F) standard deviations of k. So the final
correction from p to k̄ is never large.

In this module, "float32" means float64 if an input is float64 (`hbf.ops.products.sum_dtype`).

Without normalization, kernel values are not divided by their maximum, and no moments are needed. See
`unnormalized_sums`.

The gradient is written by hand, because automatic differentiation would store several arrays [points, centers]. The
gradient by hand stores one such array. If this array is too large, the points are processed in blocks, and only the
array of one block is in memory.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.distances import Distances
from hbf.ops.kernels import KERNELS
from hbf.ops.layout import vary_together
from hbf.ops.normalization import Moments
from hbf.ops.parts import join, split
from hbf.ops.products import einsum, is_short, products, sum_dtype, sum_over_points

_FIRST = 64  # centers whose mean response is the pivot
_KEPT_RATIO = 4  # the gradient keeps the distances if A is at most this number times D + V
_PAIRS = 2**21  # pairs of point and center in a block


class Sums(NamedTuple):
  """Sums over the centers a, in terms of k_a = K_a / max K and its mean k̄ over the centers.

  Attributes:
    values: Σ_a (k_a − k̄) c_a, float32 [..., N, V].
    moments: the moments of k.
  """

  values: jax.Array
  moments: Moments


class PivotedSums(NamedTuple):
  """The sums that an implementation computes for each point, float32.

  K_a is the kernel of center a, c_a its coefficient, and k_a = K_a / max K. The sums are over u_a = k_a − p with a
  number p, the pivot. `center` makes `Sums` from them, for any p. Rounding errors are least if p is near the mean
  of k_a.

  Attributes:
    values: Σ_a u_a c_a, [..., N, V].
    total: Σ_a u_a, [..., N, 1].
    squares: Σ_a u_a², [..., N, 1].
    pivot: p, [..., N, 1].
    log_peak: log max_a K_a, [..., N, 1].
  """

  values: jax.Array
  total: jax.Array
  squares: jax.Array
  pivot: jax.Array
  log_peak: jax.Array


class MomentCotangents(NamedTuple):
  """The part of the cotangent of k_a = K_a / max K that comes from the moments: constant + slope (k_a − k̄).

  Each field has the shape [..., N, 1]. The field `mean` is k̄.
  """

  constant: jax.Array
  slope: jax.Array
  mean: jax.Array


class ResponseCotangents(NamedTuple):
  """The numbers from which the cotangents of all k_a = exp(log K_a − log_peak) are computed.

  The cotangent of k_a is given·c_a, plus the part that comes from the moments.

  Attributes:
    given: the cotangent of the sums [..., N, V] (`Sums.values`), in the type of the coefficients.
    log_peak: log max_a K_a, or the negative log-gain for sums without moments, float32 [..., N, 1].
    of_moments: the part that comes from the moments. None for sums without moments.
  """

  given: jax.Array
  log_peak: jax.Array
  of_moments: MomentCotangents | None


def center(pivoted: PivotedSums, coefficients: Float[Array, '... A V']) -> Sums:
  """Convert sums over k_a − p to `Sums`, which are over k_a − k̄. p is the pivot, and k̄ is the mean of k_a."""
  count = coefficients.shape[-2]
  offset = pivoted.total / count
  # A product, not a broadcast, is fastest on XLA's CPU backend.
  values = pivoted.values - products(
    offset, coefficients.sum(axis=-2, keepdims=True, dtype=sum_dtype(coefficients.dtype)).mT
  )
  variance = pivoted.squares / count - offset * offset
  return Sums(values, Moments(pivoted.pivot + offset, variance, pivoted.log_peak))


def pull_back(cotangents: Sums, moments: Moments, coefficients: Float[Array, '... A V']) -> ResponseCotangents:
  """Compute the `ResponseCotangents` from the cotangents of the sums and the moments of the forward pass."""
  count = coefficients.shape[-2]
  mean_coefficients = coefficients.mean(axis=-2, keepdims=True, dtype=sum_dtype(coefficients.dtype))
  given = cotangents.values.astype(coefficients.dtype)
  of_all = einsum('...nv,...av->...na', given, mean_coefficients)
  of_moments = MomentCotangents(
    # The rounded cotangent is used here too, so that the common part of all coefficients cancels.
    constant=cotangents.moments.mean / count - of_all,
    slope=2 * cotangents.moments.variance / count,
    mean=moments.mean,
  )
  return ResponseCotangents(given, moments.log_peak, of_moments)


def kernel_sums(distances: Distances, coefficients: Float[Array, '... A V'], kernel: str) -> Sums:
  """Compute `Sums` for every point.

  Args:
    distances: the parts of the scaled squared distances s, for points [..., N, D] and centers [..., A, D].
    coefficients: c [..., A, V].
    kernel: a name in `hbf.ops.kernels.KERNELS`.
  """
  return _sums(kernel, _blocks(distances, coefficients), *vary_together((distances, coefficients)))


def unnormalized_sums(
  distances: Distances, coefficients: Float[Array, '... A V'], kernel: str, log_gain: Float[Array, '...'] | float
) -> Float[Array, '... N V']:
  """Compute Σ_a exp(log K_a + log-gain) c_a for every point. Return [..., N, V] in the type of the coefficients.

  The moments of K are not computed, because they would cost more passes over all responses. The log-gain is
  broadcastable to [..., 1, 1]. The other arguments are as for `kernel_sums`.
  """
  log_peak = jnp.broadcast_to(-jnp.asarray(log_gain), (*coefficients.shape[:-2], 1, 1))
  return _unnormalized(kernel, _blocks(distances, coefficients), *vary_together((distances, coefficients, log_peak)))


def _blocks(distances: Distances, coefficients: jax.Array) -> int:
  """Return the number of blocks into which the points are split.

  There is a single block if A ≤ 4 (D + V), for A centers of D dimensions and coefficients of V dimensions. With more
  centers, the responses of one block must fit in memory.
  """
  # The distances [..., N, A] of a single block are kept for the gradient, which saves a sixth of the matrix products.
  # If there are several blocks, the gradient computes the distances of each block again.
  points, centers = distances.points.shape, distances.centers.shape[-2]
  if centers <= _KEPT_RATIO * (points[-1] + coefficients.shape[-1]):
    return 1
  return blocks_in_memory(points, centers)


def blocks_in_memory(shape: tuple[int, ...], centers: int) -> int:
  """Return a number of blocks of points such that the responses of one block fit in memory.

  The points have the shape `shape`, which is [..., N, D], and `centers` is the number of centers. If a program is
  exported for any number of images (`jax.export`), the number of points is unknown. Then there is one block.
  """
  pairs = math.prod(shape[:-1]) * centers
  return 1 if jax.export.is_symbolic_dim(pairs) else max(1, min(-(-pairs // _PAIRS), shape[-2]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(kernel: str, count: int, distances: Distances, coefficients: jax.Array) -> Sums:
  return _sums_forward(kernel, count, distances, coefficients)[0]


def _sums_forward(kernel: str, count: int, distances: Distances, coefficients: jax.Array) -> Any:
  def of_block(scaled: jax.Array) -> PivotedSums:
    return _block_sums(kernel, scaled, coefficients)

  pivoted, kept = _forward(of_block, count, distances, coefficients.dtype)
  sums = center(pivoted, coefficients)
  return sums, (distances, coefficients, sums.moments, kept)


def _sums_backward(kernel: str, count: int, residuals: Any, cotangents: Sums) -> Any:
  distances, coefficients, moments, kept = residuals
  return _backward(kernel, count, distances, coefficients, kept, pull_back(cotangents, moments, coefficients))


_sums.defvjp(_sums_forward, _sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _unnormalized(
  kernel: str, count: int, distances: Distances, coefficients: jax.Array, log_peak: jax.Array
) -> jax.Array:
  return _unnormalized_forward(kernel, count, distances, coefficients, log_peak)[0]


def _unnormalized_forward(
  kernel: str, count: int, distances: Distances, coefficients: jax.Array, log_peak: jax.Array
) -> Any:
  def of_block(scaled: jax.Array) -> jax.Array:
    # The exponential is written as in the gradient, so that XLA computes it only once.
    return _values(jnp.exp(KERNELS[kernel](scaled) - log_peak), coefficients)

  values, kept = _forward(of_block, count, distances, coefficients.dtype)
  values = values.astype(coefficients.dtype)
  return values, (distances, coefficients, log_peak, values, kept)


def _unnormalized_backward(kernel: str, count: int, residuals: Any, given: jax.Array) -> Any:
  distances, coefficients, log_peak, values, kept = residuals
  pull = ResponseCotangents(given, jnp.broadcast_to(log_peak, distances.norms.shape), None)
  of_log_gain = jnp.sum(given.astype(log_peak.dtype) * values.astype(log_peak.dtype), axis=(-2, -1), keepdims=True)
  return (*_backward(kernel, count, distances, coefficients, kept, pull), -of_log_gain)


_unnormalized.defvjp(_unnormalized_forward, _unnormalized_backward)


def _forward(of_block: Callable[[jax.Array], Any], count: int, distances: Distances, dtype: jnp.dtype) -> Any:
  """Apply `of_block` to the distances of each of `count` blocks of points.

  Return the joined results, and the distances that are kept for the gradient. If there are several blocks, no
  distances are kept: None. Those of a single block are kept in the form that `_shortened` returns for type `dtype`.
  """

  def block(points: tuple[jax.Array, jax.Array]) -> Any:
    scaled = _with_points(distances, *points)()
    return of_block(scaled), _shortened(scaled, dtype) if count == 1 else None

  blocks, kept = jax.lax.map(block, tuple(split(z, count) for z in (distances.points, distances.norms)))
  return jax.tree.map(lambda z: join(z, distances.points.shape[-2]), blocks), kept


def _backward(
  kernel: str, count: int, distances: Distances, coefficients: jax.Array, kept: Any, pull: ResponseCotangents
) -> Any:
  """Compute the cotangents of the arrays in `distances` and of `coefficients`, in `count` blocks of points.

  `kept` has the distances that `_forward` kept, or None. `pull` is the result of `pull_back`.
  """

  def block(totals: Any, inputs: Any) -> Any:
    (points, norms), pull, kept = inputs
    part = _with_points(distances, points, norms)
    scaled = part() if kept is None else functools.reduce(jnp.add, kept)
    of_part, of_coefficients = _block_gradient(kernel, part, scaled, coefficients, pull)
    of_centers = (*of_part[2:], of_coefficients)
    return jax.tree.map(jnp.add, totals, of_centers), of_part[:2]

  sums = sum_dtype(distances.points.dtype, coefficients.dtype)
  zeros = tuple(jnp.zeros_like(z, sums) for z in (*distances[2:], coefficients))
  points = tuple(split(z, count) for z in (distances.points, distances.norms))
  pulls = jax.tree.map(lambda z: split(z, count), pull)
  # In rows of padding, an infinite log_peak makes k 0. Otherwise k could be infinite with metric bilinear.
  pulls = pulls._replace(log_peak=split(pull.log_peak, count, fill=math.inf))
  (*of_centers, of_coefficients), of_points = jax.lax.scan(block, zeros, (points, pulls, kept))
  of_points = (join(z, distances.points.shape[-2]) for z in of_points)
  gradient = (Distances(*of_points, *of_centers), of_coefficients)
  return jax.tree.map(lambda d, z: d.astype(z.dtype), gradient, (distances, coefficients))


def _shortened(scaled: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
  """Return the distances `scaled` [..., N, A] as one array, or as two arrays that sum to them if `dtype` is short.

  For a short type, such as bfloat16, the first array has the smallest distance of each point, float32 [..., N, 1].
  The second array has the differences from it, in the short type [..., N, A]. Only the differences are rounded, so
  the largest responses are the most precise.
  """
  if not is_short(dtype):
    return (scaled,)
  least = scaled.min(axis=-1, keepdims=True)
  # Without the optimization barrier XLA would keep the float32 distances, and round them in the gradient.
  return jax.lax.optimization_barrier((least, (scaled - least).astype(dtype)))


def _block_sums(kernel: str, scaled: jax.Array, coefficients: jax.Array) -> PivotedSums:
  """Compute the sums of one block of points from its scaled squared distances [..., N, A]."""
  # All kernels decrease with the distance, so the peak is at the least distance. The greatest log K would be the same
  # number, but XLA would store log K for it. The peak cancels, so its gradient is set to 0. JAX's gradient would
  # divide by the number of entries that equal the peak. In some compilations no recomputed entry equals it.
  log_peak = jax.lax.stop_gradient(KERNELS[kernel](scaled.min(axis=-1, keepdims=True)))
  log_k = KERNELS[kernel](scaled)
  pivot = jnp.mean(jnp.exp(log_k[..., :_FIRST] - log_peak), axis=-1, keepdims=True)
  u = jnp.exp(log_k - log_peak) - pivot
  total, squares = (z.sum(axis=-1, keepdims=True) for z in (u, u * u))
  return PivotedSums(_values(u, coefficients), total, squares, pivot, log_peak)


def _block_gradient(
  kernel: str, distances: Distances, scaled: jax.Array, coefficients: jax.Array, pull: ResponseCotangents
) -> tuple[Distances, jax.Array]:
  """Compute the float32 cotangents of the arrays in `distances` and of `coefficients`, for one block of points.

  The array `scaled` [..., N, A] has the values of the distances, and `pull` is the result of `pull_back`.
  """
  log_k, pull_kernel = jax.vjp(KERNELS[kernel], scaled)
  k = jnp.exp(log_k - pull.log_peak)
  of_k, mean = einsum('...nv,...av->...na', pull.given, coefficients), None
  if pull.of_moments is not None:
    constant, slope, mean = pull.of_moments
    of_k += constant + slope * (k - mean)
  (of_scaled,) = pull_kernel(of_k * k)
  return distances.gradient(of_scaled), _coefficient_gradient(k, mean, pull.given)


def _coefficient_gradient(k: jax.Array, mean: jax.Array | None, given: jax.Array) -> jax.Array:
  """Compute Σ_n (k_na − k̄_n) g_n, float32 [..., A, V], for k [..., N, A], k̄ [..., N, 1] and g [..., N, V].

  The mean k̄ is 0 if it is None.
  """
  if is_short(given.dtype):
    return sum_over_points((k if mean is None else k - mean).astype(given.dtype), given)
  if mean is None:
    return sum_over_points(k, given)

  def of_responses(k: jax.Array, mean: jax.Array, given: jax.Array) -> jax.Array:
    return sum_over_points(k, given) - einsum('...nm,...nv->...mv', mean, given)

  def of_deviations(k: jax.Array, mean: jax.Array, given: jax.Array) -> jax.Array:
    return sum_over_points(k - mean, given)

  # On a CPU, k is precise enough, and XLA keeps k anyway. Other devices round the factors of the product.
  return jax.lax.platform_dependent(k, mean, given, cpu=of_responses, default=of_deviations)


def _values(k: jax.Array, coefficients: jax.Array) -> jax.Array:
  """Compute the sums Σ_a k_a c_a, float32 [..., N, V], for numbers k [..., N, A]."""
  return einsum('...na,...av->...nv', k.astype(coefficients.dtype), coefficients)


def _with_points(distances: Distances, points: jax.Array, norms: jax.Array) -> Distances:
  return distances._replace(points=points, norms=norms)
