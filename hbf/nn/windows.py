"""Windows: stage 1 mixes the patches of a square, and no others (Liu et al. 2021, "Swin Transformer")."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hbf.nn.context import Context, grid_positions
from hbf.nn.tiles import tiles, untiled
from hbf.options import OptionError


def in_windows(
  stage: Callable[[jax.Array, Context], jax.Array],
  tokens: Float[Array, 'B N D'],
  context: Context,
  window: int,
  shifted: bool,
) -> Float[Array, 'B N D']:
  """Apply a stage 1 to each window of patches, as if it were an image.

  Windows are squares of `window` × `window` patches that fill the image. If a side of the image is shorter than a
  window, the window has the length of this side.

  Args:
    stage: a function of tokens and their context. It must not compare tokens of different examples.
    tokens: patches of images, [B, N, D], row by row.
    context: the context of the call. It has the grid, and neither a mask nor causality.
    window: side of a window in patches.
    shifted: True to move all windows by half a window to the right and down. Windows at the right and the lower edge
      then continue at the opposite edge. A mask separates patches that are no neighbors.

  Raises:
    OptionError: the tokens are not exactly the patches of a grid, the context has a mask or is causal, or windows do
      not fill the grid.
  """
  rows, columns = grid = _checked_grid(tokens.shape[1], context, window)
  sides = height, breadth = min(window, rows), min(window, columns)
  # A side with one window stays where it is: all its patches see each other already.
  moves = tuple(side // 2 if shifted and side < length else 0 for side, length in zip(sides, grid, strict=True))
  batch, _, width = tokens.shape
  moved = jnp.roll(tokens.reshape(batch, rows, columns, width), [-move for move in moves], (1, 2))
  inside = dataclasses.replace(
    context,
    positions=jnp.asarray(grid_positions(height, breadth)),
    grid=sides,
    mask=_mask(grid, sides, moves, batch) if any(moves) else None,
  )
  mixed = stage(_split(moved, sides), inside)
  squares = mixed.reshape(-1, height, breadth, width)
  joined = untiled(squares.reshape(batch, rows // height, columns // breadth, height, breadth, width))
  return jnp.roll(joined, moves, (1, 2)).reshape(tokens.shape)


def _checked_grid(length: int, context: Context, window: int) -> tuple[int, int]:
  """Return the grid of a context. Raise OptionError if it cannot be divided into windows."""
  wrong, grid = '', context.grid_of(length)
  if grid is None:
    wrong = 'needs tokens that are patches only: set pool to mean or sequence'
  elif context.mask is not None or context.causal:
    wrong = 'takes no mask and no causality: set window to 0'
  elif any(side % min(window, side) for side in grid):
    wrong = f'does not divide the sides of {grid[0]}×{grid[1]} tokens: change it, the patch or the image'
  if wrong or grid is None:
    raise OptionError(f'window={window} {wrong}', window=window)
  return grid


def _split(z: Float[Array, 'B R C D'], sides: tuple[int, int]) -> Float[Array, 'W n D']:
  """Return the windows of all images, each with its patches row by row."""
  windows = tiles(z, *sides)
  return windows.reshape(-1, *windows.shape[3:]).reshape(-1, math.prod(sides), z.shape[3])


def _mask(grid: tuple[int, int], sides: tuple[int, int], moves: tuple[int, ...], batch: int) -> Bool[Array, 'W n n']:
  """Return a mask for the windows of `batch` images, True where the image's edge does not separate two patches."""
  # After the move, the last patches of an axis are the first ones of the image.
  below, right = (np.arange(length) >= length - move for length, move in zip(grid, moves, strict=True))
  regions = _split(jnp.asarray(2 * below[:, None] + right)[None, :, :, None], sides)
  of_image = regions == regions.mT
  return jnp.broadcast_to(of_image, (batch, *of_image.shape)).reshape(batch * len(of_image), *of_image.shape[1:])
