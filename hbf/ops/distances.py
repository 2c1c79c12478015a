"""Squared distances under a learned metric: r²(x, t) = ‖W(x − t)‖² = (x − t)ᵀ M (x − t), M = WᵀW."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hbf.errors import choose


def squared_distances(
  points: jax.Array,
  centres: jax.Array,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  scale: jax.Array | float = 1.0,
) -> jax.Array:
  """Squared distances between every point and every centre (memo, under eq. 4), times a factor of each centre.

  Computed as ‖a‖² + ‖b‖² − 2 a·b, with norms and accumulation in float32 whatever the input type, so the error
  is a rounding of ‖a‖² + ‖b‖², never of the input type.

  Args:
    points: [..., N, D].
    centres: [..., A, D], of the points' type.
    metric: 'identity' (W = 1), 'diagonal', 'low_rank', 'full', or 'bilinear'.
    weights: None for identity, [..., D] for diagonal, W [..., R, D] for low_rank, W [..., D, D] for full,
      and M [..., D, D] for bilinear.
    scale: positive, broadcastable to [..., 1, A].

  Returns:
    [..., N, A] in float32. At least 0 but for bilinear, whose M is free: xᵀMx + tᵀMt − 2xᵀMt, as in the
    authors' code, is a squared distance only if M is symmetric and positive.

  Raises:
    UserError: the metric isn't known.
  """
  scale = jnp.atleast_2d(jnp.asarray(scale, jnp.float32))
  if metric == 'bilinear':
    assert weights is not None
    transposed = weights.swapaxes(-1, -2).astype(points.dtype)
    mapped = products(points, transposed).astype(points.dtype)
    mapped_centres = products(centres, transposed).astype(points.dtype)
    return _combine(mapped, centres, row_dots(points, mapped), row_dots(centres, mapped_centres), scale)
  apply = choose('metric', metric, METRICS)
  # Rounding the mapped points to the input type once, before the norms, keeps the three terms consistent.
  a, b = (apply(z, weights).astype(points.dtype) for z in (points, centres))
  return jnp.maximum(_combine(a, b, row_dots(a, a), row_dots(b, b), scale), 0)


def _combine(a: jax.Array, b: jax.Array, a_norms: jax.Array, b_norms: jax.Array, scale: jax.Array) -> jax.Array:
  """scale (a_norms + b_norms − 2 a·b): [..., N, A], of a [..., N, D] and b [..., A, D]."""
  if a.dtype != jnp.float32:
    return scale * (a_norms[..., :, None] + b_norms[..., None, :] - 2 * products(a, b))
  # One product of [a, ‖a‖², 1] and scale [−2b, 1, ‖b‖²]: no passes over [N, A] for the sums and, above all, none in
  # the backward pass, where adding up gradients of norms and widths over the points costs more than the products.
  left = jnp.concatenate([a, a_norms[..., None], jnp.ones_like(a_norms)[..., None]], axis=-1)
  right = jnp.concatenate([-2 * b, jnp.ones_like(b_norms)[..., None], b_norms[..., None]], axis=-1)
  return products(left, right * scale.swapaxes(-1, -2))


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
  """Row by row a·b in float32: [..., N]."""
  return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=-1)


def products(a: jax.Array, b: jax.Array) -> jax.Array:
  """a bᵀ, accumulated in float32: [..., N, A].

  float32 inputs are multiplied at full precision: the difference of large terms would magnify the rounding of
  TF32 or bfloat16 passes, which are the default on accelerators.
  """
  return jnp.einsum(
    '...nd,...ad->...na', a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )


def metric_product(centres: jax.Array, metric: str, weights: jax.Array | None) -> jax.Array:
  """M t for every centre t, [..., A, D]; metric and weights as in `squared_distances`."""
  if metric == 'bilinear':
    assert weights is not None
    return products(centres, weights.astype(centres.dtype)).astype(centres.dtype)
  mapped = choose('metric', metric, METRICS)(centres, weights).astype(centres.dtype)
  transposed = weights if weights is None or metric == 'diagonal' else weights.swapaxes(-1, -2)
  return METRICS[metric](mapped, transposed).astype(centres.dtype)


def _scale(z: jax.Array, weights: jax.Array | None) -> jax.Array:
  assert weights is not None
  return z * weights[..., None, :].astype(z.dtype)


def _project(z: jax.Array, weights: jax.Array | None) -> jax.Array:
  assert weights is not None
  return products(z, weights.astype(z.dtype))


METRICS: dict[str, Callable[[jax.Array, jax.Array | None], jax.Array]] = {
  'identity': lambda z, _: z,
  'diagonal': _scale,
  'low_rank': _project,
  'full': _project,
}
