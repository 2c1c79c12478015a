"""Squared distances under a learned metric: r²(x, t) = ‖W(x − t)‖² = (x − t)ᵀ M (x − t), M = WᵀW."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hbf.errors import choose


def squared_distances(
  points: jax.Array, centres: jax.Array, metric: str = 'identity', weights: jax.Array | None = None
) -> jax.Array:
  """Squared distances between every point and every centre (memo, under eq. 4).

  Computed as ‖a‖² + ‖b‖² − 2 a·b, with norms and accumulation in float32 whatever the input type, so the error
  is a rounding of ‖a‖² + ‖b‖², never of the input type.

  Args:
    points: [..., N, D].
    centres: [..., A, D], of the points' type.
    metric: 'identity' (W = 1), 'diagonal', 'low_rank', 'full', or 'bilinear'.
    weights: None for identity, [..., D] for diagonal, W [..., R, D] for low_rank, W [..., D, D] for full,
      and M [..., D, D] for bilinear.

  Returns:
    [..., N, A] in float32. At least 0 but for bilinear, whose M is free: xᵀMx + tᵀMt − 2xᵀMt, as in the
    authors' code, is a squared distance only if M is symmetric and positive.

  Raises:
    UserError: the metric isn't known.
  """
  if metric == 'bilinear':
    assert weights is not None
    mapped = _product(points, weights.swapaxes(-1, -2)).astype(points.dtype)
    mapped_centres = _product(centres, weights.swapaxes(-1, -2)).astype(points.dtype)
    return _combine(_dots(points, mapped), _dots(centres, mapped_centres), _product(mapped, centres))
  apply = choose('metric', metric, METRICS)
  # Rounding the mapped points to the input type once, before the norms, keeps the three terms consistent.
  a, b = (apply(z, weights).astype(points.dtype) for z in (points, centres))
  return jnp.maximum(_combine(_dots(a, a), _dots(b, b), _product(a, b)), 0)


def _combine(point_norms: jax.Array, centre_norms: jax.Array, products: jax.Array) -> jax.Array:
  return point_norms[..., :, None] + centre_norms[..., None, :] - 2 * products


def _dots(a: jax.Array, b: jax.Array) -> jax.Array:
  """Row by row a·b in float32: [..., N]."""
  return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """a bᵀ, accumulated in float32: [..., N, A].

  float32 inputs are multiplied at full precision: the difference of large terms would magnify the rounding of
  TF32 or bfloat16 passes, which are the default on accelerators.
  """
  return jnp.einsum(
    '...nd,...ad->...na', a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )


def _scale(z: jax.Array, weights: jax.Array | None) -> jax.Array:
  assert weights is not None
  return z * weights[..., None, :].astype(z.dtype)


def _project(z: jax.Array, weights: jax.Array | None) -> jax.Array:
  assert weights is not None
  return _product(z, weights.astype(z.dtype))


METRICS: dict[str, Callable[[jax.Array, jax.Array | None], jax.Array]] = {
  'identity': lambda z, _: z,
  'diagonal': _scale,
  'low_rank': _project,
  'full': _project,
}
