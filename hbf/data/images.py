"""Encoded images to uint8 arrays and back, with Pillow."""

import contextlib
import io
from collections.abc import Iterator
from typing import IO

import numpy as np
from PIL import Image

from hbf.errors import UserError

_MODES = {1: 'L', 3: 'RGB'}

# What TFDS stores. Naming the formats saves a third of the time that Pillow takes to open a small image.
TFDS_FORMATS = ('PNG', 'JPEG', 'GIF', 'BMP')


def decode(
  file: str | IO[bytes], *, channels: int, size: int | None, formats: tuple[str, ...] | None = None
) -> np.ndarray:
  """Decodes an image.

  Args:
    file: a path, or a file open for reading.
    channels: 1 (grey) or 3 (RGB); an image of another kind is converted.
    size: height and width in pixels to bring the image to: its shorter side is resized to `size` (bilinear,
      antialiased) and its centre cut out. None keeps the image as it is.
    formats: Pillow's names of the formats to try; None tries all.

  Returns:
    uint8 [height, width, channels].
  """
  with Image.open(file, formats=formats) as image:
    converted = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
    fitted = converted if size is None else _fit(converted, size)
    return np.asarray(fitted, dtype=np.uint8).reshape(fitted.height, fitted.width, channels)


def _fit(image: Image.Image, size: int) -> Image.Image:
  """Resizes the shorter side to `size` and cuts out the centre."""
  if image.size == (size, size):
    return image
  scale = size / min(image.size)
  width, height = (max(size, round(side * scale)) for side in image.size)
  resized = image.resize((width, height), Image.Resampling.BILINEAR)
  left, top = (width - size) // 2, (height - size) // 2
  return resized.crop((left, top, left + size, top + size))


def decode_file(path: str, *, channels: int, size: int | None) -> np.ndarray:
  """`decode` of a user's own file.

  Raises:
    UserError: `path` isn't an image, or a damaged one.
  """
  with _explained(path):
    return decode(path, channels=channels, size=size)


def check_file(path: str) -> None:
  """Decodes all of an image file at the least cost, which for a JPEG is a scale of 1/8.

  Raises:
    UserError: `path` isn't an image, or a damaged one.
  """
  with _explained(path), Image.open(path) as image:
    image.draft('RGB', (1, 1))
    image.load()


def read_file(path: str) -> bytes:
  """Returns the content of an image file.

  Raises:
    UserError: it can't be read.
  """
  with _explained(path), open(path, 'rb') as file:
    return file.read()


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
  """Turns whatever Pillow raises inside the block into a `UserError` that names `path`."""
  try:
    yield
  except Exception as error:  # Pillow's plugins raise anything on damaged data, SyntaxError and struct.error too.
    reason = ' '.join(str(error).split())
    raise UserError(
      f'{path} is not an image that Pillow can read ({reason}); expected a whole image file: replace or remove it'
    ) from error


def content(encoded: bytes, channels: int) -> bytes:
  """Returns what doesn't depend on who encoded an image: the pixels of a PNG, else the file itself."""
  if not encoded.startswith(b'\x89PNG'):
    return encoded
  return decode(io.BytesIO(encoded), channels=channels, size=None, formats=('PNG',)).tobytes()


def encode_png(image: np.ndarray) -> bytes:
  """Encodes uint8 [height, width, channels] (1 or 3 channels) as PNG, without loss."""
  squeezed = image[..., 0] if image.shape[-1] == 1 else image
  buffer = io.BytesIO()
  Image.fromarray(squeezed).save(buffer, format='PNG')
  return buffer.getvalue()
