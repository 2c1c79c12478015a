"""Squared distances under a learned metric: r²(x, t) = ‖W(x − t)‖² = (x − t)ᵀ M (x − t), M = WᵀW."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hbf.errors import choose

_PRODUCTS = '...nd,...ad->...na'


def wide(*dtypes: Any) -> jnp.dtype:
  """Return the type that sums of numbers of these types are computed in: float64 of float64, else float32."""
  return jnp.result_type(*dtypes, jnp.float32)


def is_short(dtype: jnp.dtype) -> bool:
  """Return whether numbers of this type have fewer bits than their sums."""
  return dtype != wide(dtype)


class Distances(NamedTuple):
  """The parts of scaled squared distances: scale (norms + centre_norms − 2 points·centres).

  The metric is in the points and centers already. Nothing of size [N, A] is held. Where this module says float32, it
  is float64 of float64 points (`wide`).

  Attributes:
    points: [..., N, D].
    norms: xᵀMx, float32 [..., N, 1].
    centres: [..., A, D], of the points' type.
    centre_norms: tᵀMt, float32 [..., A, 1].
    scale: a factor of each centre, float32 [..., A, 1].
  """

  points: jax.Array
  norms: jax.Array
  centres: jax.Array
  centre_norms: jax.Array
  scale: jax.Array

  def __call__(self) -> jax.Array:
    """The distances, float32 [..., N, A]; not clamped, rounding may take them slightly below 0."""
    if is_short(self.points.dtype):
      squares = self.norms + self.centre_norms.mT - 2 * products(self.points, self.centres)
      return self.scale.mT * squares
    # One product of [x, ‖x‖², 1] and scale [−2t, 1, ‖t‖²]: no passes over [N, A] for the sums.
    left = jnp.concatenate([self.points, self.norms, jnp.ones_like(self.norms)], axis=-1)
    right = jnp.concatenate([-2 * self.centres, jnp.ones_like(self.centre_norms), self.centre_norms], axis=-1)
    return products(left, self.scale * right)

  def gradient(self, cotangent: jax.Array) -> 'Distances':
    """The cotangents of all parts, float32, for that of the distances, float32 [..., N, A].

    By hand, because summing over the points outside of a product costs more than the products do.
    """
    if not is_short(self.points.dtype):
      g = cotangent
      along_points = jnp.concatenate([self.points, self.norms, jnp.ones_like(self.norms)], axis=-1)
      sums = _product('...na,...nk->...ak', g, along_points)
      by_point, by_norm, by_one = sums[..., :-2], sums[..., -2:-1], sums[..., -1:]
      of_norms = jnp.einsum('...na,...ak->...nk', g, self.scale)
    else:  # norms are too large for a short type; behind the barrier, or XLA would keep the float32 array as well
      g = jax.lax.optimization_barrier(cotangent.astype(self.points.dtype))
      by_point = _product('...na,...nd->...ad', g, self.points)
      by_norm = jnp.sum(g * self.norms, axis=-2)[..., None]
      by_one = jnp.sum(g, axis=-2, dtype=jnp.float32)[..., None]
      of_norms = jnp.sum(g * self.scale.mT, axis=-1, keepdims=True)
    scaled_centres = (self.scale * self.centres).astype(g.dtype)
    return Distances(
      points=-2 * _product('...na,...ad->...nd', g, scaled_centres),
      norms=of_norms,
      centres=-2 * self.scale * by_point,
      centre_norms=self.scale * by_one,
      scale=by_norm + self.centre_norms * by_one - 2 * row_dots(self.centres, by_point),
    )


def distances(
  points: jax.Array,
  centres: jax.Array,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  scale: jax.Array | float = 1.0,
  null: int = 0,
) -> Distances:
  """The parts of the squared distances between every point and every centre, times a factor of each centre.

  Args:
    points: [..., N, D].
    centres: [..., A, D], of the points' type.
    metric: 'identity' (W = 1), 'diagonal', 'low_rank', 'full', or 'bilinear'.
    weights: None for identity, [..., D] for diagonal, W [..., R, D] for low_rank, W [..., D, D] for full,
      and M [..., D, D] for bilinear.
    scale: broadcastable to [..., 1, A]; positive but for metric bilinear.
    null: how many of the last coordinates, x' and t', the metric leaves alone, and which have no norms: r² has
      −2 x'·t' of them and nothing else. Of null vectors that is a squared distance too (`hbf.nn.places`).

  Raises:
    UserError: the metric isn't known.
  """
  if null:
    (points, x), (centres, t) = apart(points, null), apart(centres, null)
    others = distances(points, centres, metric, weights, scale)
    left, right = (jnp.concatenate(z, axis=-1) for z in ((others.points, x), (others.centres, t)))
    return others._replace(points=left, centres=right)
  scale = jnp.atleast_2d(jnp.asarray(scale, wide(points.dtype))).mT
  scale = jnp.broadcast_to(scale, (*centres.shape[:-1], 1))
  if metric == 'bilinear':
    assert weights is not None
    mapped, mapped_centres = (products(z, weights.mT.astype(z.dtype)).astype(z.dtype) for z in (points, centres))
    return Distances(mapped, row_dots(points, mapped), centres, row_dots(centres, mapped_centres), scale)
  apply = choose('metric', metric, METRICS)
  # Rounding the mapped points to the input type once, before the norms, keeps the three terms consistent.
  a, b = (apply(z, weights).astype(points.dtype) for z in (points, centres))
  return Distances(a, row_dots(a, a), b, row_dots(b, b), scale)


def squared_distances(
  points: jax.Array,
  centres: jax.Array,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  scale: jax.Array | float = 1.0,
  null: int = 0,
) -> jax.Array:
  """Squared distances between every point and every centre (memo, under eq. 4), times a factor of each centre.

  Computed as ‖a‖² + ‖b‖² − 2 a·b, with norms and accumulation in float32 whatever the input type, so the error
  is a rounding of ‖a‖² + ‖b‖², never of the input type.

  Args and errors: as for `distances`.

  Returns:
    [..., N, A] in float32. At least 0 but for bilinear, whose M is free: xᵀMx + tᵀMt − 2xᵀMt, as in the
    authors' code, is a squared distance only if M is symmetric and positive.
  """
  squares = distances(points, centres, metric, weights, scale, null)()
  return squares if metric == 'bilinear' else jnp.maximum(squares, 0)


def apart(z: jax.Array, null: int) -> tuple[jax.Array, jax.Array]:
  """The coordinates under the metric, and the last ones beside it."""
  count = z.shape[-1] - null
  return z[..., :count], z[..., count:]


def row_dots(a: jax.Array, b: jax.Array) -> jax.Array:
  """Row by row a·b in float32: [..., N, 1]."""

  def dots(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a.astype(wide(a.dtype)) * b.astype(wide(b.dtype)), axis=-1, keepdims=True)

  return keeping_short(dots, a.dtype)(a, b)


def keeping_short(function: Callable, dtype: jnp.dtype) -> Callable:
  """A function that computes in float32, whose gradient keeps arguments of a short type as they are."""
  return jax.checkpoint(function) if is_short(dtype) else function


def products(a: jax.Array, b: jax.Array) -> jax.Array:
  """a bᵀ, accumulated in float32: [..., N, A]; its gradient, too, multiplies numbers of the inputs' type."""
  both_short = a.dtype == b.dtype and is_short(a.dtype)
  return _short_products(a, b) if both_short else _product(_PRODUCTS, a, b)


@jax.custom_vjp
def _short_products(a: jax.Array, b: jax.Array) -> jax.Array:
  return _product(_PRODUCTS, a, b)


def _short_products_backward(inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
  # JAX would multiply the float32 cotangent with the inputs, for which XLA makes float32 copies of them.
  _, pull = jax.vjp(functools.partial(jnp.einsum, _PRODUCTS), *inputs)
  return pull(cotangent.astype(inputs[0].dtype))


_short_products.defvjp(lambda a, b: (_product(_PRODUCTS, a, b), (a, b)), _short_products_backward)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum accumulated in float32.

  float32 inputs are multiplied at full precision: the difference of large terms would magnify the rounding of
  TF32 or bfloat16 passes, which are the default on accelerators.
  """
  sums = wide(a.dtype, b.dtype)
  return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=sums)


def metric_product(centres: jax.Array, metric: str, weights: jax.Array | None) -> jax.Array:
  """M t for every centre t, [..., A, D]; metric and weights as in `squared_distances`."""
  if metric == 'bilinear':
    assert weights is not None
    return products(centres, weights.astype(centres.dtype)).astype(centres.dtype)
  mapped = choose('metric', metric, METRICS)(centres, weights).astype(centres.dtype)
  transposed = weights if weights is None or metric == 'diagonal' else weights.mT
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
