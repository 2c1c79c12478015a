"""Health of the units of stage 2: dead units, constant units and units with a low share. All reports use it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

ROUNDING = float(np.finfo(np.float32).eps)  # a smaller number is 0 beside 1
CONSTANT = 0.1  # standard deviation over root mean square. Below it, less than 1% of the mean square varies
AWAKE = 2.0  # share of an awake unit over the even share 1/U
DOUBLED = 0.99  # correlation of the responses above which two units count as doubled
LOW_SHARE = 1e-3  # fraction of the tokens for which a unit is awake


class Health(NamedTuple):
  """Faults of U units, booleans [..., U]. No unit has both.

  Attributes:
    dead: True if the unit adds nothing or learns nothing. Up to rounding, its greatest |response| or the gradient of
      its coefficient is 0.
    constant: True if the unit only adds a bias. Its response hardly varies over the tokens.
  """

  dead: jax.Array
  constant: jax.Array


def unit_health(responses: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead and the constant units among responses [..., M, U] to M tokens.

  Args:
    responses: R as in the sum Σ R c, after normalization and gain.
    gradient: greatest |gradient| of the loss with respect to each unit's coefficients, [..., U]. None: unknown.
  """
  responses = jnp.asarray(responses, jnp.float32)
  peak = jnp.max(jnp.abs(responses), axis=-2)
  return health(peak, responses.mean(axis=-2), responses.std(axis=-2), gradient)


def health(peak: ArrayLike, mean: ArrayLike, deviation: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead and the constant units by statistics of their responses over the tokens.

  A response is compared with 1. A kernel has this value at its center, and a gain or a normalization brings the
  responses to this size. A gradient is compared with the largest gradient of the same stage.

  Args:
    peak: greatest |R|, [..., U].
    mean: mean of R, [..., U].
    deviation: standard deviation of R, [..., U].
    gradient: as for `unit_health`.
  """
  mean, deviation = jnp.asarray(mean), jnp.asarray(deviation)
  dead = jnp.asarray(peak) <= ROUNDING
  if gradient is not None:
    gradient = jnp.asarray(gradient)
    dead |= gradient <= ROUNDING * gradient.max(axis=-1, keepdims=True)
  return Health(dead, (deviation < CONSTANT * jnp.hypot(mean, deviation)) & ~dead)


def correlations(responses: ArrayLike) -> jax.Array:
  """Return the correlations [U, U] of responses [M, U] over M tokens. They are 0 for units that do not vary."""
  responses = jnp.asarray(responses, jnp.float32)
  centered = responses - responses.mean(axis=0)
  norms = jnp.linalg.norm(centered, axis=0)
  directions = jnp.where(norms > 0, centered / jnp.where(norms > 0, norms, 1.0), 0.0)
  return directions.T @ directions


def doubled(correlation: ArrayLike) -> jax.Array:
  """Return True for units that respond like another unit of a lower number, booleans [U] of correlations [U, U]."""
  return jnp.any(jnp.tril(jnp.asarray(correlation), -1) > DOUBLED, axis=1)


def awake(log_kernels: jax.Array) -> jax.Array:
  """Return True where a unit is awake for a token: K / ΣK is at least twice the even share.

  The share only ranks the units of one token. If all K are near 0, some units still have a large share.

  Args:
    log_kernels: log K, [..., U].

  Returns:
    Booleans [..., U].
  """
  return jax.nn.softmax(log_kernels, axis=-1) >= AWAKE / log_kernels.shape[-1]


def low_share(rate: ArrayLike) -> jax.Array:
  """Return True for units that are awake for fewer than one token in a thousand. Such a unit may be alive.

  Args:
    rate: fraction of the tokens for which a unit is awake, [..., U].

  Returns:
    Booleans [..., U].
  """
  return jnp.asarray(rate) < LOW_SHARE
