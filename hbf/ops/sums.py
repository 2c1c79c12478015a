"""Sums over the centres, from which the HyperBF operator follows under every normalisation.

With k_a = K(s_a) / max_b K(s_b) they are Σ_a k_a c_a, Σ_a k_a and Σ_a k_a². The gradient is written by hand: it keeps
one array of [points, centres] where automatic differentiation keeps several, and where even that is too large a block
of points at a time is computed, so that memory grows with the block.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hbf.ops.distances import Distances, products
from hbf.ops.kernels import KERNELS

_KEPT_RATIO = 4  # centres over the dimensions of a point and its value
# Pairs of point and centre in a block. Those of a CPU stay in its caches; an accelerator needs more to be busy.
_CPU_PAIRS, _ACCELERATOR_PAIRS = 2**19, 2**23


class Sums(NamedTuple):
  """Sums over the centres, with k_a = K_a / max K.

  Attributes:
    values: Σ_a k_a c_a, [..., N, V] in the coefficients' type.
    mass: Σ_a k_a, float32 [..., N, 1].
    power: Σ_a k_a², float32 [..., N, 1].
    log_peak: log max_a K_a, float32 [..., N, 1]; its gradient is 0, for it cancels from what the sums are used for.
  """

  values: jax.Array
  mass: jax.Array
  power: jax.Array
  log_peak: jax.Array


def kernel_sums(distances: Distances, coefficients: jax.Array, kernel: str) -> Sums:
  """The sums for every point.

  Args:
    distances: s for points [..., N, D] and centres [..., A, D].
    coefficients: c [..., A, V].
    kernel: a name in `hbf.ops.kernels.KERNELS`.
  """
  return _sums(kernel, _blocks(distances, coefficients), distances, coefficients)


def _blocks(distances: Distances, coefficients: jax.Array) -> int:
  """In how many blocks of points.

  Keeping a block's distances for the gradient saves a sixth of the products, so all points are one block as long as
  the distances take no more memory than a few times points and values, as in an MLP. More centres than that are
  computed in blocks, and again for the gradient.
  """
  points, centres = distances.points.shape, distances.centres.shape[-2]
  if centres <= _KEPT_RATIO * (points[-1] + coefficients.shape[-1]):
    return 1
  most = _CPU_PAIRS if jax.default_backend() == 'cpu' else _ACCELERATOR_PAIRS
  return min(-(-math.prod(points[:-1]) * centres // most), points[-2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(kernel: str, count: int, distances: Distances, coefficients: jax.Array) -> Sums:
  return _forward(kernel, count, distances, coefficients)[0]


def _forward(kernel: str, count: int, distances: Distances, coefficients: jax.Array) -> Any:
  def block(points: tuple[jax.Array, jax.Array]) -> tuple[Sums, jax.Array | None]:
    scaled = _of(distances, *points)()
    return _block_sums(kernel, scaled, coefficients), scaled if count == 1 else None

  blocks, kept = jax.lax.map(block, _split((distances.points, distances.norms), count))
  sums = _join(blocks, distances.points.shape[-2])
  return sums, (distances, coefficients, sums.log_peak, kept)


def _backward(kernel: str, count: int, residuals: Any, cotangents: Sums) -> Any:
  distances, coefficients, log_peak, kept = residuals
  given = cotangents._replace(log_peak=log_peak)

  def block(totals: Any, inputs: Any) -> Any:
    (*points, given), scaled = inputs
    part = _of(distances, *points)
    of_part, of_coefficients = _block_gradient(
      kernel, part, part() if scaled is None else scaled, coefficients, given
    )
    of_centres = (*of_part[2:], of_coefficients)
    return jax.tree.map(jnp.add, totals, of_centres), of_part[:2]

  zeros = tuple(jnp.zeros(z.shape, jnp.float32) for z in (*distances[2:], coefficients))
  blocks = _split((distances.points, distances.norms, given), count)
  (*of_centres, of_coefficients), of_points = jax.lax.scan(block, zeros, (blocks, kept))
  gradient = Distances(*_join(of_points, distances.points.shape[-2]), *of_centres)
  return jax.tree.map(lambda d, z: d.astype(z.dtype), (gradient, of_coefficients), (distances, coefficients))


_sums.defvjp(_forward, _backward)


def _block_sums(kernel: str, scaled: jax.Array, coefficients: jax.Array) -> Sums:
  """The sums from all distances at once, [..., N, A]."""
  log_k = KERNELS[kernel](scaled)
  log_peak = jnp.max(log_k, axis=-1, keepdims=True)
  k = jnp.exp(log_k - log_peak)
  values = jnp.einsum('...na,...av->...nv', k.astype(coefficients.dtype), coefficients)
  return Sums(values, k.sum(axis=-1, keepdims=True), (k * k).sum(axis=-1, keepdims=True), log_peak)


def _block_gradient(
  kernel: str, distances: Distances, scaled: jax.Array, coefficients: jax.Array, given: Sums
) -> tuple[Distances, jax.Array]:
  """Cotangents, float32, of the distances' parts and the coefficients for those of the sums (and their log_peak)."""
  log_k, pull = jax.vjp(KERNELS[kernel], scaled)
  k = jnp.exp(log_k - given.log_peak)
  of_k = products(given.values, coefficients) + given.mass + 2 * given.power * k
  (of_scaled,) = pull(of_k * k)
  of_coefficients = jnp.einsum(
    '...na,...nv->...av', k.astype(coefficients.dtype), given.values, preferred_element_type=jnp.float32
  )
  return distances.gradient(of_scaled), of_coefficients


def _of(distances: Distances, points: jax.Array, norms: jax.Array) -> Distances:
  """The distances of other points, mapped by the metric already."""
  return distances._replace(points=points, norms=norms)


def _split(tree: Any, count: int) -> Any:
  """Blocks [count, ..., N / count, D] of every array [..., N, D], padded with zeros.

  Row i goes to block i mod count: points that lie on several devices stay there, and every device works on every
  block.
  """

  def split(z: jax.Array) -> jax.Array:
    *leading, n, d = z.shape
    padded = jnp.pad(z, [(0, 0)] * len(leading) + [(0, -n % count), (0, 0)])
    return jnp.moveaxis(padded.reshape(*leading, -1, count, d), -2, 0)

  return jax.tree.map(split, tree)


def _join(tree: Any, n: int) -> Any:
  """Undoes `_split` for arrays of n rows."""

  def join(blocks: jax.Array) -> jax.Array:
    rows = jnp.moveaxis(blocks, 0, -2)
    return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])[..., :n, :]

  return jax.tree.map(join, tree)
