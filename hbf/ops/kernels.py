"""Radial kernels K of the scaled squared distance s = r² / 2σ².

`KERNELS` has the positive kernels, as functions that return log K(s). The normalized responses are then a softmax of
log K, which is numerically stable for every kernel. The unnormalized responses are exp(log K + log-gain).

Other kernels change sign, reach 0 or grow with the distance, so they cannot be divided by their sum over the centers.
`DIRECT` has these kernels, as functions that return K itself. Their argument is the depth b − s.

- `BALLS`: each center has a ball of radius ρ, and b = ρ²/2σ². So the depth is (ρ² − r²)/2σ². It is positive inside
  the ball and negative outside. Every center learns its own b.
- `VALUES`: b is 0, so the depth is −s.

`SIGNED` is the Gaussian of the authors' code. It has β in place of 1/2σ²: log K = −β r². β may have any sign.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.ops.distances import not_negative


def gaussian(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log K = −s. s may be negative: with metric `bilinear` it is not always a squared distance."""
  return -s


def laplacian(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log K = −√(2s), for K = exp(−r/σ). At s = 0, where K has a kink, the subgradient is 0."""
  away = s > 0
  return -jnp.where(away, jnp.sqrt(jnp.where(away, 2 * s, 1.0)), 0.0)


def rational_quadratic(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log K = −log(1 + s), for the Student kernel K = 1 / (1 + s), a scale mixture of Gaussians."""
  return -jnp.log1p(not_negative(s))


def inverse_multiquadric(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute log K = −½ log(1 + 2s), for K = 1 / √(1 + r²/σ²)."""
  return -0.5 * jnp.log1p(2 * not_negative(s))


KERNELS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'gaussian': gaussian,
  'laplacian': laplacian,
  'rational_quadratic': rational_quadratic,
  'inverse_multiquadric': inverse_multiquadric,
}
SIGNED = 'signed_gaussian'


def multiquadric(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute K = √(1 + 2s) = √(1 + r²/σ²) (Hardy 1971).

  K grows with the distance, and −K is conditionally positive definite of order 1.
  """
  return jnp.sqrt(1 + 2 * not_negative(s))


def thin_plate(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute K = s log s (Duchon 1977).

  Up to a factor and a multiple of r² this is the thin-plate spline r² log r. It is 0 at s = 0 and at s = 1.
  """
  away = s > 0
  return jnp.where(away, s * jnp.log(jnp.where(away, s, 1.0)), 0.0)


def wendland(s: Float[Array, '...']) -> Float[Array, '...']:
  """Compute K = (1 − u)₊⁴ (1 + 4u), with u = r / (√20 σ): Wendland's C² kernel (1995), which has compact support.

  It is positive definite in up to three dimensions. With this support, it has the same curvature at the center as the
  Gaussian of the same σ.
  """
  return _wendland(not_negative(s))


@jax.custom_jvp
def _wendland(s: jax.Array) -> jax.Array:
  u = _wendland_radius(s)
  return nn.relu(1 - u) ** 4 * (1 + 4 * u)


# The chain rule over u, which has a kink at s = 0, would give 0 there.
_wendland.defjvps(lambda tangent, _, s: -(nn.relu(1 - _wendland_radius(s)) ** 3) * tangent)


def _wendland_radius(s: jax.Array) -> jax.Array:
  """Return u = √(s/10). Its derivative at s = 0 is set to 0."""
  away = s > 0
  return jnp.where(away, jnp.sqrt(jnp.where(away, s / 10, 1.0)), 0.0)


# Kernels K as functions of s. Their centers have no radius ρ, only σ.
VALUES: dict[str, Callable[[jax.Array], jax.Array]] = {
  'multiquadric': multiquadric,
  'thin_plate': thin_plate,
  'wendland': wendland,
}
# Kernels K as functions of the depth. All decay to 0 outside the ball. 'ball_relu' is Epanechnikov's kernel and
# 'ball_relu2' is the biweight kernel. Both have compact support. On tokens and centers of norm 1 each kernel is a
# hidden unit of an MLP with normalized weights and the activation φ (Maruyama, Girosi & Poggio 1992), see
# `hbf.nn.baselines.mlp.MLP.normalize`.
BALLS: dict[str, Callable[[jax.Array], jax.Array]] = {
  'ball_relu': nn.relu,
  'ball_relu2': lambda depth: jnp.square(nn.relu(depth)),
  'ball_gelu': nn.gelu,
  'ball_silu': nn.silu,
  'ball_softplus': nn.softplus,
  'ball_sigmoid': nn.sigmoid,
}


def _of_depth(kernel: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
  return lambda depth: kernel(-depth)


DIRECT = BALLS | {name: _of_depth(kernel) for name, kernel in VALUES.items()}
