"""Learned positions for images of another size than the training images."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.models.embedding import PatchEmbedding

# A function of (positions, rows, columns). From the positions [grid², D] of a square grid, it makes positions
# [rows · columns, D].
Resize = Callable[[jax.Array, int, int], jax.Array]


class AnySizeEmbedding(PatchEmbedding):
  """An embedding of images of any size. Every call resizes the learned positions to the images' number of patches.

  Attributes:
    grid: number of rows, and of columns, of the square of learned positions.
    resize: function that interpolates the positions as the network's project does.
  """

  grid: int = 0
  resize: Resize | None = None

  def _positions(self, coordinates: np.ndarray) -> jax.Array:
    """Return the position vectors [N, D] of N patches. `coordinates` [N, 2] has the row and column of each patch."""
    assert self.resize is not None
    rows, columns = (int(last) + 1 for last in coordinates[-1])
    learned = self.param('positions', nn.initializers.normal(0.02), (self.grid**2, self.width), jnp.float32)
    return jnp.asarray(self.resize(learned, rows, columns)).astype(self.dtype)


def resize(positions: jax.Array, rows: int, columns: int) -> jax.Array:
  """Resize the positions [grid², D] of a square grid to positions [rows · columns, D], as timm does.

  The interpolation is cubic convolution (Keys 1981) with a = −1/2. If the new grid is smaller, it also smooths, like
  PyTorch's interpolate(mode='bicubic', antialias=True). Google's own code interpolates linearly instead, with the
  corners of both grids aligned (scipy's zoom of order 1). If the new grid is smaller, Google's code skips positions.
  """
  grid = square_side(len(positions))
  if rows == columns == grid:
    return positions
  square = jnp.reshape(positions, (grid, grid, -1))
  return jax.image.resize(square, (rows, columns, square.shape[-1]), 'cubic').reshape(rows * columns, -1)


def square_side(patches: int) -> int:
  """Return the number of rows, and of columns, of a square of patches.

  Raises:
    UserError: the patches do not form a square.
  """
  side = math.isqrt(max(patches, 0))
  if side < 1 or side * side != patches:
    raise UserError(f'it has positions of {patches} patches, which do not form a square')
  return side
