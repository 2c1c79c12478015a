"""Archives of data sets: download, reading and errors."""

import contextlib
import dataclasses
import gzip
import http.client
import os
import pathlib
import shutil
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import IO

import rich.console
import rich.progress

from hbf.data.images.files import file_sha256
from hbf.errors import UserError
from hbf.files import draft

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Published:
  """An archive as it is published.

  Attributes:
    url: address of the archive.
    sha256: SHA-256 of the file, in hexadecimal.
  """

  url: str
  sha256: str

  @property
  def name(self) -> str:
    """Return the name of the file."""
    return os.path.basename(self.url)


@dataclasses.dataclass(frozen=True)
class Archive:
  """The local archive of a data set. A user may have unpacked it and packed it again, so its checksum may differ.

  Attributes:
    path: the local file.
    url: address of the published archive.
  """

  path: str
  url: str

  def error(self, reason: str) -> UserError:
    """Return an error about the file. The message begins with its path and `reason`, such as 'lacks train.bin'."""
    expected = os.path.basename(self.url)
    return UserError(f'{self.path} {reason}; expected {expected} as published: download it again from {self.url}')

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    """Turn the errors of a missing, damaged or wrong file, raised in the `with` statement, into `UserError`."""
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
    UserError: the file is missing, damaged or not a .tar.gz archive, or it lacks a member.
  """
  contents = {}
  with archive.reading(), gzip.open(archive.path) as unpacked:
    with tarfile.open(fileobj=unpacked, mode='r:') as tar:
      for member in tar:
        file = tar.extractfile(member) if member.name in names else None
        if file is not None:
          contents[member.name] = file.read()
    while unpacked.read(_CHUNK_BYTES):  # gzip compares the checksum only at the end of the file.
      pass
  missing = sorted(set(names) - set(contents))
  if missing:
    raise archive.error(f'lacks {missing[0]}')
  return contents


def download(published: Published, directory: str) -> str:
  """Download an archive unless `directory` has the published file already.

  Args:
    published: the archive.
    directory: the folder to download to. It is made if it does not exist. A download that fails leaves no file.

  Returns:
    The path of the file.

  Raises:
    UserError: the file can't be fetched or written, or differs from the published file.
  """
  path = os.path.join(directory, published.name)
  try:
    os.makedirs(directory, exist_ok=True)
    if not os.path.exists(path) or file_sha256(path) != published.sha256:
      with draft(pathlib.Path(path)) as file:
        _fetch(published, file)
  except (OSError, http.client.HTTPException) as error:
    raise UserError(
      f'{published.url} could not be downloaded ({error}); expected {published.name} in {directory}: try again, or '
      'download it by other means and name it with --archive'
    ) from error
  return path


def _fetch(published: Published, file: IO[bytes]) -> None:
  """Copy a published archive to `file` and show progress.

  Raises:
    OSError: the archive can't be fetched, is cut off, or differs from the published file.
  """
  with urllib.request.urlopen(published.url, timeout=_TIMEOUT_SECONDS) as response:
    total = int(response.headers.get('Content-Length', 0))
    console = rich.console.Console(stderr=True)
    with rich.progress.wrap_file(response, total, description=published.name, console=console) as body:
      shutil.copyfileobj(body, file, _CHUNK_BYTES)
  file.flush()
  if total and file.tell() != total:
    raise OSError(f'got {file.tell()} of {total} bytes')
  found = file_sha256(file.name)
  if found != published.sha256:
    raise OSError(f'got a file of SHA-256 {found}, not {published.sha256}')
