"""Faults of the units of stage 2: dead units, constant units, doubled units and units with a low share.

A unit is a center of HyperBF or a hidden unit of an MLP. U is their number, and R is the response of a unit to a
token. The stage computes the sum Σ R c over its units, with the coefficients c. K is the value of a unit's kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

ROUNDING = float(np.finfo(np.float32).eps)  # a number counts as 0 if it is at most this number times the typical size
# A unit is constant if its response's standard deviation, divided by the root mean square, is below this number. The
# variance is then less than 1% of the mean square.
CONSTANT = 0.1
AWAKE = 2.0  # smallest share of an awake unit, divided by the even share 1/U
DOUBLED = 0.99  # correlation of the responses above which two units count as doubled
LOW_SHARE = 1e-3  # A unit has a low share if it is awake for a smaller fraction of the tokens.


class Health(NamedTuple):
  """Two faults of U units, booleans [..., U] each. No unit has both faults.

  Attributes:
    dead: True if the unit adds nothing or learns nothing. Its greatest |response| or the gradient of its coefficients
      is then 0 up to rounding.
    constant: True if the response hardly varies over the tokens. The unit then adds hardly more than a bias.
  """

  dead: jax.Array
  constant: jax.Array


def unit_health(responses: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead units and the constant units among U units, by their responses to M tokens.

  Args:
    responses: response of each unit to each token, after normalization and gain, [..., M, U].
    gradient: greatest |gradient| of the loss with respect to each unit's coefficients, [..., U]. None: unknown.
  """
  responses = jnp.asarray(responses, jnp.float32)
  peak = jnp.max(jnp.abs(responses), axis=-2)
  return health(peak, responses.mean(axis=-2), responses.std(axis=-2), gradient)


def health(peak: ArrayLike, mean: ArrayLike, deviation: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead units and the constant units among U units, by statistics of their responses over all tokens.

  A response counts as 0 if it is at most ROUNDING, because typical responses are about 1. A gradient counts as 0 if
  it is at most ROUNDING times the largest gradient of the same stage.

  Args:
    peak: greatest |response| of each unit, [..., U].
    mean: mean response of each unit, [..., U].
    deviation: standard deviation of the responses of each unit, [..., U].
    gradient: greatest |gradient| of each unit's coefficients, [..., U]; see `unit_health`.
  """
  mean, deviation = jnp.asarray(mean), jnp.asarray(deviation)
  dead = jnp.asarray(peak) <= ROUNDING
  if gradient is not None:
    gradient = jnp.asarray(gradient)
    dead |= gradient <= ROUNDING * gradient.max(axis=-1, keepdims=True)
  return Health(dead, (deviation < CONSTANT * jnp.hypot(mean, deviation)) & ~dead)


def correlations(responses: ArrayLike) -> jax.Array:
  """Return the correlations [U, U] between the units' responses to M tokens, `responses` [M, U].

  The correlations of a unit whose response does not vary are 0.
  """
  responses = jnp.asarray(responses, jnp.float32)
  centered = responses - responses.mean(axis=0)
  norms = jnp.linalg.norm(centered, axis=0)
  directions = jnp.where(norms > 0, centered / jnp.where(norms > 0, norms, 1.0), 0.0)
  return directions.T @ directions


def doubled(correlation: ArrayLike) -> jax.Array:
  """Return True for units whose correlation with an earlier unit is above DOUBLED.

  So of two units with equal responses, only the second counts as doubled.

  Args:
    correlation: correlations between the units' responses, [U, U].

  Returns:
    Booleans [U].
  """
  return jnp.any(jnp.tril(jnp.asarray(correlation), -1) > DOUBLED, axis=1)


def awake(log_kernels: jax.Array) -> jax.Array:
  """Return True where a unit is awake for a token.

  A unit is awake if its share K / ΣK is at least twice the even share 1/U. K is the value of its kernel, and the sum
  is over all U units. Shares are relative, so units can be awake even for a token for which all K are near 0.

  Args:
    log_kernels: log K of each token and unit, [..., U].

  Returns:
    Booleans [..., U].
  """
  return jax.nn.softmax(log_kernels, axis=-1) >= AWAKE / log_kernels.shape[-1]


def low_share(rate: ArrayLike) -> jax.Array:
  """Return True for units that are awake for fewer than one token in a thousand.

  Args:
    rate: fraction of the tokens for which a unit is awake, [..., U].

  Returns:
    Booleans [..., U].
  """
  return jnp.asarray(rate) < LOW_SHARE
