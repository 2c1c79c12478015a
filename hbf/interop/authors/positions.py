"""Interpolation of positions to images of another size, as in the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np

from hbf.interop.positions import square_side


def interpolate(positions: jax.Array, rows: int, columns: int) -> jax.Array:
  """Resize the positions [grid², D] of a square grid to positions [rows · columns, D] by cubic convolution.

  The authors' published networks have positions for images of 224×224, which are 56×56 patches, but were trained on
  images of 32×32. Like DINO's vision transformer, the authors' code adds a tenth of a patch to the new size before it
  computes the scale of the interpolation. Positions whose grid already has the right size are returned unchanged.
  """
  grid = square_side(len(positions))
  if rows == columns == grid:
    return positions
  square = positions.reshape(grid, grid, -1)
  down, across = (jnp.asarray(cubic_weights(grid, n), jnp.float32) for n in (rows, columns))
  resized = jnp.einsum('ri,cj,ijd->rcd', down, across, square, precision=jax.lax.Precision.HIGHEST)
  return resized.reshape(rows * columns, -1)


def cubic_weights(old: int, new: int) -> np.ndarray:
  """Return weights [new, old] that interpolate from `old` points to `new` points. Every row sums to 1.

  This is cubic convolution (Keys 1981, eq. 4, with a = −3/4). Points lie at the centers of their cells, and the
  outermost points are repeated beyond the edge. The result equals PyTorch's interpolate(mode='bicubic') with
  scale_factor (new + 0.1) / old.
  """
  a = -0.75
  weights = np.zeros((new, old))
  at = (np.arange(new) + 0.5) * old / (new + 0.1) - 0.5
  for tap in range(-1, 3):
    point = np.floor(at) + tap
    x = np.abs(at - point)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    np.add.at(weights, (np.arange(new), np.clip(point, 0, old - 1).astype(int)), np.where(x <= 1, near, far))
  return weights
