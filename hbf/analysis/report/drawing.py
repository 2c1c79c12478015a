"""Pictures for a page: vector graphics in the page's text color, and images."""

import base64
import html
import io
import re
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from hbf.data.images.codec import encode_png

# Colors that color-blind readers can distinguish (Okabe & Ito 2008), on a light and on a dark background.
COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
GRAY = 128  # background between images
FRAME = (0xD5, 0x5E, 0x00)
INK = '#7f7f7e'  # color of text and axes. It is replaced by the page's text color, and is readable without a page
WIDTH, HEIGHT = 4.6, 3.0  # size of a panel in inches
STYLE: Any = {
  'svg.fonttype': 'none',  # text stays text, in the page's font
  'svg.hashsalt': 'hbf',  # equal pictures give equal files
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
  """Return a figure and its axes. The figure is not registered with pyplot, so it need not be closed."""
  with matplotlib.rc_context(STYLE):
    figure = Figure((width, height), layout='constrained')
    return figure, figure.subplots()


def legend(axis: Any) -> None:
  """Add a legend in the page's text color."""
  axis.legend(frameon=False, fontsize=8, labelcolor=INK)


def plain(figure: Figure) -> Figure:
  """Turn off formulas in all text of a figure, and return the figure.

  Otherwise Matplotlib would read the name of a class such as $5_to_$10 as a formula. Do not use this
  function for a logarithmic axis, because the labels of powers are formulas.
  """
  for text in figure.findobj(Text):
    text.set_parse_math(False)
  return figure


def svg(figure: Figure, name: str) -> str:
  """Return a figure as an SVG element. Its text and axes take the text color of the page.

  Args:
    figure: the figure. The titles and labels of its axes become its description for screen readers.
    name: a name that is unique on the page. All ids of the SVG begin with this name.
  """
  buffer = io.StringIO()
  plain(figure)
  with matplotlib.rc_context(STYLE):
    figure.savefig(buffer, format='svg', transparent=True, metadata={'Date': None, 'Creator': None})
  text = buffer.getvalue()
  text = text[text.index('<svg') :].replace(INK, 'currentColor')
  text = re.sub(r'(\bid="|href="#|url\(#)', rf'\g<1>{name}-', text)
  return text.replace('<svg', f'<svg role="img" aria-label="{html.escape(_described(figure))}"', 1)


def _described(figure: Figure) -> str:
  """Return the titles and labels of a figure's axes as one text, for screen readers."""
  lines = []
  for axis in figure.axes:
    labels = [label for label in (axis.get_ylabel(), axis.get_xlabel()) if label]
    line = ': '.join(part for part in (axis.get_title(), ' by '.join(labels)) if part)
    lines.append(line)
  return 'Drawing. ' + '. '.join(dict.fromkeys(line for line in lines if line))


def png(image: np.ndarray) -> str:
  """Return an image, uint8 [height, width, 1 or 3], as a data URL of a PNG."""
  return 'data:image/png;base64,' + base64.b64encode(encode_png(image)).decode()


def enlarged(image: np.ndarray, times: int) -> np.ndarray:
  """Repeat every pixel of an image [height, width, channels] `times` times in each direction."""
  return image.repeat(times, axis=0).repeat(times, axis=1)


def colored(values: np.ndarray, low: float, high: float) -> np.ndarray:
  """Map numbers [height, width] to colors, uint8 [height, width, 3]: `low` is dark, and `high` is light."""
  scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1)
  return (255 * matplotlib.colormaps['cividis'](scaled)[..., :3]).round().astype(np.uint8)


def rgb(images: np.ndarray) -> np.ndarray:
  """Return uint8 images [..., 1 or 3] with three channels."""
  return np.broadcast_to(images, (*images.shape[:-1], 3))


def framed(image: np.ndarray, row: int, column: int, side: int, width: int = 1) -> np.ndarray:
  """Return an image uint8 [height, width, 3] with a gray margin, and a colored frame around one square.

  Args:
    image: the image without the margin.
    row: top row of the square in the image.
    column: left column of the square in the image.
    side: side of the square in pixels.
    width: width of the margin and of the frame in pixels.
  """
  marked = np.pad(image, ((width, width), (width, width), (0, 0)), constant_values=GRAY)
  marked[row : row + side + 2 * width, column : column + side + 2 * width] = FRAME
  marked[row + width : row + width + side, column + width : column + width + side] = image[
    row : row + side, column : column + side
  ]
  return marked


def in_rows(images: np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
  """Arrange images uint8 [n, height, width, 3] in rows of `columns` images, with gray gaps of `gap` pixels."""
  count, height, width, _ = images.shape
  rows = -(-count // columns)
  sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), GRAY, np.uint8)
  for i, image in enumerate(images):
    top, left = i // columns * (height + gap), i % columns * (width + gap)
    sheet[top : top + height, left : left + width] = image
  return sheet


def fitted(image: np.ndarray, most: int) -> np.ndarray:
  """Return an image uint8 [height, width, 3], shrunk if a side is longer than `most` pixels."""
  if max(image.shape[:2]) <= most:
    return image
  scale = most / max(image.shape[:2])
  size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
  return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
