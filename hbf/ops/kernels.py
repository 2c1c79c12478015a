"""Radial kernels of the scaled squared distance s = r² / 2σ².

Positive kernels are stated by log K(s), in `KERNELS`. The normalized operator is then a softmax of log K, stable for
every kernel, and the unnormalized one is exp(log K + log-gain).

Kernels that change sign or reach 0 have no logarithm. They are stated by K itself, in `DIRECT`, as a function of the
depth b − s at which a point lies in a center's ball. With b = ρ²/2σ² the ball has the radius ρ: the depth is
(ρ² − r²)/2σ², positive inside and negative outside. Every center learns its own b.

`SIGNED` is the Gaussian of the authors' code. It has no width: it is stated by β itself, log K = −β r², and β may
have any sign.
"""

from collections.abc import Callable

import flax.linen as nn
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
SIGNED = 'signed_gaussian'
# All of them decay to 0 outside their ball. 'ball_relu' is Epanechnikov's kernel and 'ball_relu2' the biweight one:
# both have compact support. On tokens and centers of norm 1 each is a hidden unit of an MLP with normalized weights
# and the activation φ (Maruyama, Girosi & Poggio 1992): see `hbf.nn.baselines.mlp.MLP.normalize`.
DIRECT: dict[str, Callable[[jax.Array], jax.Array]] = {
  'ball_relu': nn.relu,
  'ball_relu2': lambda depth: jnp.square(nn.relu(depth)),
  'ball_gelu': nn.gelu,
  'ball_softplus': nn.softplus,
  'ball_sigmoid': nn.sigmoid,
}
