"""Tiles of an image or of a grid of tokens, such as patches, windows, and squares of tokens to merge."""

from jaxtyping import Array, Shaped

# Axes are split and joined one at a time: JAX refuses several at once if an explicit mesh axis splits the batch.


def tiles(z: Shaped[Array, 'B R C D'], height: int, width: int) -> Shaped[Array, 'B r c height width D']:
  """Cut a grid with R rows and C columns into r = R/height times c = C/width tiles."""
  batch, rows, columns, d = z.shape
  by_row = z.reshape(batch, rows // height, height, columns, d)
  return by_row.reshape(batch, rows // height, height, columns // width, width, d).swapaxes(2, 3)


def untiled(z: Shaped[Array, 'B r c height width D']) -> Shaped[Array, 'B R C D']:
  """Join the tiles of a grid, as the inverse of `tiles`."""
  batch, rows, columns, height, width, d = z.shape
  by_row = z.swapaxes(2, 3).reshape(batch, rows * height, columns, width, d)
  return by_row.reshape(batch, rows * height, columns * width, d)
