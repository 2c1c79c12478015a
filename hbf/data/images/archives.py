"""Archives of data sets: download, reading and clear errors."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
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
class Published:
  """A published archive.

  Attributes:
    url: its address.
    sha256: SHA-256 of its bytes, in hexadecimal.
  """

  url: str
  sha256: str

  @property
  def name(self) -> str:
    """The name of the file."""
    return os.path.basename(self.url)


@dataclasses.dataclass(frozen=True)
class Archive:
  """The local archive of a data set. It may be packed again, because its checksum is not compared.

  Attributes:
    path: the local file.
    url: the address of the published archive.
  """

  path: str
  url: str

  def error(self, reason: str) -> UserError:
    """Return the error that says what is wrong with the file, as in 'lacks train.bin'."""
    expected = os.path.basename(self.url)
    return UserError(f'{self.path} {reason}; expected {expected} as published: download it again from {self.url}')

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    """Turn what the standard library raises on a missing, damaged or foreign file into a `UserError`."""
    try:
      yield
    except FileNotFoundError:
      raise self.error('does not exist') from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
      raise self.error(f'is cut off, damaged or another kind of file ({" ".join(str(error).split())})') from error


def read_tar(archive: Archive, names: Collection[str]) -> dict[str, bytes]:
  """Read some members of a .tar.gz archive.

  Args:
    archive: the archive.
    names: names of the members.

  Returns:
    The content of every member of `names`.

  Raises:
    UserError: the file is missing, damaged, no such archive, or lacks a member.
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


def download(published: Published, directory: str) -> str:
  """Download an archive unless `directory` has it already, whole and as published.

  Args:
    published: the archive.
    directory: the target folder, made if it is missing. Nothing is left there if the download fails.

  Returns:
    The path of the file.

  Raises:
    UserError: the file cannot be fetched or written, or is not the published one.
  """
  path = os.path.join(directory, published.name)
  try:
    os.makedirs(directory, exist_ok=True)
    if not os.path.exists(path) or _sha256(path) != published.sha256:
      with _temporary(directory) as file:
        _fetch(published, file)
        os.replace(file.name, path)
  except (OSError, http.client.HTTPException) as error:
    raise UserError(
      f'{published.url} could not be downloaded ({error}); expected {published.name} in {directory}: try again, or '
      'download it by other means and name it with --archive'
    ) from error
  return path


@contextlib.contextmanager
def _temporary(directory: str) -> Iterator[IO[bytes]]:
  """Make a file that is gone after the block unless it was renamed."""
  with tempfile.NamedTemporaryFile(dir=directory, prefix='incomplete.', delete=False) as file:
    try:
      yield file
    finally:
      with contextlib.suppress(FileNotFoundError):
        os.remove(file.name)


def _fetch(published: Published, file: IO[bytes]) -> None:
  """Copy an archive to `file`, showing progress.

  Raises:
    OSError: the archive cannot be fetched, breaks off, or is not the published one.
  """
  with urllib.request.urlopen(published.url, timeout=_TIMEOUT_SECONDS) as response:
    total = int(response.headers.get('Content-Length', 0))
    console = rich.console.Console(stderr=True)
    with rich.progress.wrap_file(response, total, description=published.name, console=console) as body:
      shutil.copyfileobj(body, file, _CHUNK_BYTES)
  file.flush()
  if total and file.tell() != total:
    raise OSError(f'got {file.tell()} of {total} bytes')
  found = _sha256(file.name)
  if found != published.sha256:
    raise OSError(f'got a file of SHA-256 {found}, not {published.sha256}')


def _sha256(path: str) -> str:
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
