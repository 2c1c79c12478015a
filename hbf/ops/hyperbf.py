"""The HyperBF operator, f(x) = Σ_a R_a(x) c_a: its definition, and `hyperbf`, which computes it the fastest way.

Both stages of a block call `hyperbf`. Equations are those of CBMM Memo 143. In stage 1, centers are keys and
coefficients are values (eq. 2 and 6). In stage 2, centers and coefficients are learned (eq. 4 and 7).
"""

import jax
import jax.numpy as jnp
import numpy as np

from hbf.ops.basis import RadialBasis
from hbf.ops.distances import distances, squared_distances
from hbf.ops.fast.choice import fastest
from hbf.ops.kernels import DIRECT, KERNELS
from hbf.ops.normalization import normalize


def hyperbf_plain(
  points: jax.Array,
  centers: jax.Array,
  coefficients: jax.Array,
  basis: RadialBasis,
  mask: jax.Array | None = None,
  causal: bool = False,
) -> jax.Array:
  """Compute f by its definition, with all responses [..., N, A] in memory. Arguments as in `hyperbf`."""
  points, centers, coefficients = _as_arrays(points, centers, coefficients)
  seen = _seen(mask, causal, points.shape[-2], centers.shape[-2])
  r = responses(points, centers, basis, seen).astype(coefficients.dtype)
  return jnp.einsum('...na,...av->...nv', r, coefficients)  # f(x) = Σ_a R_a(x) c_a             eq. 7


def responses(points: jax.Array, centers: jax.Array, basis: RadialBasis, mask: jax.Array | None = None) -> jax.Array:
  """Compute the responses R_a(x), float32 [..., N, A]."""
  if basis.kernel in DIRECT:
    r = DIRECT[basis.kernel](nearness(points, centers, basis))  # R = φ((ρ² − r²) / 2σ²)
    return r if mask is None else jnp.where(mask, r, 0)
  log_k = nearness(points, centers, basis)  # R = K / Σ K (eq. 2), R = K (eq. 4), and two more
  return normalize(log_k, basis.normalization, jnp.asarray(basis.log_gain, log_k.dtype), mask)


def nearness(points: jax.Array, centers: jax.Array, basis: RadialBasis) -> jax.Array:
  """Compute log K(s) of s = r²/2σ², or for a kernel in `DIRECT` the depth b − s in the ball: float32 [..., N, A]."""
  scale, metric = basis.scale(points.dtype), (basis.metric, basis.weights)
  if basis.kernel not in DIRECT:
    s = squared_distances(points, centers, *metric, scale, basis.dot_only_dims)  # s = ‖W(x − t_a)‖² / 2σ²
    return KERNELS[basis.log_kernel](s)
  terms = distances(points, centers, *metric, scale, basis.dot_only_dims)
  # As a part of the centers' norms, b costs no pass over [N, A].
  shape = (*centers.shape[:-2], 1, centers.shape[-2])
  b = jnp.broadcast_to(jnp.asarray(basis.squared_radius, terms.scale.dtype), shape).mT
  return -terms._replace(center_norms=terms.center_norms - b / terms.scale)()


def hyperbf(
  points: jax.Array,
  centers: jax.Array,
  coefficients: jax.Array,
  basis: RadialBasis,
  *,
  mask: jax.Array | None = None,
  causal: bool = False,
  implementation: str = 'xla',
) -> jax.Array:
  """Compute f(x) = Σ_a R_a(x) c_a with responses R_a = K(‖W(x − t_a)‖² / 2σ²), normalized over the centers or not.

  It equals `hyperbf_plain` in value and gradient. `hbf.ops.fast.choice` picks the implementation.

  Args:
    points: x [..., N, D], the tokens or queries.
    centers: t [..., A, D].
    coefficients: c [..., A, V].
    basis: kernel, sigma, metric and normalization of the responses R.
    mask: booleans broadcastable to [..., N, A]. A center that is masked out does not exist for that point. Every
      point needs at least one center.
    causal: True if point i sees centers 0 to i only (those that the mask leaves).
    implementation: 'xla', 'pallas' (fused kernels) or 'plain' (the definition). Forward mode (`jax.jvp`) needs
      'plain'. With a mask or causality, sums are computed by the definition.

  Returns:
    f(x), [..., N, V] in the type of the coefficients. Sums are computed in float32, or in float64 if points, centers
    or coefficients are float64.

  Raises:
    UserError: the implementation is unknown, sigma or beta is missing, or 'pallas' has float64 arrays.
  """
  points, centers, coefficients = _as_arrays(points, centers, coefficients)
  compute = fastest(hyperbf_plain, points, centers, coefficients, basis, mask, causal, implementation)
  return compute(points, centers, coefficients, basis, mask, causal)


def _as_arrays(points: jax.Array, centers: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, ...]:
  """Return arrays of JAX's types. If any is float64, points and centers become float64."""
  points, centers, coefficients = (jnp.asarray(z) for z in (points, centers, coefficients))
  if jnp.float64 in (points.dtype, centers.dtype, coefficients.dtype):
    points, centers = points.astype(jnp.float64), centers.astype(jnp.float64)
  return points, centers, coefficients


def _seen(mask: jax.Array | None, causal: bool, points: int, centers: int) -> jax.Array | None:
  """Return the mask and causality as one mask, None if all points see all centers."""
  if not causal:
    return mask
  triangle = jnp.asarray(np.tri(points, centers, dtype=bool))
  return triangle if mask is None else mask & triangle
