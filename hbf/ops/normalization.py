"""The normalization of responses over the centers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hbf.errors import choose


class Moments(NamedTuple):
  """The moments of k_a = K_a / max K over the centers a. Each is an array float32 [..., N, 1].

  Attributes:
    mean: k̄ = mean_a k_a.
    variance: mean_a (k_a − k̄)².
    log_peak: log max_a K_a, treated as a constant in gradients. Results do not depend on it, since it cancels out.
  """

  mean: jax.Array
  variance: jax.Array
  log_peak: jax.Array


class Normalization(NamedTuple):
  """A normalization as a function of k = K / max K and the moments of k.

  Attributes:
    centered: True if R = (k − k̄) · factor, with the mean k̄ of k over the centers. False if R = k · factor.
    factor: function of the moments, the number of centers and the log-gain. It returns the factor, [..., N, 1].
  """

  centered: bool
  factor: Callable[[Moments, jax.Array | int, jax.Array | float], jax.Array]


_EPSILON = 1e-6  # relative to the squared mean response: keeps the gradient finite where all responses are equal

NORMALIZATIONS = {
  'none': Normalization(False, lambda k, count, log_gain: jnp.exp(k.log_peak + log_gain)),
  'sum': Normalization(False, lambda k, count, log_gain: 1 / (count * k.mean)),
  'rms': Normalization(False, lambda k, count, log_gain: jax.lax.rsqrt(k.variance + k.mean**2)),
  'layer': Normalization(True, lambda k, count, log_gain: jax.lax.rsqrt(k.variance + _EPSILON * k.mean**2)),
}


def normalize(
  log_k: Float[Array, '... N A'],
  normalization: str,
  log_gain: Float[Array, '...'] | float = 0.0,
  mask: Bool[Array, '... #N #A'] | None = None,
) -> Float[Array, '... N A']:
  """Compute responses from the logarithms of the kernel's values.

  Args:
    log_k: log K, float32 [..., N, A].
    normalization: 'none' for R = exp(log K + log-gain), 'sum' for R = K / ΣK, 'rms' for R = K / √mean(K²), or 'layer'
      for R = (K − mean K) / √(var K + ε mean(K)²) with ε = 10⁻⁶.
    log_gain: logarithm of a factor of K. Only 'none' uses it: in the other normalizations a common factor cancels.
    mask: booleans that broadcast with log_k, True where a point sees a center. Other centers have the response 0 and
      are left out of all means and sums. The responses of a point that sees no center are 0, and their gradients too.

  Returns:
    The responses R, float32 [..., N, A].

  Raises:
    UserError: the normalization is unknown.
  """
  centered, factor = choose('normalization', normalization, NORMALIZATIONS)
  log_k, mask = jnp.broadcast_arrays(log_k, True if mask is None else mask)  # the mask may have more leading axes
  log_k = jnp.where(mask, log_k, -jnp.inf)
  seen = jnp.sum(mask, axis=-1, keepdims=True)
  # Far from every center K underflows. Relative to its largest value it doesn't.
  log_peak = jnp.where(seen > 0, jax.lax.stop_gradient(jnp.max(log_k, axis=-1, keepdims=True)), 0)
  k = jnp.exp(log_k - log_peak)
  count = jnp.maximum(seen, 1)
  # For a point that sees no center, any mean but 0 makes the factor and its gradient finite. All its k are 0.
  mean = jnp.where(seen > 0, jnp.sum(k, axis=-1, keepdims=True) / count, 1)
  deviations = jnp.where(mask, k - mean, 0)
  variance = jnp.sum(deviations * deviations, axis=-1, keepdims=True) / count
  return (deviations if centered else k) * factor(Moments(mean, variance, log_peak), count, log_gain)
