"""The function `hbf.hyperbf`: the operator of `hbf.ops.hyperbf` for users, with checks of all arguments."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hbf.errors import UserError, choose
from hbf.ops import hyperbf as operator
from hbf.ops import kernels, normalization
from hbf.ops.basis import RadialBasis
from hbf.ops.fast.choice import IMPLEMENTATIONS
from hbf.ops.products import sum_dtype

KERNELS = (*kernels.KERNELS, *kernels.VALUES)
BALL_KERNELS = tuple(kernels.BALLS)
NORMALIZATIONS = tuple(normalization.NORMALIZATIONS)


def hyperbf(
  x: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  *,
  kernel: str = 'gaussian',
  sigma: Float[Array, '...'] | float = 1.0,
  metric: Float[Array, '... D'] | None = None,
  normalization: str = 'sum',
  radius: Float[Array, '...'] | float = 0.0,
  mask: Bool[Array, '... #N #A'] | None = None,
  causal: bool = False,
  implementation: str = 'xla',
) -> Float[Array, '... N V']:
  """Evaluate a HyperBF (hyper basis function network): f(x) = Σ_a R_a(x) c_a.

  K_a = K(s_a) is the kernel of the scaled squared distance s_a = ‖W(x − t_a)‖² / 2σ_a² from the point x to the center
  t_a. The responses R_a are the kernel's values, normalized over the centers a = 1 … A:

      'none'    R_a = K_a
      'sum'     R_a = K_a / Σ K                    Nadaraya-Watson regression
      'rms'     R_a = K_a / √mean(K²)
      'layer'   R_a = (K_a − mean K) / √(var K + 10⁻⁶ mean(K)²)

  The kernels are:

      'gaussian'               exp(−s)
      'laplacian'              exp(−√(2s))
      'rational_quadratic'     1 / (1 + s)
      'inverse_multiquadric'   1 / √(1 + 2s)
      'multiquadric'           √(1 + 2s), which grows, for normalization 'none' only
      'thin_plate'             s log s, which changes sign and grows, for normalization 'none' only
      'wendland'               (1 − u)₊⁴ (1 + 4u) with u = √(s/10), for normalization 'none' only; 0 for s ≥ 10
      'ball_…'                 φ((ρ² − r²) / 2σ²) with r² = 2σ²s, for normalization 'none' only; φ is relu, relu2 (the
                               square of relu), gelu, silu, softplus or sigmoid

  In terms of attention, the centers are keys and the coefficients are values. Kernel 'gaussian' with normalization
  'sum' is softmax attention with the logits −s. The function is pure: it works under jit, grad and vmap.

  Args:
    x: the points, floats [..., N, D].
    centers: t, floats [..., A, D]. Leading axes of all arrays broadcast.
    coefficients: c, floats [..., A, V].
    kernel: a name in `hbf.KERNELS` or `hbf.BALL_KERNELS`.
    sigma: σ > 0. A number, an array [A] with a number for each center, or an array that broadcasts to [..., 1, A].
    metric: W. None for the identity, [D] for a diagonal matrix, or [..., R, D] for a matrix of any number R of rows.
    normalization: a name in `hbf.NORMALIZATIONS`.
    radius: ρ ≥ 0 of a ball kernel, in one of the shapes that sigma may have. Other kernels have no radius.
    mask: booleans that broadcast to [..., N, A], True where a point sees a center. Other centers are left out of all
      sums for this point, those of the normalization included. None: all points see all centers. For a point that
      sees no center, f(x) is 0, or any finite numbers if the kernel is 'gaussian', the normalization 'sum' and sigma
      the same for all centers. Its gradients are finite too.
    causal: True if point i sees centers 0 to i only.
    implementation: 'xla', 'pallas' (fused kernels for a TPU) or 'plain' (the definition, with all responses in
      memory). All give the same values and gradients. Forward mode (`jax.jvp`) needs 'plain'. 'pallas' computes as
      'xla' does with a mask, with causal=True, for the kernels of normalization 'none' only, and for the Gaussian
      that is computed as attention (normalization 'sum', one sigma).

  Returns:
    f(x) of every point, [..., N, V], in the type of the coefficients. Sums are computed in float32, or in float64 if
    x, centers or coefficients are float64. The sum over no centers (A = 0, normalization 'none') is 0.

  Raises:
    ValueError: an argument has a wrong shape, type or name. The message names the argument and says what was
      expected.
  """
  x, centers, coefficients = _floats('x', x), _floats('centers', centers), _floats('coefficients', coefficients)
  choose('kernel', kernel, dict.fromkeys((*KERNELS, *BALL_KERNELS)))
  choose('normalization', normalization, dict.fromkeys(NORMALIZATIONS))
  choose('implementation', implementation, IMPLEMENTATIONS)
  points, dimensions, count = x.shape[-2], x.shape[-1], centers.shape[-2]
  if centers.shape[-1] != dimensions:
    raise _mismatch('centers', centers, f'[..., A, {dimensions}], as x has shape {_text(x.shape)}')
  if coefficients.shape[-2] != count:
    raise _mismatch('coefficients', coefficients, f'[..., {count}, V], as centers has shape {_text(centers.shape)}')
  leading = _leading(x=x, centers=centers, coefficients=coefficients)
  shape, computed = (*leading, 1, count), sum_dtype(x.dtype, centers.dtype, coefficients.dtype)
  if not count and normalization != 'none':
    raise UserError(f'centers has shape {_text(centers.shape)}: expected a center or more, to normalize over them')
  sigma = _per_center('sigma', sigma, shape, computed)
  name, weights = _metric(metric, leading, dimensions)
  squared_radius: jax.Array | float = 0.0
  if kernel in BALL_KERNELS:
    squared_radius = _per_center('radius', radius, shape, computed) ** 2 / (2 * sigma**2)
  elif not (isinstance(radius, numbers.Real) and radius == 0):
    raise UserError(f'radius is for ball kernels, and kernel is {kernel!r}: leave radius out')
  if mask is not None:
    mask = _array('mask', mask)
    if mask.dtype != bool:
      raise UserError(f'mask has type {mask.dtype}: expected booleans, True where a point sees a center')
    _check_broadcasts('mask', mask, (*leading, points, count))
  if not count:
    return jnp.zeros((*leading, points, coefficients.shape[-1]), coefficients.dtype)  # an empty sum
  # For the operator, a sigma and a radius have no leading axes that the centers lack.
  own = jnp.broadcast_shapes(centers.shape[:-2], sigma.shape[:-2], jnp.shape(squared_radius)[:-2])
  centers = jnp.broadcast_to(centers, (*own, count, dimensions))
  dtype = jnp.promote_types(x.dtype, centers.dtype)
  basis = RadialBasis(
    kernel, sigma, metric=name, weights=weights, normalization=normalization, squared_radius=squared_radius
  )
  return operator.hyperbf(
    x.astype(dtype),
    centers.astype(dtype),
    coefficients,
    basis,
    mask=mask,
    causal=causal,
    implementation=implementation,
  )


def _floats(name: str, value: Any) -> jax.Array:
  """Return the argument `name` as an array. Raise UserError unless it holds floats and has two axes or more."""
  array = _array(name, value)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise UserError(f'{name} has type {array.dtype}: expected floats, such as {name}.astype(float)')
  if array.ndim < 2:
    expected = {'x': 'N, D', 'centers': 'A, D', 'coefficients': 'A, V'}[name]
    raise _mismatch(name, array, f'[..., {expected}]')
  return array


def _array(name: str, value: Any, dtype: jnp.dtype | None = None) -> jax.Array:
  """Return the argument `name` as an array. Raise UserError if JAX has no array of such a value."""
  try:
    return jnp.asarray(value, dtype)
  except (TypeError, ValueError):
    raise UserError(f'{name} has type {type(value).__name__}: expected an array') from None


def _leading(**arrays: jax.Array) -> tuple[int, ...]:
  """Return the shape to which the leading axes of the arrays broadcast. These are all axes but the last two."""
  try:
    return jnp.broadcast_shapes(*(array.shape[:-2] for array in arrays.values()))
  except ValueError:
    shapes = ', '.join(f'{name} {_text(array.shape)}' for name, array in arrays.items())
    raise UserError(f'the leading axes of {shapes} do not broadcast: expected the same ones, or 1') from None


def _per_center(name: str, value: Any, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Check the argument `name`, which is sigma or radius. Return an array that broadcasts to `shape` [..., 1, A]."""
  listed = isinstance(value, list | tuple) and all(isinstance(z, numbers.Real) for z in value)
  if listed or isinstance(value, numbers.Real | np.ndarray):  # reading an array of JAX would wait for the device
    numbers_in = np.asarray(value)
    holds, expected = (numbers_in > 0, 'above 0') if name == 'sigma' else (numbers_in >= 0, 'of 0 or more')
    if not np.all(holds & np.isfinite(numbers_in)):
      raise UserError(f'{name} is {value!r}: expected a number {expected}, for all centers or for each')
  array = _array(name, value, dtype)
  _check_broadcasts(name, array, shape)
  return array[None] if array.ndim == 1 else array


def _metric(metric: Any, leading: tuple[int, ...], dimensions: int) -> tuple[str, jax.Array | None]:
  """Check the argument `metric`. Return the name and the weights of the metric, as `RadialBasis` takes them.

  `leading` is the shape to which the leading axes of x, centers and coefficients broadcast. `dimensions` is D.
  """
  if metric is None:
    return 'identity', None
  array = _array('metric', metric)
  if not jnp.issubdtype(array.dtype, jnp.floating) or not array.ndim or array.shape[-1] != dimensions:
    raise _mismatch('metric', array, f'None, or floats [{dimensions}] or [..., R, {dimensions}] that multiply x − t')
  if array.ndim == 1:
    return 'diagonal', array
  _check_broadcasts('metric', array, (*leading, *array.shape[-2:]))
  return 'full', array


def _check_broadcasts(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
  fits = array.ndim <= len(shape) and all(
    size in (1, wanted) for size, wanted in zip(array.shape[::-1], shape[::-1], strict=False)
  )
  if not fits:
    raise _mismatch(name, array, f'one that broadcasts to {_text(shape)}')


def _mismatch(name: str, array: jax.Array, expected: str) -> UserError:
  return UserError(f'{name} has shape {_text(array.shape)} and type {array.dtype}: expected {expected}')


def _text(shape: tuple[int, ...]) -> str:
  return f'[{", ".join(map(str, shape))}]'
