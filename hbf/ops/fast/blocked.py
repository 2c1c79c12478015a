"""Two ways to compute the HyperBF operator: from sums over the centers, and causally in blocks of points."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.basis import RadialBasis
from hbf.ops.distances import Distances, distances
from hbf.ops.fast.sums import Sums, blocks_in_memory, kernel_sums
from hbf.ops.normalization import NORMALIZATIONS, Normalization
from hbf.ops.parts import join, split
from hbf.ops.products import keep_short, products, sum_dtype
from hbf.ops.union import PartialSum


class Summation(NamedTuple):
  """A way to sum over the centers.

  Attributes:
    sums: a function with the signature of `hbf.ops.fast.sums.kernel_sums`. Its result is enough to compute every
      normalization.
    unnormalized: a function with the signature of `hbf.ops.fast.sums.unnormalized_sums`, which is faster for
      normalization 'none'. None: `sums` is used for normalization 'none' too.
  """

  sums: Callable[..., Sums]
  unnormalized: Callable[..., jax.Array] | None = None


def hyperbf_from_sums(
  summation: Summation,
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: None = None,
  causal: bool = False,
) -> Float[Array, '... N V']:
  """Compute the operator from the sums that `summation` returns.

  Every point must see every center. So `mask` must be None and `causal` must be False.
  """
  assert mask is None and not causal
  scaled, coefficients, log_gain, leading = _scaled_distances(points, centers, coefficients, basis)
  if basis.normalization == 'none' and summation.unnormalized:
    out = summation.unnormalized(scaled, coefficients, basis.log_kernel, log_gain)
  else:
    sums = summation.sums(scaled, coefficients, basis.log_kernel)
    out = _finish(sums, coefficients, NORMALIZATIONS[basis.normalization], log_gain).astype(coefficients.dtype)
  return out.reshape(*leading, *out.shape[-2:])


def partial_from_sums(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: None = None,
  causal: bool = False,
) -> PartialSum:
  """Compute a `PartialSum` from the sums of XLA's form (`kernel_sums`). Arguments as in `hyperbf_from_sums`."""
  assert mask is None and not causal
  scaled, coefficients, log_gain, leading = _scaled_distances(points, centers, coefficients, basis)
  sums = kernel_sums(scaled, coefficients, basis.log_kernel)
  values = _finish(sums, coefficients, NORMALIZATIONS['sum'], log_gain).astype(coefficients.dtype)
  # The gradient of log_peak is 0, as it has to be: Z = A k̄ max K does not depend on the number that divides K.
  log_normalizer = jnp.log(coefficients.shape[-2] * sums.moments.mean) + sums.moments.log_peak
  return PartialSum(*(z.reshape(*leading, *z.shape[-2:]) for z in (values, log_normalizer)))


def _scaled_distances(
  points: jax.Array, centers: jax.Array, coefficients: jax.Array, basis: RadialBasis
) -> tuple[Distances, jax.Array, jax.Array, tuple[int, ...]]:
  """Return the scaled distances, coefficients and log-gain, all with the same leading axes, and these axes.

  If the product of the leading axes is 1, the arrays have none of them.
  """
  scale, weights = basis.scale(points.dtype), basis.weights
  log_gain = jnp.asarray(basis.log_gain, scale.dtype)
  leading = jnp.broadcast_shapes(*(z.shape[:-2] for z in (points, centers, coefficients, scale, log_gain)))
  if math.prod(leading) == 1:
    # XLA's CPU backend is slower with leading axes of length 1.
    points, centers, coefficients, scale, log_gain = (
      z.reshape(z.shape[-2:]) for z in (points, centers, coefficients, scale, log_gain)
    )
    weights = _last_axes(weights, 1 if basis.metric == 'diagonal' else 2)
  else:
    points, centers, coefficients = (
      jnp.broadcast_to(z, (*leading, *z.shape[-2:])) for z in (points, centers, coefficients)
    )
  scaled = distances(points, centers, basis.metric, weights, scale, basis.dot_only_dims)
  return scaled, coefficients, log_gain, leading


def _finish(sums: Sums, coefficients: jax.Array, normalization: Normalization, log_gain: jax.Array) -> jax.Array:
  """Compute f = Σ_a R_a c_a from the sums. Return float32 [..., N, V]."""
  values, moments = sums
  if not normalization.centered:
    # A product, not a broadcast: its gradient sums over the points, which is fastest as a product on a CPU.
    values += products(moments.mean, coefficients.sum(axis=-2, keepdims=True, dtype=sum_dtype(coefficients.dtype)).mT)
  factor = normalization.factor(moments, coefficients.shape[-2], log_gain)
  dtype = coefficients.dtype
  return keep_short(lambda z: z.astype(sum_dtype(dtype)) * factor, dtype)(values.astype(dtype))


def causal_blocks(
  definition: Callable[..., jax.Array],
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: None = None,
  causal: bool = True,
) -> Float[Array, '... N V']:
  """Compute the operator in blocks of points, one after another. Point i sees centers 0 to i.

  The function `definition` (`hbf.ops.hyperbf.hyperbf_plain`) computes each block. `mask` must be None. The gradient
  computes the responses of each block again. So only the responses of one block are in memory at a time.
  """
  assert mask is None and causal
  length, count = points.shape[-2], centers.shape[-2]
  blocks = blocks_in_memory(points.shape, count)

  @jax.checkpoint
  def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
    some, rows = part
    return definition(some, centers, coefficients, basis, jnp.arange(count) <= rows)

  rows = jnp.arange(length)[:, None]
  return join(jax.lax.map(block, (split(points, blocks), split(rows, blocks))), length)


def _last_axes(z: jax.Array | None, count: int) -> Any:
  return None if z is None else z.reshape(z.shape[-count:])
