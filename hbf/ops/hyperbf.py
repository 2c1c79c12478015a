"""The HyperBF operator: the one function that both stages of a block call."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose
from hbf.ops.distances import Distances, distances, keeping_short, products, squared_distances, wide
from hbf.ops.fast.attention import gaussian_attention, is_attention
from hbf.ops.fast.sums import Moments, Sums, blocks_in_memory, kernel_sums, unnormalized_sums
from hbf.ops.kernels import DIRECT, KERNELS, SIGNED
from hbf.ops.parts import join, split


def hyperbf(
  points: jax.Array,
  centers: jax.Array,
  coefficients: jax.Array,
  *,
  kernel: str,
  sigma: jax.Array | float | None = None,
  beta: jax.Array | float | None = None,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  normalization: str = 'sum',
  log_gain: jax.Array | float = 0.0,
  squared_radius: jax.Array | float = 0.0,
  dot_only_dims: int = 0,
  implementation: str = 'xla',
  mask: jax.Array | None = None,
  causal: bool = False,
) -> jax.Array:
  """Compute f(x) = Σ_a R_a(x) c_a with responses R_a = K(‖W(x − t_a)‖² / 2σ²), normalized over the centers or not.

  Stage 1 of a block is this function with centers = keys and coefficients = values (memo eq. 2 and 6); stage 2 is
  this function with learned centers and coefficients (eq. 4 and 7). It equals `hyperbf_plain`, in value and gradient,
  but takes the faster way: attention for the normalized Gaussian, else sums over the centers in the form asked for.

  Args:
    points: x [..., N, D], the tokens or queries.
    centers: t [..., A, D].
    coefficients: c [..., A, V].
    kernel: a name in `hbf.ops.kernels.KERNELS`, `SIGNED`, or with normalization 'none' a name in `DIRECT`.
    sigma: σ > 0, broadcastable to [..., 1, A]; every kernel but `SIGNED` needs it.
    beta: β of kernel `SIGNED`, of any sign, likewise broadcastable; it takes the place of the width.
    metric: with `weights`, as in `hbf.ops.distances.distances`.
    weights: the metric's parameters.
    normalization: 'none' (memo eq. 4), 'sum' (eq. 2, Nadaraya-Watson), 'rms' or 'layer' (see `normalize`).
    log_gain: logarithm of a factor on unnormalized responses, broadcastable to [..., 1, 1].
    squared_radius: b = ρ²/2σ² of a direct kernel φ(b − r²/2σ²), broadcastable to [..., 1, A]; others don't have it.
    dot_only_dims: how many of the last coordinates have a product and no norms, see `hbf.ops.distances.distances`.
    implementation: of the sums, 'xla' (of points, `hbf.ops.fast.sums`), 'pallas' (fused kernels,
      `hbf.ops.fast.pallas`) or 'plain' (`hyperbf_plain`). Use 'plain' for forward mode, `jax.jvp`, in float32: the
      other two have reverse mode only.
    mask: as in `hyperbf_plain`; whatever the form, other sums than attention's then are that.
    causal: whether centers 0 to i only exist for point i (of those that the mask leaves). Other sums than attention's
      then are blocks of `hyperbf_plain`, computed again for the gradient.

  Returns:
    [..., N, V] in the coefficients' type. If points, centers or coefficients are float64 (JAX has that type under
    `jax_enable_x64`), all is computed in float64, else in float32.

  Raises:
    UserError: the kernel, metric, normalization or form isn't known; a direct kernel is to be normalized; the scale
      of the kernel is missing (see `scale_of`); or form pallas has float64 arrays.
  """
  choose('kernel', kernel, KERNELS | DIRECT | {SIGNED: None})
  normal = choose('normalization', normalization, NORMALIZATIONS)
  of_centers = choose('implementation', implementation, IMPLEMENTATIONS)
  points, centers, coefficients = _widened(points, centers, coefficients)
  scale = scale_of(kernel, metric, sigma, beta, points.dtype)
  if implementation == 'pallas' and points.dtype == jnp.float64:
    raise UserError('form pallas computes in float32, and there are float64 arrays: use form blocks or plain')
  if kernel in DIRECT:
    assert sigma is not None
    # XLA keeps one array [N, A] for the gradient, as of an MLP's hidden units: there is nothing to gain by hand.
    radii: dict[str, Any] = {'sigma': sigma, 'squared_radius': squared_radius, 'dot_only_dims': dot_only_dims}
    shape: dict[str, Any] = {'metric': metric, 'weights': weights, 'normalization': normalization}
    responses = direct_responses(points, centers, kernel, **radii, **shape)
    seen = _seen(mask, causal, points.shape[-2], centers.shape[-2])
    responses = (responses if seen is None else jnp.where(seen, responses, 0)).astype(coefficients.dtype)
    return jnp.einsum('...na,...av->...nv', responses, coefficients)
  log_gain = jnp.asarray(log_gain, scale.dtype)
  if (kernel, normalization) == ('gaussian', 'sum') and is_attention(points, centers, coefficients, scale):
    shared: dict[str, Any] = {
      'metric': metric,
      'weights': weights,
      'dot_only_dims': dot_only_dims,
      'mask': mask,
      'causal': causal,
    }
    return gaussian_attention(points, centers, coefficients, scale=2 * scale, **shared)
  if causal or mask is not None or implementation == 'plain':
    how: dict[str, Any] = {'kernel': kernel, 'sigma': sigma, 'beta': beta, 'metric': metric, 'weights': weights}
    how |= {'normalization': normalization, 'log_gain': log_gain, 'dot_only_dims': dot_only_dims}
    if mask is None and not causal:
      return hyperbf_plain(points, centers, coefficients, **how)
    if mask is None:
      return _causal_sums(points, centers, coefficients, **how)
    seen = _seen(mask, causal, points.shape[-2], centers.shape[-2])
    return hyperbf_plain(points, centers, coefficients, **how, mask=seen)
  leading = jnp.broadcast_shapes(*(z.shape[:-2] for z in (points, centers, coefficients, scale, log_gain)))
  if math.prod(leading) == 1:
    # XLA's CPU backend is slower with leading axes of length 1.
    points, centers, coefficients, scale, log_gain = (
      z.reshape(z.shape[-2:]) for z in (points, centers, coefficients, scale, log_gain)
    )
    weights = _last_axes(weights, 1 if metric == 'diagonal' else 2)
  else:
    points, centers, coefficients = (
      jnp.broadcast_to(z, (*leading, *z.shape[-2:])) for z in (points, centers, coefficients)
    )
  scaled, log_kernel = distances(points, centers, metric, weights, scale, dot_only_dims), _log_kernel(kernel)
  if normalization == 'none' and of_centers.unnormalized:
    out = of_centers.unnormalized(scaled, coefficients, log_kernel, log_gain)
  else:
    sums = of_centers.sums(scaled, coefficients, log_kernel)
    out = _finish(sums, coefficients, normal, log_gain).astype(coefficients.dtype)
  return out.reshape(*leading, *out.shape[-2:])


def hyperbf_plain(
  points: jax.Array,
  centers: jax.Array,
  coefficients: jax.Array,
  *,
  kernel: str,
  sigma: jax.Array | float | None = None,
  beta: jax.Array | float | None = None,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  normalization: str = 'sum',
  log_gain: jax.Array | float = 0.0,
  dot_only_dims: int = 0,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Compute the operator as it is defined, with all responses in memory: the fast forms must equal it.

  Args and errors: as for `hyperbf`, log_gain broadcastable to [..., N, A], and
    mask: booleans broadcastable to [..., N, A]; a center that is masked out doesn't exist for that point. Every
      point needs at least one center.
  """
  points, centers, coefficients = _widened(points, centers, coefficients)
  scale: dict[str, Any] = {'sigma': sigma, 'beta': beta}
  log_k = log_responses(
    points, centers, kernel=kernel, **scale, metric=metric, weights=weights, dot_only_dims=dot_only_dims
  )
  responses = normalize(log_k, normalization, log_gain, mask)
  return jnp.einsum('...na,...av->...nv', responses.astype(coefficients.dtype), coefficients)


def _widened(points: jax.Array, centers: jax.Array, coefficients: jax.Array) -> tuple[jax.Array, ...]:
  """Return arrays of JAX's types; if any is float64, points and centers are."""
  points, centers, coefficients = (jnp.asarray(z) for z in (points, centers, coefficients))
  if jnp.float64 in (points.dtype, centers.dtype, coefficients.dtype):
    points, centers = points.astype(jnp.float64), centers.astype(jnp.float64)
  return points, centers, coefficients


def _seen(mask: jax.Array | None, causal: bool, points: int, centers: int) -> jax.Array | None:
  """Return one mask of what a mask and causality leave; None if all points see all centers."""
  if not causal:
    return mask
  triangle = jnp.asarray(np.tri(points, centers, dtype=bool))
  return triangle if mask is None else mask & triangle


def direct_responses(
  points: jax.Array,
  centers: jax.Array,
  kernel: str,
  sigma: jax.Array | float,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  normalization: str = 'none',
  squared_radius: jax.Array | float = 0.0,
  dot_only_dims: int = 0,
) -> jax.Array:
  """Return φ(b − r²/2σ²), float32 [..., N, A], of a kernel in `hbf.ops.kernels.DIRECT`. Arguments as in `hyperbf`.

  Raises:
    UserError: the responses are to be normalized.
  """
  kernel_of = choose('kernel', kernel, DIRECT)
  if normalization != 'none':
    raise UserError(
      f'kernel {kernel} can change sign or be 0, so its responses have no sum to divide by: '
      f'set normalization to none, not {normalization}'
    )
  return kernel_of(ball_depths(points, centers, sigma, metric, weights, squared_radius, dot_only_dims))


def ball_depths(
  points: jax.Array,
  centers: jax.Array,
  sigma: jax.Array | float,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  squared_radius: jax.Array | float = 0.0,
  dot_only_dims: int = 0,
) -> jax.Array:
  """Return b − r²/2σ², float32 [..., N, A]: how deep points lie in the balls of the centers. As in `hyperbf`."""
  terms = distances(points, centers, metric, weights, precision(sigma, points.dtype), dot_only_dims)
  # As a part of the centers' norms b costs no pass over [N, A].
  b = jnp.broadcast_to(jnp.asarray(squared_radius, terms.scale.dtype), (*centers.shape[:-2], 1, centers.shape[-2])).mT
  return -terms._replace(center_norms=terms.center_norms - b / terms.scale)()


def _causal_sums(points: jax.Array, centers: jax.Array, coefficients: jax.Array, **how: Any) -> jax.Array:
  """`hyperbf_plain` with centers 0 to i for point i, as many points at a time as `hbf.ops.fast.sums` takes."""
  length, count = points.shape[-2], centers.shape[-2]
  blocks = blocks_in_memory(points.shape, count)

  @jax.checkpoint
  def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
    some, rows = part
    return hyperbf_plain(some, centers, coefficients, **how, mask=jnp.arange(count) <= rows)

  rows = jnp.arange(length)[:, None]
  return join(jax.lax.map(block, (split(points, blocks), split(rows, blocks))), length)


def log_responses(
  points: jax.Array,
  centers: jax.Array,
  *,
  kernel: str,
  sigma: jax.Array | float | None = None,
  beta: jax.Array | float | None = None,
  metric: str = 'identity',
  weights: jax.Array | None = None,
  dot_only_dims: int = 0,
) -> jax.Array:
  """Compute log K(‖W(x − t_a)‖² / 2σ²), float32 [..., N, A]. Arguments and errors as in `hyperbf`."""
  log_kernel = choose('kernel', _log_kernel(kernel), KERNELS)
  scale = scale_of(kernel, metric, sigma, beta, points.dtype)
  return log_kernel(squared_distances(points, centers, metric, weights, scale, dot_only_dims))


def _log_kernel(kernel: str) -> str:
  """Return the name in `KERNELS` of log K as a function of scale · r²: exp(−β r²) is the Gaussian of β r²."""
  return 'gaussian' if kernel == SIGNED else kernel


def scale_of(
  kernel: str, metric: str, sigma: jax.Array | float | None, beta: jax.Array | float | None, dtype: jnp.dtype
) -> jax.Array:
  """Return the factor of r² that a kernel is a function of, for points of a type: 1/2σ², or β of kernel `SIGNED`.

  Raises:
    UserError: the kernel has a width and none above 0 is given, or it has β and none is given, or β comes without
      metric bilinear. Distances under the other metrics are clamped at 0, and β may be negative.
  """
  if kernel != SIGNED:
    if sigma is None or beta is not None:
      raise UserError(f'kernel {kernel} is stated by a width: expected width and no beta, or kernel {SIGNED}')
    if isinstance(sigma, int | float) and sigma <= 0:
      raise UserError(f'width is {sigma}: expected a number above 0. Kernel {SIGNED} takes a beta of any sign')
    return precision(sigma, dtype)
  if metric != 'bilinear':
    raise UserError(f'kernel {SIGNED} needs metric bilinear, not {metric}: change one of them')
  if beta is None or sigma is not None:
    raise UserError(f'kernel {SIGNED} has no width: expected beta and no width')
  return jnp.asarray(beta, wide(dtype))


def precision(sigma: jax.Array | float, dtype: jnp.dtype) -> jax.Array:
  """Return 1/2σ² of σ > 0, as precise as sums over points of a type are."""
  return 0.5 / jnp.square(jnp.asarray(sigma, wide(dtype)))


def normalize(
  log_k: jax.Array, normalization: str, log_gain: jax.Array | float = 0.0, mask: jax.Array | None = None
) -> jax.Array:
  """Responses [..., N, A] from their logarithms.

  Args:
    log_k: float32 [..., N, A].
    normalization: 'none' R = exp(log K + log-gain); 'sum' R = K / ΣK; 'rms' R = K / √mean(K²); 'layer' zero mean
      and unit variance over the centers, but for ε times the squared mean K.
    log_gain: used by 'none' only; the others don't change under a gain.
    mask: booleans broadcastable to [..., N, A]; responses of centers masked out are 0.
  """
  centered, factor = choose('normalization', normalization, NORMALIZATIONS)
  mask = jnp.broadcast_to(True if mask is None else mask, log_k.shape)
  log_k = jnp.where(mask, log_k, -jnp.inf)
  # Far from every center K underflows; relative to its largest value it doesn't.
  log_peak = jax.lax.stop_gradient(jnp.max(log_k, axis=-1, keepdims=True))
  k = jnp.exp(log_k - log_peak)
  count = jnp.sum(mask, axis=-1, keepdims=True)
  mean = jnp.sum(k, axis=-1, keepdims=True) / count
  deviations = jnp.where(mask, k - mean, 0)
  variance = jnp.sum(deviations * deviations, axis=-1, keepdims=True) / count
  return (deviations if centered else k) * factor(Moments(mean, variance, log_peak), count, log_gain)


class Normalization(NamedTuple):
  """Responses of k = K / max K, whose moments over the centers are known.

  Attributes:
    centered: R = (k − k̄) factor; else R = k factor.
    factor: of the moments, the number of centers and the log-gain, [..., N, 1].
  """

  centered: bool
  factor: Callable[[Moments, jax.Array | int, jax.Array | float], jax.Array]


_EPSILON = 1e-6  # of the squared mean response: keeps the gradient finite where all responses are equal

NORMALIZATIONS = {
  'none': Normalization(False, lambda k, count, log_gain: jnp.exp(k.log_peak + log_gain)),
  'sum': Normalization(False, lambda k, count, log_gain: 1 / (count * k.mean)),
  'rms': Normalization(False, lambda k, count, log_gain: jax.lax.rsqrt(k.variance + k.mean**2)),
  'layer': Normalization(True, lambda k, count, log_gain: jax.lax.rsqrt(k.variance + _EPSILON * k.mean**2)),
}


def _finish(sums: Sums, coefficients: jax.Array, normalization: Normalization, log_gain: jax.Array) -> jax.Array:
  """Σ_a R_a c_a from the sums, float32 [..., N, V]."""
  values, moments = sums
  if not normalization.centered:
    # A product, not a broadcast: its gradient sums over the points, which XLA's CPU backend does best as a product.
    values += products(moments.mean, coefficients.sum(axis=-2, keepdims=True, dtype=wide(coefficients.dtype)).mT)
  factor = normalization.factor(moments, coefficients.shape[-2], log_gain)
  dtype = coefficients.dtype
  return keeping_short(lambda z: z.astype(wide(dtype)) * factor, dtype)(values.astype(dtype))


def _pallas_sums(terms: Distances, coefficients: jax.Array, kernel: str) -> Sums:
  # Pallas is young and its modules move between versions of JAX: only who asks for it depends on them.
  from hbf.ops.fast.pallas import pallas_sums

  return pallas_sums(terms, coefficients, kernel)


class Implementation(NamedTuple):
  """A way to sum over the centers.

  Attributes:
    sums: as `hbf.ops.fast.sums.kernel_sums`; every normalization follows from them.
    unnormalized: as `hbf.ops.fast.sums.unnormalized_sums`, if there is a shorter way without normalization.
  """

  sums: Callable[..., Sums]
  unnormalized: Callable[..., jax.Array] | None = None


IMPLEMENTATIONS = {
  'xla': Implementation(kernel_sums, unnormalized_sums),
  'pallas': Implementation(_pallas_sums),
  'plain': Implementation(kernel_sums),
}


def _last_axes(z: jax.Array | None, count: int) -> Any:
  return None if z is None else z.reshape(z.shape[-count:])
