"""Images that strangers send: they are checked, and decoded in memory."""

import struct
from collections.abc import Sequence

import numpy as np

from hbf.errors import UserError
from hbf.training.predict import read_image

NAME = 'the body'  # what errors call an upload

# First and last bytes of a whole file. Other formats have no mark at their end.
_MARKS = (
  ('PNG', b'\x89PNG', b'IEND\xae\x42\x60\x82'),
  ('JPEG', b'\xff\xd8\xff', b'\xff\xd9'),
  ('GIF', b'GIF8', b';'),
)
# The end record of a ZIP archive. It has the size of the directory before it, and a comment after it.
_ZIP_END, _ZIP_ENTRY, _ZIP_RECORD, _ZIP_COMMENT = b'PK\x05\x06', b'PK\x01\x02', 22, 2**16


def read_upload(content: bytes, shape: Sequence[int]) -> np.ndarray:
  """Return the image in an upload, uint8 [H, W, C]. `hbf predict` gets the same array from the same file.

  Args:
    content: the bytes of the upload.
    shape: height, width and channels of the result.

  Raises:
    UserError: the upload is empty, can't be read as an image, or has other data besides the image.
  """
  if not content:
    raise UserError(f'{NAME} is empty: send the bytes of an image file as the body of a POST request')
  check_only_image(content)
  return read_image(NAME, shape, content)


def check_only_image(content: bytes) -> None:
  """Raise `UserError` if a file is also a ZIP archive, or has other data after its image.

  Such a file has two meanings, and programs differ on which one they see. Zeros after an image are allowed, because
  cameras write them.
  """
  if _is_zip(content):
    raise UserError(f'{NAME} is a ZIP archive: send one image')
  for name, first, last in _MARKS:
    if content.startswith(first) and not content.rstrip(b'\0').endswith(last):
      raise UserError(f'{NAME} does not end where a {name} ends: it is cut off or has other data after the image')


def _is_zip(content: bytes) -> bool:
  """Return True if the content has the end record of a ZIP archive, with the archive's directory before it."""
  end = content.rfind(_ZIP_END, max(0, len(content) - _ZIP_RECORD - _ZIP_COMMENT))
  if end < 0 or len(content) - end < _ZIP_RECORD:
    return False
  count, size = struct.unpack_from('<HL', content, end + 10)
  return end == 0 or (count > 0 and size <= end and content[end - size :].startswith(_ZIP_ENTRY))
