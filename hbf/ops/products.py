"""Matrix products and dot products with sums in float32, for inputs of any type.

By default, accelerators round the factors of a float32 product to 10 bits (TF32, NVIDIA) or 7 bits (bfloat16, TPU).
That is precise enough for most products (`einsum`). But a distance is a difference of large terms, which would
magnify the errors. So `products` has the precision of float32. In its derivatives, at most the factor that is a
derivative is rounded (`derivative_einsum`).

In this module, "float32" means float64 if an input is float64 (`sum_dtype`).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.row_major import row_major

_PRODUCTS = '...nd,...ad->...na'
_SPLIT_FROM = 512  # points and centers. By data sheets, from about 300 on an H200 and 400 on an H100
_AMPERE = 8  # compute capability of the first NVIDIA GPUs with TF32, and on which cuDNN fuses attention
_TF32 = jax.lax.Precision.HIGH  # what it means on NVIDIA, whatever the default precision is


def sum_dtype(*dtypes: Any) -> jnp.dtype:
  """Return the type for sums of numbers of the given types: float64 if one type is float64, else float32."""
  return jnp.result_type(*dtypes, jnp.float32)


def is_short(dtype: jnp.dtype) -> bool:
  """Return True for a short type, such as bfloat16, whose numbers are summed in float32 (`sum_dtype`)."""
  return dtype != sum_dtype(dtype)


@jax.custom_jvp
def products(a: Float[Array, '... N D'], b: Float[Array, '... A D']) -> Float[Array, '... N A']:
  """Compute the products a bᵀ [..., N, A] with sums in float32, at full precision.

  If a and b have the same short type, such as bfloat16, the gradient also multiplies matrices of this type.
  """
  return _in_parts_on_gpus(by_three_products, _PRODUCTS, a, b, a.shape[-2], b.shape[-2])


@products.defjvp
def _products_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (a, b), (of_a, of_b) = primals, tangents
  if a.dtype == b.dtype and is_short(a.dtype):
    # The tangent is computed in the short type, and so is its transpose. JAX would multiply the float32 cotangent
    # with the inputs, and XLA would make float32 copies of the inputs for it.
    tangent = jnp.einsum(_PRODUCTS, of_a, b) + jnp.einsum(_PRODUCTS, a, of_b)
    return products(a, b), tangent.astype(sum_dtype(a.dtype))
  return products(a, b), tangent_products(of_a, b, exact=1) + tangent_products(a, of_b, exact=0)


def tangent_products(
  a: Float[Array, '... N D'], b: Float[Array, '... A D'], *, exact: Literal[0, 1]
) -> Float[Array, '... N A']:
  """Compute a bᵀ [..., N, A] as `derivative_einsum` does, where the derivative is a tangent of products a bᵀ."""

  def in_two_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    left, right = (_parts(z) if i == exact else jnp.concatenate([z, z], axis=-1) for i, z in enumerate((a, b)))
    return jnp.einsum(_PRODUCTS, left, right, precision=_TF32)

  return _in_parts_on_gpus(in_two_parts, _PRODUCTS, a, b, a.shape[-2], b.shape[-2])


def derivative_einsum(spec: str, a: jax.Array, b: jax.Array, *, exact: Literal[0, 1]) -> jax.Array:
  """Compute an einsum of a derivative and another array, with sums in float32.

  A rounded derivative has a small relative error. If the other array were rounded too, terms that should cancel
  would not. So on an NVIDIA GPU only the derivative is rounded to 10 bits (TF32). Elsewhere, nothing is rounded.

  Args:
    spec: the specification of the einsum. The last axis of the exact array is also an axis of the result: the last
      one if b is exact, and the one before if a is exact.
    a: the first array.
    b: the second array.
    exact: 0 if a is exact, 1 if b is exact. The other array is the derivative.
  """

  def in_two_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    pair = (a, _parts(b)) if exact else (_parts(a), b)
    first, rest = jnp.split(jnp.einsum(spec, *pair, precision=_TF32), 2, axis=-1 if exact else -2)
    return first + rest

  return _in_parts_on_gpus(in_two_parts, spec, a, b, *(a if exact else b).shape[-2:])


def by_three_products(a: Float[Array, '... N D'], b: Float[Array, '... A D']) -> Float[Array, '... N A']:
  """Compute the products a bᵀ of float32 matrices on an NVIDIA GPU, nearly at the precision of float32.

  Tensor cores multiply numbers of 10 bits (TF32), 7 to 15 times as fast as other units multiply float32. So a is
  split into a number of 10 bits and a rest, and so is b. Of the four products of these parts, the one of both rests
  is too small to matter. The other three are added in one product with three times as many columns. Otherwise three
  arrays [N, A] would be written and added. CUTLASS calls such products 3xTF32.
  """
  (a, of_a), (b, of_b) = _first_bits(a), _first_bits(b)
  left, right = jnp.concatenate([a, a, of_a], axis=-1), jnp.concatenate([b, of_b, b], axis=-1)
  return jnp.einsum(_PRODUCTS, left, right, precision=_TF32)


def einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Compute an einsum of two arrays with sums in float32.

  The precision of the factors is the default one, `jax.default_matmul_precision`.
  """
  return jnp.einsum(spec, a, b, preferred_element_type=sum_dtype(a.dtype, b.dtype))


def sum_over_points(
  a: Float[Array, '... N A'], b: Float[Array, '... N K'], exact: bool = False
) -> Float[Array, '... A K']:
  """Compute the products aᵀ b [..., A, K] with sums in float32.

  The precision is the default one, or that of `derivative_einsum` if b must be exact and a is a derivative.
  """
  if a.shape[-1] <= b.shape[-1]:
    spec = '...na,...nk->...ak'
    return derivative_einsum(spec, a, b, exact=1) if exact else einsum(spec, a, b)
  # On a CPU, bᵀ a is up to twice as fast as aᵀ b if b has fewer columns than a.
  spec = '...nk,...na->...ka'
  return row_major(derivative_einsum(spec, b, a, exact=0) if exact else einsum(spec, b, a)).mT


def row_dots(a: Float[Array, '... N D'], b: Float[Array, '... N D']) -> Float[Array, '... N 1']:
  """Compute the dot products [..., N, 1] of each row of a with the same row of b, in float32."""

  def dots(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a.astype(sum_dtype(a.dtype)) * b.astype(sum_dtype(b.dtype)), axis=-1, keepdims=True)

  return keep_short(dots, a.dtype)(a, b)


def keep_short(function: Callable, dtype: jnp.dtype) -> Callable:
  """Wrap a function so that it keeps its arguments in memory for the gradient, not float32 copies of them.

  Args:
    function: a function that converts arguments of a short type, such as bfloat16, to float32.
    dtype: type of the arguments. If it is not short, the function is returned unchanged.
  """
  return jax.checkpoint(function) if is_short(dtype) else function


def before_ampere() -> bool:
  """Return True if an NVIDIA GPU of this process is older than Ampere: it has no TF32, and no fused attention."""
  # AMD's GPUs have names instead of numbers, such as gfx90a.
  names = [getattr(device, 'compute_capability', '') for device in jax.local_devices()]
  return any(float(name) < _AMPERE for name in names if name.replace('.', '', 1).isdigit())


def _in_parts_on_gpus(
  in_parts: Callable[[jax.Array, jax.Array], jax.Array],
  spec: str,
  a: jax.Array,
  b: jax.Array,
  points: int,
  centers: int,
) -> jax.Array:
  """Compute an einsum by `in_parts` on an NVIDIA GPU with TF32, and elsewhere at full precision.

  The parts are written to memory, which pays off only for float32 arrays with many points and centers.
  """

  def full_precision(a: jax.Array, b: jax.Array) -> jax.Array:
    sums = sum_dtype(a.dtype, b.dtype)
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=sums)

  many = all(jax.export.is_symbolic_dim(n) or n >= _SPLIT_FROM for n in (points, centers))
  if jnp.result_type(a, b) != jnp.float32 or not many or before_ampere():
    return full_precision(a, b)
  return jax.lax.platform_dependent(a, b, cuda=in_parts, default=full_precision)


def _parts(z: jax.Array) -> jax.Array:
  """Return both arrays of `_first_bits`, joined along their last axis."""
  return jnp.concatenate(_first_bits(z), axis=-1)


def _first_bits(z: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return z as a number of 10 bits (TF32) and a rest, both float32."""
  z = z.astype(jnp.float32)
  rounded = jax.lax.reduce_precision(z, exponent_bits=8, mantissa_bits=10)
  return rounded, z - rounded
