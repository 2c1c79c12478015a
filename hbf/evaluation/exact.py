"""Sums of many numbers without a rounding error that matters."""

import jax
import jax.numpy as jnp
import numpy as np


def add(total: jax.Array, value: jax.Array) -> jax.Array:
  """Add a value to a sum and its rounding error. Together they are as precise as 48 bits.

  Reference: Dekker 1971, "A floating-point technique for extending the available precision"; Knuth's TwoSum first.

  Args:
    total: float32 [2, …], the sum and its rounding error. Zeros stand for no values.
    value: float32 […].
  """
  old, rest = total
  new = old + value
  added = new - old
  rest += (old - (new - added)) + (value - added)
  both = new + rest
  return jnp.stack([both, rest - (both - new)])


def value(total: np.ndarray) -> np.ndarray:
  """Return the sum, float64 […], on the host."""
  return total.astype(np.float64).sum(axis=0)
