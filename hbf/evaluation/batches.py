"""Application of a function to any number of examples, in batches of equal size."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

BATCH = 100  # examples


def in_batches(function: Callable[[Any], Any], examples: np.ndarray, size: int = BATCH) -> Any:
  """Apply a function to all examples, in batches of equal size.

  Args:
    function: a function that takes a batch [size, …] and returns a tree of arrays [size, …].
    examples: the examples [n, …], at least one. Copies of the last example fill the last batch.
    size: number of examples in a batch.

  Returns:
    The results for all examples: a tree with the structure of `function`'s result. Its leaves are NumPy arrays
    [n, …].
  """
  parts = []
  for start in range(0, len(examples), size):
    batch = examples[start : start + size]
    if len(batch) < size:  # only the last batch is copied, because the examples may fill most of the memory
      batch = np.concatenate([batch, np.repeat(batch[-1:], size - len(batch), axis=0)])
    parts.append(jax.device_get(function(batch)))
  return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(examples)], *parts)
