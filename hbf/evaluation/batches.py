"""A function of batches, applied to any number of examples."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

BATCH = 100  # examples


def in_batches(function: Callable[[Any], Any], examples: np.ndarray, size: int = BATCH) -> Any:
  """Return the arrays that a function returns for all examples, from batches of one size.

  Args:
    function: a function from [size, …] to a tree of arrays [size, …].
    examples: the examples [n, …], at least one. The last batch is filled up with copies of the last example.
    size: number of examples in a batch.
  """
  filled = np.concatenate([examples, np.repeat(examples[-1:], -len(examples) % size, axis=0)])
  parts = [jax.device_get(function(filled[start : start + size])) for start in range(0, len(filled), size)]
  return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(examples)], *parts)
