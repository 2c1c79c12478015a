"""The HyperBF operator: its definition, and `hyperbf`, which computes it the fastest way.

    s_a(x) = ‖W(x − t_a)‖² / 2σ_a²            the scaled squared distance to the center t_a
    R_a(x) = K(s_a)                           the response, for normalization 'none' (CBMM Memo 143, eq. 4)
    R_a(x) = K(s_a) / Σ_b K(s_b)              the response, for normalization 'sum' (eq. 2)
    f(x) = Σ_a R_a(x) c_a                     the sum over the centers

Both stages of a transformer block (`hbf.nn.block`) call `hyperbf`. Stage 1 has keys as centers and values as
coefficients (eq. 6). Stage 2 has learned centers and coefficients (eq. 7).
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from hbf.ops.basis import RadialBasis
from hbf.ops.distances import distances, squared_distances
from hbf.ops.fast.choice import fastest, fastest_partial
from hbf.ops.kernels import DIRECT, KERNELS
from hbf.ops.layout import explicit_split, laid_out_by_xla
from hbf.ops.masks import joint_mask
from hbf.ops.normalization import normalize
from hbf.ops.union import PartialSum


def hyperbf_plain(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
  factors: Float[Array, '... #N #A'] | None = None,
) -> Float[Array, '... N V']:
  """Compute f by its definition, with all responses [..., N, A] in memory. Arguments as in `hyperbf`."""
  points, centers, coefficients = _as_arrays(points, centers, coefficients)
  seen = joint_mask(mask, causal, points.shape[-2], centers.shape[-2])
  r = responses(points, centers, basis, seen, factors).astype(coefficients.dtype)
  return jnp.einsum('...na,...av->...nv', r, coefficients)  # f(x) = Σ_a R_a(x) c_a


def responses(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  basis: RadialBasis,
  mask: Bool[Array, '... #N #A'] | None = None,
  factors: Float[Array, '... #N #A'] | None = None,
) -> Float[Array, '... N A']:
  """Compute the responses R_a(x), float32 [..., N, A]. With factors g, compute g_a(x) R_a(x) instead."""
  if basis.kernel in DIRECT:
    r = DIRECT[basis.kernel](nearness(points, centers, basis))  # R = φ((ρ² − r²) / 2σ²)
    r = r if mask is None else jnp.where(mask, r, 0)
  else:
    log_k = nearness(points, centers, basis)  # R = K, K / ΣK, K / √mean(K²) or (K − mean K) / √var K
    r = normalize(log_k, basis.normalization, jnp.asarray(basis.log_gain, log_k.dtype), mask)
  return r if factors is None else factors * r


def nearness(
  points: Float[Array, '... N D'], centers: Float[Array, '... A D'], basis: RadialBasis
) -> Float[Array, '... N A']:
  """Compute how near each point is to each center: log K(s), float32 [..., N, A].

  For a kernel in `hbf.ops.kernels.DIRECT`, compute the depth b − s = (ρ² − r²) / 2σ² instead.
  """
  scale, metric = basis.scale(points.dtype), (basis.metric, basis.weights)
  if basis.kernel not in DIRECT:
    s = squared_distances(points, centers, *metric, scale, basis.dot_only_dims)  # s = ‖W(x − t_a)‖² / 2σ²
    return KERNELS[basis.log_kernel](s)
  terms = distances(points, centers, *metric, scale, basis.dot_only_dims)
  # b is subtracted from the centers' norms. This needs no pass over an array [N, A].
  shape = (*centers.shape[:-2], 1, centers.shape[-2])
  b = jnp.broadcast_to(jnp.asarray(basis.squared_radius, terms.scale.dtype), shape).mT
  return -terms._replace(center_norms=terms.center_norms - b / terms.scale)()


def hyperbf(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  *,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
  factors: Float[Array, '... #N #A'] | None = None,
  implementation: str = 'xla',
) -> Float[Array, '... N V']:
  """Compute f(x) = Σ_a R_a(x) c_a with responses R_a = K(‖W(x − t_a)‖² / 2σ²), normalized over the centers or not.

  Values and gradients equal those of `hyperbf_plain`. `hbf.ops.fast.choice` picks the implementation.

  Args:
    points: x [..., N, D], the tokens or queries.
    centers: t [..., A, D].
    coefficients: c [..., A, V].
    basis: the kernel, sigma, metric and normalization, which determine the responses R.
    mask: booleans broadcastable to [..., N, A], True where a point sees a center. Other centers are left out of all
      sums for this point, those of the normalization included. For a point that sees no center, f(x) is 0, or any
      finite numbers where the Gaussian is computed as attention (`hbf.ops.fast.attention.is_attention`).
    causal: True if point i sees centers 0 to i only. A mask may hide some of these centers too.
    factors: g_a(x), broadcastable to [..., N, A]. The coefficient c_a becomes g_a(x) c_a. None: all factors are 1.
    implementation: 'xla', 'pallas' (fused kernels for a TPU) or 'plain' (the definition). Forward mode (`jax.jvp`)
      needs 'plain'. With a mask, with causal=True, with factors or for a kernel in `hbf.ops.kernels.DIRECT`, 'pallas'
      computes f as 'xla' does.

  Returns:
    f(x), [..., N, V] in the type of the coefficients. Sums are computed in float32, or in float64 if points, centers
    or coefficients are float64.

  Raises:
    UserError: the implementation is unknown, sigma or beta is missing, or 'pallas' is chosen for float64 arrays or
      for a GPU.
  """
  points, centers, coefficients = _as_arrays(points, centers, coefficients)
  split = _split(points, centers, coefficients)
  return laid_out_by_xla(_hyperbf, split, points, centers, coefficients, basis, mask, causal, implementation, factors)


def _hyperbf(points: jax.Array, centers: jax.Array, coefficients: jax.Array, *options: Any) -> jax.Array:
  """Compute `hyperbf` with the fastest implementation. `options` are the others of its arguments."""
  basis, mask, causal, implementation, factors = options
  compute = fastest(hyperbf_plain, points, centers, coefficients, basis, mask, causal, implementation, factors)
  return compute(points, centers, coefficients, basis, mask, causal)


def partial_sum(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  *,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
) -> PartialSum:
  """Compute the operator over a part of the centers, with its normalizer. `hbf.ops.union.unite` joins two parts.

  So centers with other leading axes, such as centers that all images share, need not be copied into one array.
  Values and gradients equal those of `partial_plain`.

  Args:
    points: as in `hyperbf`.
    centers: as in `hyperbf`.
    coefficients: as in `hyperbf`.
    basis: as in `hyperbf`, with normalization 'sum'.
    mask: as in `hyperbf`. But a point may see no center of this part. Its part of the united sum is then 0.
    causal: as in `hyperbf`.
  """
  assert basis.normalization == 'sum'
  points, centers, coefficients = _as_arrays(points, centers, coefficients)
  compute, split = fastest_partial(partial_plain, mask, causal), _split(points, centers, coefficients)
  return laid_out_by_xla(compute, split, points, centers, coefficients, basis, mask, causal)


def partial_plain(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
) -> PartialSum:
  """Compute a partial sum by its definition, with all responses in memory. Arguments as in `partial_sum`."""
  log_k = nearness(points, centers, basis)
  seen = joint_mask(mask, causal, points.shape[-2], centers.shape[-2])
  if seen is not None:  # with −∞ in place of the least number, a point that sees no center would get NaN
    log_k = jnp.where(seen, log_k, jnp.finfo(log_k.dtype).min)
  log_normalizer = jax.nn.logsumexp(log_k, axis=-1, keepdims=True)
  r = jnp.exp(log_k - log_normalizer).astype(coefficients.dtype)
  return PartialSum(jnp.einsum('...na,...av->...nv', r, coefficients), log_normalizer)


def _split(points: jax.Array, centers: jax.Array, coefficients: jax.Array) -> PartitionSpec:
  """Return the explicit mesh axes that split f(x): leading axes like those of the arrays, and N like the points."""
  *split, _ = explicit_split(points)
  for z in (coefficients, centers):
    used = {*jax.tree.leaves(split)}  # a mesh axis can split one axis only
    free = [None if used & {*jax.tree.leaves(axes)} else axes for axes in explicit_split(z)[:-2]]
    pairs = itertools.zip_longest(reversed(split), (None, *reversed(free)))
    split = [ours or theirs for ours, theirs in pairs][::-1]
  return PartitionSpec(*split, None)


def _as_arrays(points: jax.Array, centers: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, ...]:
  """Convert the arguments to arrays of JAX. If one is float64, also convert points and centers to float64."""
  points, centers, coefficients = (jnp.asarray(z) for z in (points, centers, coefficients))
  if jnp.float64 in (points.dtype, centers.dtype, coefficients.dtype):
    points, centers = points.astype(jnp.float64), centers.astype(jnp.float64)
  return points, centers, coefficients
