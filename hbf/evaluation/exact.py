"""Sums of many numbers that lose nothing to rounding."""

import jax
import jax.numpy as jnp
import numpy as np


def add(total: jax.Array, value: jax.Array) -> jax.Array:
  """A sum and the rest that rounding keeps out of it, with a value added: together as good as 48 bits.

  Reference: Dekker 1971, "A floating-point technique for extending the available precision"; Knuth's TwoSum first.

  Args:
    total: float32 [2, …], zeros for no values.
    value: float32 […].
  """
  old, rest = total
  new = old + value
  added = new - old
  rest += (old - (new - added)) + (value - added)
  both = new + rest
  return jnp.stack([both, rest - (both - new)])


def value(total: np.ndarray) -> np.ndarray:
  """The sum, float64 […], on the host."""
  return total.astype(np.float64).sum(axis=0)
