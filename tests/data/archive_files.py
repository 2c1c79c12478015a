"""Small archives and encoded images, for tests of data."""

import io
import tarfile
import zipfile

from PIL import Image


def write_tar(path, members):
  """Write a .tar.gz whose members have these names and contents."""
  with tarfile.open(path, 'w:gz', compresslevel=1) as tar:
    for name, content in members.items():
      entry = tarfile.TarInfo(name)
      entry.size = len(content)
      tar.addfile(entry, io.BytesIO(content))
  return str(path)


def write_zip(path, members):
  """Write a .zip whose members have these names and contents."""
  with zipfile.ZipFile(path, 'w') as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  return str(path)


def encode(pixels, kind):
  """Encode an image: uint8 [H, W] or [H, W, 3]."""
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, format=kind)
  return buffer.getvalue()
