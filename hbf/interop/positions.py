"""Positions that were learned on one grid of patches, for images of another size."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.models.embedding import PatchEmbedding

# Positions [rows · columns, D] from those of a square grid [grid², D], and rows and columns.
Resize = Callable[[jax.Array, int, int], jax.Array]


class AnySizeEmbedding(PatchEmbedding):
  """An embedding of images of any size. It resizes its positions to the patches of the images at every call.

  Attributes:
    grid: rows and columns of the patches that have positions.
    resize: interpolation of the positions. Each code has its own.
  """

  grid: int = 0
  resize: Resize | None = None

  def _positions(self, places: np.ndarray) -> jax.Array:
    """Return the positions [N, D] that are added to patches at [N, 2], row by row."""
    assert self.resize is not None
    rows, columns = (int(last) + 1 for last in places[-1])
    learned = self.param('positions', nn.initializers.normal(0.02), (self.grid**2, self.width))
    return jnp.asarray(self.resize(learned, rows, columns)).astype(self.dtype)


def resize(positions: jax.Array, rows: int, columns: int) -> jax.Array:
  """Positions [rows · columns, D] from those of a square grid, [grid², D]: cubic, smoothed where they become fewer.

  It is timm's rule, PyTorch's interpolate(mode='bicubic', antialias=True): Keys' cubic convolution with a = −1/2.
  Google's code takes linear samples between the outermost points (scipy's zoom of order 1), which skips positions
  where they become fewer.
  """
  grid = square_side(len(positions))
  if rows == columns == grid:
    return positions
  square = jnp.reshape(positions, (grid, grid, -1))
  return jax.image.resize(square, (rows, columns, square.shape[-1]), 'cubic').reshape(rows * columns, -1)


def square_side(patches: int) -> int:
  """Return the rows and columns of a square of patches.

  Raises:
    UserError: this number of patches forms no square.
  """
  side = math.isqrt(max(patches, 0))
  if side < 1 or side * side != patches:
    raise UserError(f'its positions are those of {patches} patches, which form no square')
  return side
