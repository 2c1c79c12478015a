"""Radial kernels, each stated by its logarithm.

A kernel maps the scaled squared distance s = r² / 2σ² to log K(s). In this form the normalised operator is a
softmax of log K, stable for every kernel, and the unnormalised one is exp(log K + log-gain).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gaussian(s: jax.Array) -> jax.Array:
  """log exp(−s). Takes negative s as well: the bilinear form need not be a distance."""
  return -s


def laplacian(s: jax.Array) -> jax.Array:
  """log exp(−r/σ) = −√(2s); its subgradient at s = 0, where K has a kink, is taken to be 0."""
  away = s > 0
  return -jnp.where(away, jnp.sqrt(jnp.where(away, 2 * s, 1.0)), 0.0)


def rational_quadratic(s: jax.Array) -> jax.Array:
  """log 1 / (1 + s): the Student kernel, a scale mixture of Gaussians."""
  return -jnp.log1p(jnp.maximum(s, 0))


def inverse_multiquadric(s: jax.Array) -> jax.Array:
  """log 1 / √(1 + r²/σ²) = −½ log(1 + 2s)."""
  return -0.5 * jnp.log1p(jnp.maximum(2 * s, 0))


KERNELS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gaussian': gaussian,
  'laplacian': laplacian,
  'rational_quadratic': rational_quadratic,
  'inverse_multiquadric': inverse_multiquadric,
}
