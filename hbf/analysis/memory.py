"""Associative memory: stage 1 with stored patterns as keys and values.

Stage 1 with patterns x_i as keys and values, and with a point x as query, is one update of a continuous Hopfield
network (Ramsauer et al. 2021, "Hopfield networks is all you need"). It is also one step of mean shift (Comaniciu &
Meer 2002):

    x ← Σ_i K(s_i) x_i / Σ_i K(s_i),      s_i = ‖W(x − x_i)‖² / 2σ².

Let g be a function with −g' = K. Every kernel of stage 1 falls with the distance, so g is convex. So the update never
raises the energy

    E(x) = −Σ_i g(s_i).

The patterns are the rows of a matrix. To store a pattern, add a row. To forget a pattern, remove its row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.ops.basis import RadialBasis
from hbf.ops.distances import squared_distances
from hbf.ops.hyperbf import hyperbf


def _root(s: jax.Array) -> jax.Array:
  """Return √(2s) with a subgradient of 0 at s = 0."""
  away = s > 0
  return jnp.where(away, jnp.sqrt(jnp.where(away, 2 * s, 1.0)), 0.0)


# The energy −Σ g(s) by kernel, or an increasing function of it. A logarithm keeps far patterns from rounding to 0.
ENERGIES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gaussian': lambda s: -jax.nn.logsumexp(-s, axis=-1),  # g = exp(−s), and −log Σ g falls when −Σ g does
  'laplacian': lambda s: -jax.nn.logsumexp(jnp.log1p(_root(s)) - _root(s), axis=-1),  # g = (1 + √(2s)) exp(−√(2s))
  'rational_quadratic': lambda s: jnp.log1p(s).sum(axis=-1),
  'inverse_multiquadric': lambda s: jnp.sqrt(1 + 2 * s).sum(axis=-1),
}


def energy(
  points: Float[Array, '... N D'], stored: Float[Array, '... A D'], basis: RadialBasis
) -> Float[Array, '... N']:
  """Return the energy E(x) = −Σ_i g(s_i) of each point x in a memory, where −g' is the kernel.

  An update of `retrieve` never raises the energy. For some kernels the result is not E(x) itself but an increasing
  function of it (`ENERGIES`).

  Args:
    points: x [..., N, D].
    stored: the patterns x_i, [..., A, D].
    basis: kernel, sigma and metric. Its normalization must be 'sum'.

  Raises:
    UserError: the kernel is not in `ENERGIES`, or the normalization is not 'sum'.
  """
  _check(basis)
  s = squared_distances(points, stored, basis.metric, basis.weights, basis.scale(points.dtype))
  return ENERGIES[basis.kernel](jnp.maximum(s, 0))


def retrieve(
  points: Float[Array, '... N D'], stored: Float[Array, '... A D'], basis: RadialBasis, steps: int = 1
) -> Float[Array, '... N D']:
  """Return points after `steps` updates.

  An update is stage 1 with the points as queries, and the patterns as keys and values.

  Args:
    points: x [..., N, D], such as damaged patterns.
    stored: the patterns x_i, [..., A, D].
    basis: kernel, sigma and metric. Its normalization must be 'sum'. If coordinates of a pattern are unknown, give a
      diagonal metric that is 0 for these coordinates. The distances then ignore them.
    steps: number of updates.

  Raises:
    UserError: the kernel is not in `ENERGIES`, or the normalization is not 'sum'.
  """
  _check(basis)
  for _ in range(steps):
    points = hyperbf(points, stored, stored, basis)
  return points


def _check(basis: RadialBasis) -> None:
  if basis.kernel not in ENERGIES or basis.normalization != 'sum':
    raise UserError(
      f'a memory has no kernel {basis.kernel} with normalization {basis.normalization}: '
      f'use normalization sum, and a kernel of {", ".join(ENERGIES)}'
    )
