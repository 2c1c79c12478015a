"""Radial kernels K of the scaled squared distance s = r² / 2σ².

A positive kernel is stated by log K(s), in `KERNELS`. The normalized operator is then a softmax of log K, which is
stable for every kernel. The unnormalized operator is exp(log K + log-gain).

A kernel that changes sign or reaches 0 has no logarithm. It is stated by K itself, in `DIRECT`, as a function of the
depth b − s of a point in the ball of a center. With b = ρ²/2σ² the ball has the radius ρ. The depth is (ρ² − r²)/2σ²,
positive inside and negative outside. Every center learns its own b.

`SIGNED` is the Gaussian of the authors' code. It has no σ: log K = −β r², and β may have any sign.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gaussian(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log exp(−s). The bilinear form need not be a distance, so s may be negative."""
  return -s


def laplacian(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log exp(−r/σ) = −√(2s). At s = 0, where K has a kink, the subgradient is 0."""
  away = s > 0
  return -jnp.where(away, jnp.sqrt(jnp.where(away, 2 * s, 1.0)), 0.0)


def rational_quadratic(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log 1 / (1 + s): the Student kernel, a scale mixture of Gaussians."""
  return -jnp.log1p(jnp.maximum(s, 0))


def inverse_multiquadric(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log 1 / √(1 + r²/σ²) = −½ log(1 + 2s)."""
  return -0.5 * jnp.log1p(jnp.maximum(2 * s, 0))


KERNELS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gaussian': gaussian,
  'laplacian': laplacian,
  'rational_quadratic': rational_quadratic,
  'inverse_multiquadric': inverse_multiquadric,
}
SIGNED = 'signed_gaussian'
# All decay to 0 outside their ball. 'ball_relu' is Epanechnikov's kernel and 'ball_relu2' is the biweight kernel.
# Both have compact support. On tokens and centers of norm 1 each is a hidden unit of an MLP with normalized weights
# and the activation φ (Maruyama, Girosi & Poggio 1992), see `hbf.nn.baselines.mlp.MLP.normalize`.
DIRECT: dict[str, Callable[[jax.Array], jax.Array]] = {
  'ball_relu': nn.relu,
  'ball_relu2': lambda depth: jnp.square(nn.relu(depth)),
  'ball_gelu': nn.gelu,
  'ball_silu': nn.silu,
  'ball_softplus': nn.softplus,
  'ball_sigmoid': nn.sigmoid,
}
