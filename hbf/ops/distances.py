"""Squared distances under a learned metric: r²(x, t) = ‖W(x − t)‖² = (x − t)ᵀ M (x − t), M = WᵀW.

In this module, "float32" means float64 if the points are float64 (`hbf.ops.products.sum_dtype`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.errors import choose
from hbf.ops.products import derivative_einsum, einsum, is_short, products, row_dots, sum_dtype, sum_over_points

_ROUNDING = 1e-3  # scaled squared distances from minus this number to 0 count as rounding errors


class Distances(NamedTuple):
  """The parts of scaled squared distances: scale (norms + center_norms − 2 points·centers).

  The product points·centers is xᵀMt. No array of size [N, A] is stored. Here D is the number of dimensions of Wx.
  Dot-only dimensions are additional columns of `points` and `centers`.

  Attributes:
    points: Wx for every point x, [..., N, D]. With metric bilinear: xᵀM.
    norms: xᵀMx, float32 [..., N, 1].
    centers: Wt for every center t, [..., A, D], in the type of the points. With metric bilinear: t.
    center_norms: tᵀMt, float32 [..., A, 1].
    scale: a factor for each center, float32 [..., A, 1].
  """

  points: jax.Array
  norms: jax.Array
  centers: jax.Array
  center_norms: jax.Array
  scale: jax.Array

  def __call__(self) -> Float[Array, '... N A']:
    """Compute the distances, float32 [..., N, A]. They are not clamped: rounding may take them slightly below 0."""
    if is_short(self.points.dtype):
      squares = self.norms + self.center_norms.mT - 2 * products(self.points, self.centers)
      return self.scale.mT * squares
    # A single product of [x, ‖x‖², 1] and scale [−2t, 1, ‖t‖²] adds the norms too. This saves passes over an array
    # [N, A].
    left = jnp.concatenate([self.points, self.norms, jnp.ones_like(self.norms)], axis=-1)
    right = jnp.concatenate([-2 * self.centers, jnp.ones_like(self.center_norms), self.center_norms], axis=-1)
    return products(left, self.scale * right)

  def gradient(self, cotangent: Float[Array, '... N A']) -> 'Distances':
    """Compute the cotangents of all five fields, float32, from the cotangent [..., N, A] of the distances."""
    if not is_short(self.points.dtype):
      # The sums over the points, which `center_norms` and `scale` need, are columns of the matrix product. Separate
      # sums would cost more.
      g = cotangent
      along_points = jnp.concatenate([self.points, self.norms, jnp.ones_like(self.norms)], axis=-1)
      sums = sum_over_points(g, along_points, exact=True)
      by_point, by_norm, by_one = sums[..., :-2], sums[..., -2:-1], sums[..., -1:]
      of_norms = derivative_einsum('...na,...ak->...nk', g, self.scale, exact=1)
    else:  # norms are too large for a short type. Without the barrier XLA would keep g in float32 too.
      g = jax.lax.optimization_barrier(cotangent.astype(self.points.dtype))
      by_point = einsum('...na,...nd->...ad', g, self.points)
      by_norm = jnp.sum(g * self.norms, axis=-2)[..., None]
      by_one = jnp.sum(g, axis=-2, dtype=jnp.float32)[..., None]
      of_norms = jnp.sum(g * self.scale.mT, axis=-1, keepdims=True)
    scaled_centers = (self.scale * self.centers).astype(g.dtype)
    return Distances(
      points=-2 * derivative_einsum('...na,...ad->...nd', g, scaled_centers, exact=1),
      norms=of_norms,
      centers=-2 * self.scale * by_point,
      center_norms=self.scale * by_one,
      scale=by_norm + self.center_norms * by_one - 2 * row_dots(self.centers, by_point),
    )


def distances(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  metric: str = 'identity',
  weights: Float[Array, '...'] | None = None,
  scale: Float[Array, '...'] | float = 1.0,
  dot_only_dims: int = 0,
) -> Distances:
  """Return the parts of the squared distances r² between all points and all centers, times a factor for each center.

  Args:
    points: [..., N, D].
    centers: [..., A, D], in the type of the points.
    metric: 'identity' (W = I), 'diagonal', 'low_rank', 'full', or 'bilinear'.
    weights: None for identity, [..., D] for diagonal, W [..., R, D] for low_rank and full, with any number R of rows,
      and M [..., D, D] for bilinear.
    scale: the factor of each center, broadcastable to [..., 1, A]. It is positive unless the metric is bilinear.
    dot_only_dims: number of last coordinates that the metric ignores. These coordinates are called x' for a point and
      t' for a center. They add −2 x'·t' to r², without the norms ‖x'‖² and ‖t'‖². `hbf.nn.relative_positions` chooses
      x' and t' so that −2 x'·t' is itself a squared distance.

  Raises:
    UserError: the metric is unknown.
  """
  if dot_only_dims:
    (points, x), (centers, t) = split_dot_only(points, dot_only_dims), split_dot_only(centers, dot_only_dims)
    others = distances(points, centers, metric, weights, scale)
    left, right = (jnp.concatenate(z, axis=-1) for z in ((others.points, x), (others.centers, t)))
    return others._replace(points=left, centers=right)
  scale = jnp.atleast_2d(jnp.asarray(scale, sum_dtype(points.dtype))).mT
  scale = jnp.broadcast_to(scale, (*centers.shape[:-1], 1))
  if metric == 'bilinear':
    assert weights is not None
    mapped, mapped_centers = (products(z, weights.mT.astype(z.dtype)).astype(z.dtype) for z in (points, centers))
    return Distances(mapped, row_dots(points, mapped), centers, row_dots(centers, mapped_centers), scale)
  apply = choose('metric', metric, METRICS)
  # Rounding the mapped points to the input type once, before the norms, keeps the three terms consistent.
  a, b = (apply(z, weights).astype(points.dtype) for z in (points, centers))
  return Distances(a, row_dots(a, a), b, row_dots(b, b), scale)


def squared_distances(
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  metric: str = 'identity',
  weights: Float[Array, '...'] | None = None,
  scale: Float[Array, '...'] | float = 1.0,
  dot_only_dims: int = 0,
) -> Float[Array, '... N A']:
  """Compute squared distances of all points to all centers, each times the center's `scale` (CBMM Memo 143, eq. 4).

  With a = Wx and b = Wt, a squared distance is ‖a‖² + ‖b‖² − 2 a·b. Norms and sums are float32 for every input type.
  So the error is the rounding error of ‖a‖² + ‖b‖² in float32, not in the input type.

  Args and errors: as for `distances`.

  Returns:
    The squared distances, float32 [..., N, A], 0 or more. With metric bilinear they are xᵀMx + tᵀMt − 2xᵀMt, as in
    the authors' code. This is a squared distance only if M is symmetric and positive semidefinite. Otherwise it may
    be negative.
  """
  squares = distances(points, centers, metric, weights, scale, dot_only_dims)()
  return squares if metric == 'bilinear' else not_negative(squares)


@jax.custom_jvp
def not_negative(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute max(s, 0). The derivative is 1 at s = 0, and also where rounding took a distance s slightly below 0."""
  return jnp.maximum(s, 0)


# At a tie JAX's derivative of a maximum is ½. A distance of 0 has first derivatives of 0, so this error would show
# only in second derivatives.
not_negative.defjvps(lambda tangent, _, s: jnp.where(s < -_ROUNDING, 0, tangent))


def split_dot_only(z: jax.Array, dot_only_dims: int) -> tuple[jax.Array, jax.Array]:
  """Split coordinates in two: those to which the metric applies, and the last `dot_only_dims`, which it ignores."""
  # The gradient of `split` is a concatenation, and that of slices would be a sum of padded arrays.
  first, last = jnp.split(z, [z.shape[-1] - dot_only_dims], axis=-1)
  return first, last


def metric_product(
  centers: Float[Array, '... A D'], metric: str, weights: Float[Array, '...'] | None
) -> Float[Array, '... A D']:
  """Compute M t [..., A, D] for all centers t. The metric and the weights are as in `squared_distances`."""
  if metric == 'bilinear':
    assert weights is not None
    return products(centers, weights.astype(centers.dtype)).astype(centers.dtype)
  mapped = choose('metric', metric, METRICS)(centers, weights).astype(centers.dtype)
  transposed = weights if weights is None or metric == 'diagonal' else weights.mT
  return METRICS[metric](mapped, transposed).astype(centers.dtype)


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
