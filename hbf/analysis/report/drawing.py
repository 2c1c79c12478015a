"""Pictures for a page: vector graphics that take the page's own text color, and images as they are."""

import base64
import io
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from hbf.data.images.codec import encode_png

# Told apart by color-blind readers too (Okabe & Ito 2008), on light and on dark ground.
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
GRAY = 128  # where there is no image
FRAME = (0xD5, 0x5E, 0x00)
INK = '#7f7f7e'  # of text and axes: stands for the text color of the page, and can be read by itself on any ground
WIDTH, HEIGHT = 4.6, 3.0  # inches, of a panel
STYLE: Any = {
  'svg.fonttype': 'none',  # text stays text, in the page's font
  'svg.hashsalt': 'hbf',  # the same picture is the same file
  'font.size': 10,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.prop_cycle': cycler(color=COLORS),
  'axes.grid': True,
  'grid.alpha': 0.25,
  **dict.fromkeys(
    (
      'text.color',
      'axes.labelcolor',
      'axes.edgecolor',
      'axes.titlecolor',
      'xtick.color',
      'ytick.color',
      'grid.color',
    ),
    INK,
  ),
}


def panel(width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Any]:
  """A figure and its axes; it belongs to nobody else, and needs no closing."""
  with matplotlib.rc_context(STYLE):
    figure = Figure((width, height), layout='constrained')
    return figure, figure.subplots()


def legend(axis: Any) -> None:
  """Names the lines, in the page's text color."""
  axis.legend(frameon=False, fontsize=8, labelcolor=INK)


def plain(figure: Figure) -> Figure:
  """Show the text of a figure as it is; Matplotlib would take a class called $5_to_$10 for a formula.

  Axes are linear here: the powers on a logarithmic axis would need formulas.
  """
  for text in figure.findobj(Text):
    text.set_parse_math(False)
  return figure


def svg(figure: Figure) -> str:
  """Return a figure as an SVG element, whose text and axes take the text color of the page."""
  buffer = io.StringIO()
  plain(figure)
  with matplotlib.rc_context(STYLE):
    figure.savefig(buffer, format='svg', transparent=True, metadata={'Date': None, 'Creator': None})
  text = buffer.getvalue()
  return text[text.index('<svg') :].replace(INK, 'currentColor')


def png(image: np.ndarray) -> str:
  """An image, uint8 [height, width, 1 or 3], as the address of a PNG that is all in it."""
  return 'data:image/png;base64,' + base64.b64encode(encode_png(image)).decode()


def enlarged(image: np.ndarray, times: int) -> np.ndarray:
  """Every pixel as a square of so many, [height, width, channels]."""
  return image.repeat(times, axis=0).repeat(times, axis=1)


def colored(values: np.ndarray, low: float, high: float) -> np.ndarray:
  """Numbers [height, width] as colors from dark to light, uint8 [height, width, 3]."""
  scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
  return (255 * matplotlib.colormaps['cividis'](scaled)[..., :3]).round().astype(np.uint8)


def rgb(images: np.ndarray) -> np.ndarray:
  """Images uint8 [..., 1 or 3] with three channels."""
  return np.broadcast_to(images, (*images.shape[:-1], 3))


def framed(image: np.ndarray, row: int, column: int, side: int, width: int = 1) -> np.ndarray:
  """An image uint8 [height, width, 3] with a frame around a square of it, and room for one all around."""
  marked = np.pad(image, ((width, width), (width, width), (0, 0)), constant_values=GRAY)
  marked[row : row + side + 2 * width, column : column + side + 2 * width] = FRAME
  marked[row + width : row + width + side, column + width : column + width + side] = image[
    row : row + side, column : column + side
  ]
  return marked


def in_rows(images: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
  """Images uint8 [n, height, width, 3] beside and below each other, with gray between them."""
  count, height, width, _ = images.shape
  rows = -(-count // columns)
  sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), GRAY, np.uint8)
  for i, image in enumerate(images):
    top, left = i // columns * (height + gap), i % columns * (width + gap)
    sheet[top : top + height, left : left + width] = image
  return sheet


def fitted(image: np.ndarray, most: int) -> np.ndarray:
  """An image no larger than so many pixels a side: uint8 [height, width, 3]."""
  if max(image.shape[:2]) <= most:
    return image
  scale = most / max(image.shape[:2])
  size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
  return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
