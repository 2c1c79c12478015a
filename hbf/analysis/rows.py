"""Distances and norms of the rows of arrays, in NumPy."""

import numpy as np


def squared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Return the squared distances [m, n] between the rows of a [m, D] and the rows of b [n, D]."""
  return np.maximum((a * a).sum(-1)[:, None] + (b * b).sum(-1) - 2 * a @ b.T, 0)


def of_norm_1(rows: np.ndarray) -> np.ndarray:
  """Divide each row of an array [..., D] by its norm."""
  return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))
