"""Sums of many numbers, with a negligible rounding error."""

import jax
import jax.numpy as jnp
import numpy as np


def add(total: jax.Array, value: jax.Array) -> jax.Array:
  """Add a value to a sum. The rounding error of the sum is stored beside the sum.

  The two numbers together have a precision of 48 bits. The value is added by Knuth's TwoSum, and then by the
  renormalization of Dekker 1971, "A floating-point technique for extending the available precision".

  Args:
    total: float32 [2, …], the sum and its rounding error. Zeros stand for an empty sum.
    value: the value to add, float32 […].

  Returns:
    The new sum and its rounding error, float32 [2, …].
  """
  old, error = total
  new = old + value
  added = new - old
  error += (old - (new - added)) + (value - added)
  both = new + error
  return jnp.stack([both, error - (both - new)])


def value(total: np.ndarray) -> np.ndarray:
  """Return the value of a sum that `add` made: float64 […] from float32 [2, …]."""
  return total.astype(np.float64).sum(axis=0)
