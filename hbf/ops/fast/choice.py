"""The choice of the implementation of the HyperBF operator. It is made in this module only."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hbf.errors import UserError, choose
from hbf.ops.basis import RadialBasis
from hbf.ops.distances import Distances
from hbf.ops.fast.attention import gaussian_attention, is_attention
from hbf.ops.fast.blocked import Summation, causal_blocks, hyperbf_from_sums, partial_from_sums
from hbf.ops.fast.sums import Sums, kernel_sums, unnormalized_sums
from hbf.ops.kernels import DIRECT
from hbf.ops.union import PartialSum


def _pallas_sums(terms: Distances, coefficients: jax.Array, kernel: str) -> Sums:
  # Pallas is imported only if it is used, because its modules move between versions of JAX.
  from hbf.ops.fast.pallas import pallas_sums

  return pallas_sums(terms, coefficients, kernel)


PALLAS_PLATFORMS = ('tpu', 'cpu')  # a CPU interprets the Pallas kernels, for tests
# None stands for the definition, `hbf.ops.hyperbf.hyperbf_plain`.
IMPLEMENTATIONS: dict[str, Summation | None] = {
  'xla': Summation(kernel_sums, unnormalized_sums),
  'pallas': Summation(_pallas_sums),
  'plain': None,
}


def fastest(
  definition: Callable[..., jax.Array],
  points: Float[Array, '... N D'],
  centers: Float[Array, '... A D'],
  coefficients: Float[Array, '... A V'],
  basis: RadialBasis,
  mask: Bool[Array, '... #N #A'] | None,
  causal: bool,
  implementation: str,
  factors: Float[Array, '... #N #A'] | None = None,
) -> Callable[..., jax.Array]:
  """Return the fastest function that computes the operator for these arguments.

  Args:
    definition: the function `hbf.ops.hyperbf.hyperbf_plain`. It is used if no faster function supports the arguments.
    points: x [..., N, D].
    centers: t [..., A, D].
    coefficients: c [..., A, V].
    basis: kernel, sigma, metric and normalization.
    mask: booleans broadcastable to [..., N, A], or None.
    causal: True if point i sees centers 0 to i only.
    implementation: a name in `IMPLEMENTATIONS`. 'xla' and 'pallas' differ only if the operator can be computed from
      sums over the centers (`hbf.ops.fast.blocked.hyperbf_from_sums`). 'plain' gives the definition, in blocks of
      points if it is causal.
    factors: numbers that multiply the responses, broadcastable to [..., N, A], or None.

  Returns:
    A function of (points, centers, coefficients, basis, mask, causal). It returns f(x), like the definition.

  Raises:
    UserError: the implementation is unknown, sigma or beta is missing, or 'pallas' is chosen for float64 arrays or
      for a GPU.
  """
  summation = choose('implementation', implementation, IMPLEMENTATIONS)
  scale: Any = basis.scale(points.dtype)
  if factors is not None:  # XLA keeps two arrays [N, A] for the gradient, as for a gated MLP
    return functools.partial(definition, factors=factors)
  if implementation == 'pallas':
    _check_pallas(points.dtype)
  if basis.kernel in DIRECT:
    return definition  # XLA keeps one array [N, A] for the gradient, as for an MLP's hidden units
  gaussian = (basis.kernel, basis.normalization) == ('gaussian', 'sum')
  if gaussian and summation is not None and is_attention(points, centers, coefficients, scale):
    return gaussian_attention
  if causal and mask is None:
    return functools.partial(causal_blocks, definition)
  if causal or mask is not None or summation is None:
    return definition
  return functools.partial(hyperbf_from_sums, summation)


def fastest_partial(
  definition: Callable[..., PartialSum], mask: Bool[Array, '... #N #A'] | None, causal: bool
) -> Callable[..., PartialSum]:
  """Return the fastest function that computes a `PartialSum`.

  Args:
    definition: the function `hbf.ops.hyperbf.partial_plain`. It is used if some points do not see all centers.
    mask: booleans broadcastable to [..., N, A], or None.
    causal: True if point i sees centers 0 to i only.

  Returns:
    A function of (points, centers, coefficients, basis, mask, causal), like the definition.
  """
  # The Gaussian is not computed as attention here, which would keep more arrays [N, A] for the gradient.
  if causal or mask is not None:
    return definition
  return partial_from_sums


def _check_pallas(dtype: jnp.dtype) -> None:
  """Raise UserError if the Pallas kernels do not support points of this type, or the platform of the program."""
  if dtype == jnp.float64:
    raise UserError('implementation pallas computes in float32, and there are float64 arrays: use xla or plain')
  # The devices of a mesh may be absent (`hbf compile`), and then differ from those of this process.
  device = jax.sharding.get_abstract_mesh().abstract_device
  check_pallas_platform(device.platform if device else jax.default_backend())


def check_pallas_platform(platform: str) -> None:
  """Raise UserError if devices of this platform, such as 'gpu', cannot run the Pallas kernels."""
  if platform not in PALLAS_PLATFORMS:
    raise UserError(f'implementation pallas is for TPUs, and the platform is {platform}: use implementation xla')
