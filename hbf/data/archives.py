"""Archives that data sets come in: downloading, and saying what is wrong with one."""

import contextlib
import dataclasses
import gzip
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import IO

import rich.console
import rich.progress

from hbf.errors import UserError

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Archive:
  """The archive of a data set.

  Attributes:
    path: the local file.
    url: where the archive is published.
  """

  path: str
  url: str

  def error(self, reason: str) -> UserError:
    """Returns the error that says what is wrong with the file, as in 'lacks train.bin'."""
    expected = os.path.basename(self.url)
    return UserError(f'{self.path} {reason}; expected {expected} as published: download it again from {self.url}')

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    """Turns what the standard library raises on a missing, damaged or foreign file into a `UserError`."""
    try:
      yield
    except FileNotFoundError:
      raise self.error('does not exist') from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
      raise self.error(f'is cut off, damaged or another kind of file ({" ".join(str(error).split())})') from error


def read_tar(archive: Archive, names: Collection[str]) -> dict[str, bytes]:
  """Reads some members of a .tar.gz archive.

  Args:
    archive: the archive.
    names: of the members.

  Returns:
    The content of every member of `names`.

  Raises:
    UserError: the file is missing, damaged, no such archive or lacks a member.
  """
  contents = {}
  with archive.reading(), gzip.open(archive.path) as unpacked:
    with tarfile.open(fileobj=unpacked, mode='r:') as tar:
      for member in tar:
        file = tar.extractfile(member) if member.name in names else None
        if file is not None:
          contents[member.name] = file.read()
    while unpacked.read(_CHUNK_BYTES):  # Only at its end does gzip compare the checksum.
      pass
  missing = sorted(set(names) - set(contents))
  if missing:
    raise archive.error(f'lacks {missing[0]}')
  return contents


def download(url: str, directory: str) -> str:
  """Downloads a file unless `directory` has it already.

  Args:
    url: of the file.
    directory: where it goes; made if need be. Nothing is left there if the download fails.

  Returns:
    The path of the file.

  Raises:
    UserError: the file can't be fetched or written.
  """
  path = os.path.join(directory, os.path.basename(url))
  if os.path.exists(path):
    return path
  try:
    os.makedirs(directory, exist_ok=True)
    with _temporary(directory) as file:
      _fetch(url, file)
      os.replace(file.name, path)
  except OSError as error:
    raise UserError(
      f'{url} could not be downloaded ({error}); expected {os.path.basename(url)} in {directory}: try again, or '
      'download it by other means and name it with --archive'
    ) from error
  return path


@contextlib.contextmanager
def _temporary(directory: str) -> Iterator[IO[bytes]]:
  """Makes a file that is gone after the block unless it was renamed."""
  with tempfile.NamedTemporaryFile(dir=directory, prefix='incomplete.', delete=False) as file:
    try:
      yield file
    finally:
      with contextlib.suppress(FileNotFoundError):
        os.remove(file.name)


def _fetch(url: str, file: IO[bytes]) -> None:
  """Copies the content of `url` to `file`, showing progress."""
  with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
    total = int(response.headers.get('Content-Length', 0))
    console = rich.console.Console(stderr=True)
    with rich.progress.wrap_file(response, total, description=os.path.basename(url), console=console) as body:
      shutil.copyfileobj(body, file, _CHUNK_BYTES)
  file.flush()
  if total and file.tell() != total:
    raise OSError(f'got {file.tell()} of {total} bytes')
