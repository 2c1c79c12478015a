"""Small arrays on the host, where NumPy computes without a compilation."""

from typing import Any

import jax
import numpy as np

# Greatest number of elements. For a larger array, a program on its devices is worth its compilation.
SMALL = 2**20


def on_host(array: Any) -> np.ndarray | None:
  """Return the values of an array. None: it has more than `SMALL` elements, or other processes hold parts of it."""
  if array.size > SMALL or (isinstance(array, jax.Array) and not array.is_fully_addressable):
    return None
  return np.asarray(array)
