"""Health of the units of stage 2: dead, constant, or of a low share. Every report uses these definitions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

ROUNDING = float(np.finfo(np.float32).eps)  # what is below it is 0 beside 1
CONSTANT = 0.1  # deviation over the root mean square: below it, under 1% of the mean square varies
AWAKE = 2.0  # times the even share 1/U
LOW_SHARE = 1e-3  # of the tokens


class Health(NamedTuple):
  """Faults of U units, bool [..., U]. No unit has both.

  Attributes:
    dead: the unit adds nothing and learns nothing. Its greatest |response| is 0 to rounding, or the gradient of its
      coefficient is.
    constant: the unit adds a bias. Its response hardly varies over the tokens.
  """

  dead: jax.Array
  constant: jax.Array


def unit_health(responses: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead and the constant units among responses [..., M, U] to M tokens.

  Args:
    responses: R, normalized and with their gain, as they go into the sum Σ R c.
    gradient: greatest |gradient| of the loss by each unit's coefficients, [..., U]; None where it isn't known.
  """
  responses = jnp.asarray(responses, jnp.float32)
  peak = jnp.max(jnp.abs(responses), axis=-2)
  return health(peak, responses.mean(axis=-2), responses.std(axis=-2), gradient)


def health(peak: ArrayLike, mean: ArrayLike, deviation: ArrayLike, gradient: ArrayLike | None = None) -> Health:
  """Find the dead and the constant units by statistics of their responses over the tokens.

  A response is measured against 1. That is a kernel's value at its center, and the size to which a gain or a
  normalization brings the responses. A gradient is measured against the largest of the same stage.

  Args:
    peak: greatest |R|, [..., U].
    mean: of R, [..., U].
    deviation: standard deviation of R, [..., U].
    gradient: as for `unit_health`.
  """
  mean, deviation = jnp.asarray(mean), jnp.asarray(deviation)
  dead = jnp.asarray(peak) <= ROUNDING
  if gradient is not None:
    gradient = jnp.asarray(gradient)
    dead |= gradient <= ROUNDING * gradient.max(axis=-1, keepdims=True)
  return Health(dead, (deviation < CONSTANT * jnp.hypot(mean, deviation)) & ~dead)


def awake(log_kernels: jax.Array) -> jax.Array:
  """Tell which units are awake for which token: K / ΣK is at least twice the even share. Bool [..., U].

  The share ranks the units of one token. It says nothing of their size: if all K are 0, some unit still has a share.
  """
  return jax.nn.softmax(log_kernels, axis=-1) >= AWAKE / log_kernels.shape[-1]


def low_share(rate: ArrayLike) -> jax.Array:
  """Tell which units are awake for fewer than one token in a thousand, bool [..., U]; they may be alive.

  Args:
    rate: part of the tokens for which a unit is awake, [..., U].
  """
  return jnp.asarray(rate) < LOW_SHARE
