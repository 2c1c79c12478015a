"""Conversion between encoded images and uint8 arrays, with Pillow."""

import contextlib
import io
import itertools
import math
import os
import warnings
from collections.abc import Iterator
from typing import IO, NamedTuple, Self

import numpy as np
from PIL import Image, ImageOps

from hbf.errors import UserError

FORMATS = ('JPEG', 'PNG', 'WEBP', 'TIFF', 'BMP', 'GIF', 'PPM')  # Pillow has more: to read EPS it starts Ghostscript.
# What TFDS stores. Naming so few saves a third of the time that Pillow takes to open a small image.
TFDS_FORMATS = ('PNG', 'JPEG', 'GIF', 'BMP')
MOST_PIXELS = 89_478_485  # Pillow's limit: 256 MiB as RGB, in each of the threads that decode.

_MODES = {1: 'L', 3: 'RGB'}
_TILE = 1024  # Pixels of a side. A conversion makes several copies of what it converts.
# An image that is longer is cropped before it is resized. An image that isn't is resized as a whole: a crop's
# position is rounded, which changes some pixels by a level.
_MOST_ASPECT = 16
_ENDS = {'JPEG': b'\xff\xd9', 'MPO': b'\xff\xd9', 'PNG': b'IEND\xae\x42\x60\x82'}

# Pillow warns of an image beyond its limit and takes it up to twice that; here it's an error.
warnings.filterwarnings('ignore', category=Image.DecompressionBombWarning)


def decode(
  file: str | IO[bytes], *, channels: int, size: int | None, formats: tuple[str, ...] = FORMATS
) -> np.ndarray:
  """Decode an image as it is stored. EXIF's orientation is ignored, as in TFDS.

  Memory beyond the stored pixels and one converted copy grows with `size` alone.

  Args:
    file: a path, or a file open for reading.
    channels: 1 (gray) or 3 (RGB). Other kinds are converted: 16 bits to the nearest of 8, transparent pixels to their
      look on white.
    size: height and width of the result in pixels. The shorter side is resized to `size` (bilinear, antialiased), and
      the center is cut out. None keeps the image as it is.
    formats: Pillow's names of the formats to try.

  Returns:
    uint8 [height, width, channels].

  Raises:
    ValueError: samples have 32 bits, and their range is unknown. Pillow raises other errors on damaged data.
  """
  with Image.open(file, formats=formats) as image:
    return _to_array(image, channels, size)


def _to_array(image: Image.Image, channels: int, size: int | None) -> np.ndarray:
  mode = _MODES[channels]
  fitted = _convert(image, mode) if size is None else _fit(image, mode, size)
  return np.asarray(fitted, dtype=np.uint8).reshape(fitted.height, fitted.width, channels)


def _convert(image: Image.Image, mode: str) -> Image.Image:
  """Convert an image to L or RGB, 8 bits a sample, a tile at a time."""
  if image.mode == mode and not image.has_transparency_data:
    return image
  width, height = image.size
  if max(width, height) <= _TILE:
    return _convert_tile(image, mode)
  converted = Image.new(mode, image.size)
  for top, left in itertools.product(range(0, height, _TILE), range(0, width, _TILE)):
    box = left, top, min(left + _TILE, width), min(top + _TILE, height)
    converted.paste(_convert_tile(_crop(image, box), mode), box)
  return converted


def _convert_tile(image: Image.Image, mode: str) -> Image.Image:
  if image.mode.startswith('I;16') or (image.mode == 'I' and image.format == 'PPM'):
    # Pillow would cut off at 255. 65535 / 255 = 257; PPM's samples Pillow has brought to 0 … 65535.
    return Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8)).convert(mode)
  if image.mode in ('I', 'F'):
    raise ValueError('samples of 32 bits, not 8 or 16')
  if image.has_transparency_data:
    rgba = image.convert('RGBA')  # What lies under transparent pixels is anything.
    return Image.alpha_composite(Image.new('RGBA', rgba.size, 'white'), rgba).convert(mode)
  return image.convert(mode)


def _crop(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
  """Crop an image. Keep its format, because a conversion asks for it."""
  part = image.crop(box)
  part.format = image.format
  return part


def _fit(image: Image.Image, mode: str, size: int) -> Image.Image:
  """Convert an image, resize its shorter side to `size` and cut out the center."""
  if image.size == (size, size):
    return _convert(image, mode)
  short, long = sorted(image.size)
  width, height = (max(size, round(side * (size / short))) for side in image.size)
  left, top = (width - size) // 2, (height - size) // 2
  if long <= _MOST_ASPECT * short:
    resized = _convert(image, mode).resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))
  x, y = _Span.of(left, size, width, image.width), _Span.of(top, size, height, image.height)
  middle = _convert(_crop(image, (x.first, y.first, x.last, y.last)), mode)
  return middle.resize((size, size), Image.Resampling.BILINEAR, box=(x.start, y.start, x.stop, y.stop))


class _Span(NamedTuple):
  """A side of the box that becomes the center of a resized image.

  Attributes:
    first: the first pixel that the center needs.
    last: the pixel behind the last one.
    start: start of the box, in pixels from `first`.
    stop: end of the box, in pixels from `first`.
  """

  first: int
  last: int
  start: float
  stop: float

  @classmethod
  def of(cls, offset: int, size: int, resized: int, side: int) -> Self:
    """Return the span that becomes `size` pixels from `offset` on when `side` pixels become `resized`."""
    scale = side / resized
    start, stop = offset * side / resized, (offset + size) * side / resized
    reach = math.ceil(max(scale, 1)) + 1  # Bilinear weights reach so far beyond the box.
    first, last = max(0, math.floor(start) - reach), min(side, math.ceil(stop) + reach)
    return cls(first, last, start - first, stop - first)


def decode_file(path: str, *, channels: int, size: int | None) -> np.ndarray:
  """Decode a user's own file with `decode`, upright as EXIF says.

  Raises:
    UserError: `path` is no image of `FORMATS`, is damaged, or has more than `MOST_PIXELS`.
  """
  with _opened(path) as image:
    ImageOps.exif_transpose(image, in_place=True)
    return _to_array(image, channels, size)


def check_file(path: str) -> None:
  """Find foreign, too large and cut-off files; what no end mark shows to be whole is decoded.

  Damage within a JPEG or PNG that has its end mark is not found: that would take as long as an epoch of decoding.

  Raises:
    UserError: as for `decode_file`.
  """
  with _opened(path) as image:
    end = _ENDS.get(image.format or '')
    if end is None or not _ends_with(path, end):
      image.load()


def _ends_with(path: str, end: bytes) -> bool:
  with open(path, 'rb') as file:
    file.seek(-min(len(end), os.path.getsize(path)), os.SEEK_END)
    return file.read() == end


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
  """Open a user's own image, whose pixels are read in the block; see `decode_file` for the errors."""
  with _explained(path), Image.open(path, formats=FORMATS) as image:
    if image.width * image.height > MOST_PIXELS:
      raise ValueError(f'{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}')
    yield image


def read_file(path: str) -> bytes:
  """Return the content of an image file.

  Raises:
    UserError: it cannot be read.
  """
  with _explained(path), open(path, 'rb') as file:
    return file.read()


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
  """Turn whatever Pillow raises inside the block into a `UserError` that names `path`."""
  try:
    yield
  except Exception as error:  # Pillow's plugins raise anything on damaged data, SyntaxError and struct.error too.
    reason = ' '.join(str(error).split())
    raise UserError(
      f'{path} is not an image that can be read ({reason}); expected a whole file of the formats '
      f'{", ".join(FORMATS)}, of at most {MOST_PIXELS:,} pixels: replace, convert or remove it'
    ) from error


def content(encoded: bytes, channels: int) -> bytes:
  """Return what doesn't depend on who encoded an image: the pixels of a PNG, else the file itself."""
  if not encoded.startswith(b'\x89PNG'):
    return encoded
  return decode(io.BytesIO(encoded), channels=channels, size=None, formats=('PNG',)).tobytes()


def encode_png(image: np.ndarray) -> bytes:
  """Encode uint8 [height, width, channels] (1 or 3 channels) as PNG, without loss."""
  buffer = io.BytesIO()
  to_pillow(image).save(buffer, format='PNG')
  return buffer.getvalue()


def to_pillow(image: np.ndarray) -> Image.Image:
  """Return an image, uint8 [height, width, 1 or 3], as a Pillow image, gray or RGB."""
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
