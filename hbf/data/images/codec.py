"""Decoding of images to uint8 arrays, and encoding of such arrays, with Pillow."""

import contextlib
import io
import itertools
import math
import os
import warnings
from collections.abc import Iterator
from typing import IO, NamedTuple, Self

import numpy as np
from PIL import ExifTags, Image

from hbf.errors import UserError

# Pillow supports more formats. Some are not safe to open: for EPS, Pillow starts Ghostscript.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'TIFF', 'BMP', 'GIF', 'PPM')
# The formats that TFDS stores. Pillow opens a small image faster if it tries fewer formats.
TFDS_FORMATS = ('PNG', 'JPEG', 'GIF', 'BMP')
MOST_PIXELS = 89_478_485  # Pillow's limit: 256 MiB as RGB, in each thread that decodes.

_MODES = {1: 'L', 3: 'RGB'}
_TILE = 1024  # Side of a tile in pixels. Tiles save memory, because a conversion makes several copies.
# An image whose long side is more than this many times its short side is cropped before it is resized, to save
# memory. Other images are resized whole: a crop's position is rounded, which changes some pixels by a level.
_MOST_ASPECT = 16
# How to turn an image upright, by the orientation that its EXIF data say. 1 stands for upright.
_TURNS = {
  2: Image.Transpose.FLIP_LEFT_RIGHT,
  3: Image.Transpose.ROTATE_180,
  4: Image.Transpose.FLIP_TOP_BOTTOM,
  5: Image.Transpose.TRANSPOSE,
  6: Image.Transpose.ROTATE_270,
  7: Image.Transpose.TRANSVERSE,
  8: Image.Transpose.ROTATE_90,
}
_ENDS = {'JPEG': b'\xff\xd9', 'MPO': b'\xff\xd9', 'PNG': b'IEND\xae\x42\x60\x82'}  # last bytes of a whole file
_STARTS = {'JPEG': b'\xff\xd8\xff', 'PNG': b'\x89PNG\r\n\x1a\n'}

# Pillow only warns of an image beyond its limit, up to twice the limit. `_open` raises an error instead.
warnings.filterwarnings('ignore', category=Image.DecompressionBombWarning)


def decode(
  file: str | IO[bytes], *, channels: int, size: int | None, formats: tuple[str, ...] = FORMATS
) -> np.ndarray:
  """Decode an image. Ignore EXIF's orientation, as TFDS does.

  Args:
    file: a path, or a file open for reading.
    channels: channels of the result, 1 (gray) or 3 (RGB). Images of other kinds are converted. Gray levels of 16
      bits are rounded to 8 bits. Of colors of 16 bits, and of gray levels with opacity, Pillow keeps the high byte.
      Transparent pixels get a white background.
    size: height and width of the result in pixels. The shorter side is resized to `size` (bilinear, antialiased), and
      the square in the center is cut out. None keeps the stored size.
    formats: Pillow's names of the formats to try.

  Returns:
    uint8 [height, width, channels].

  Raises:
    ValueError: the image has levels of 32 bits, whose range is unknown.
    Exception: the data are damaged. Pillow then raises errors of any type.
  """
  with Image.open(file, formats=formats) as image:
    return _to_array(image, channels, size)


def _to_array(image: Image.Image, channels: int, size: int | None) -> np.ndarray:
  mode = _MODES[channels]
  fitted = _convert(image, mode) if size is None else _fit(image, mode, size)
  return np.asarray(fitted, dtype=np.uint8).reshape(fitted.height, fitted.width, channels)


def _convert(image: Image.Image, mode: str) -> Image.Image:
  """Convert an image to Pillow's mode L or RGB of 8 bits. To save memory, convert large images in tiles."""
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
    # Pillow would clip at 255. Samples are 0 … 65535 here, for PPM too, and 65535 / 255 = 257.
    levels = np.asarray(image, np.uint32)
    rounded = np.where(levels == image.info.get('transparency', -1), 255, (levels + 128) // 257)
    return Image.fromarray(rounded.astype(np.uint8)).convert(mode)
  if image.mode in ('I', 'F'):
    raise ValueError('samples of 32 bits, not 8 or 16')
  if image.has_transparency_data:
    rgba = image.convert('RGBA')  # A transparent pixel may have any color, so it is put on white.
    return Image.alpha_composite(Image.new('RGBA', rgba.size, 'white'), rgba).convert(mode)
  return image.convert(mode)


def _crop(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
  part = image.crop(box)
  part.format = image.format  # Pillow's crop has none, and `_convert_tile` reads it.
  return part


def _fit(image: Image.Image, mode: str, size: int) -> Image.Image:
  """Convert an image to a mode, resize its shorter side to `size`, and cut out the square in the center."""
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
  """An interval along one axis of an image, and the pixels that are needed to resize it.

  Attributes:
    first: index of the first pixel that is needed.
    last: index of the last pixel that is needed, plus one.
    start: start of the interval, in pixels from `first`.
    stop: end of the interval, in pixels from `first`.
  """

  first: int
  last: int
  start: float
  stop: float

  @classmethod
  def of(cls, offset: int, size: int, resized: int, side: int) -> Self:
    """Return the interval of an axis that becomes the pixels `offset`, …, `offset` + `size` − 1 of the resized axis.

    The axis has `side` pixels before and `resized` pixels after the resizing.
    """
    scale = side / resized
    start, stop = offset * side / resized, (offset + size) * side / resized
    reach = math.ceil(max(scale, 1)) + 1  # distance that bilinear weights reach beyond the interval
    first, last = max(0, math.floor(start) - reach), min(side, math.ceil(stop) + reach)
    return cls(first, last, start - first, stop - first)


def decode_file(path: str, *, channels: int, size: int | None, content: bytes | None = None) -> np.ndarray:
  """Decode a user's own image file, and rotate the image as its EXIF data say.

  Args:
    path: path of the file.
    channels: as in `decode`.
    size: as in `decode`.
    content: an encoded image that is decoded in place of the file. `path` is then only its name in messages.

  Returns:
    uint8 [height, width, channels].

  Raises:
    UserError: the file is not an image in one of the `FORMATS`, is damaged, or has more than `MOST_PIXELS`.
  """
  with _open(path, content) as image:
    return _to_array(_upright(image), channels, size)


def _upright(image: Image.Image) -> Image.Image:
  """Return an image, turned upright as its EXIF data say.

  `ImageOps.exif_transpose` turns it too, but it also writes the EXIF data anew. This fails if another entry is wrong.
  """
  image.load()  # EXIF data may follow the pixels.
  turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
  return image if turn is None else image.transpose(turn)


def resize(image: np.ndarray, size: int) -> np.ndarray:
  """Resize an image, uint8 [height, width, 1 or 3], to a square with sides of `size` pixels, as `decode` does."""
  return _to_array(to_pillow(image), image.shape[-1], size)


def check_file(path: str, content: bytes | None = None) -> None:
  """Raise UserError if an image file is damaged; see `decode_file` for the arguments.

  A JPEG or PNG counts as complete if it ends with the end mark of its format. All other images are decoded. Damage
  inside a JPEG or PNG is not found, because decoding every file would take as long as an epoch.

  Raises:
    UserError: see `decode_file`.
  """
  with _open(path, content) as image:
    end = _ENDS.get(image.format or '')
    if end is None or not (_last_bytes(path, len(end)) if content is None else content).endswith(end):
      image.load()


def is_whole(first: bytes, last: bytes) -> bool:
  """Return True if the first 8 bytes and the last 8 bytes of a file are those of a complete JPEG or PNG."""
  return any(first.startswith(start) and last.endswith(_ENDS[kind]) for kind, start in _STARTS.items())


def _last_bytes(path: str, count: int) -> bytes:
  with open(path, 'rb') as file:
    file.seek(-min(count, os.path.getsize(path)), os.SEEK_END)
    return file.read()


class _Content(io.BytesIO):
  """An encoded image in memory. Pillow's errors call it 'content', and not by its address in memory."""

  def __repr__(self) -> str:
    return "'content'"


@contextlib.contextmanager
def _open(path: str, content: bytes | None = None) -> Iterator[Image.Image]:
  """Open a user's own image file, or its `content` if given.

  Errors in the `with` statement become a `UserError` that names `path`.
  """
  file = path if content is None else _Content(content)
  with explain_errors(path), Image.open(file, formats=FORMATS) as image:
    if image.width * image.height > MOST_PIXELS:
      raise ValueError(f'{image.width} x {image.height} pixels, more than {MOST_PIXELS:,}')
    yield image


def read_file(path: str) -> bytes:
  """Return the content of an image file.

  Raises:
    UserError: the file can't be read.
  """
  with explain_errors(path), open(path, 'rb') as file:
    return file.read()


@contextlib.contextmanager
def explain_errors(path: str) -> Iterator[None]:
  """Turn every error in the `with` statement into a `UserError` that names `path`."""
  try:
    yield
  except Exception as error:  # Pillow raises errors of any type on damaged data, even SyntaxError and struct.error.
    reason = ' '.join(str(error).split())
    raise UserError(
      f'{path} is not an image that can be read ({reason}); expected a whole file of the formats '
      f'{", ".join(FORMATS)}, of at most {MOST_PIXELS:,} pixels: replace, convert or remove it'
    ) from error


def content(encoded: bytes, channels: int) -> bytes:
  """Return the bytes of an encoded image that enter a fingerprint.

  For a PNG these are its pixels, decoded with 1 or 3 `channels`, because programs encode the same pixels differently.
  For other formats these are the encoded bytes.
  """
  if not encoded.startswith(b'\x89PNG'):
    return encoded
  return decode(io.BytesIO(encoded), channels=channels, size=None, formats=('PNG',)).tobytes()


def encode_png(image: np.ndarray) -> bytes:
  """Encode an image, uint8 [height, width, 1 or 3], as PNG."""
  buffer = io.BytesIO()
  to_pillow(image).save(buffer, format='PNG')
  return buffer.getvalue()


def to_pillow(image: np.ndarray) -> Image.Image:
  """Return an image, uint8 [height, width, 1 or 3], as a gray or RGB image of Pillow."""
  return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
