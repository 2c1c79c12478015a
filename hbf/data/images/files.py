"""Listing of a user's folders, and checksums of files."""

import hashlib
import os
from pathlib import Path

from hbf.errors import UserError


def list_folder(folder: Path) -> tuple[list[str], list[str]]:
  """Return the sorted names of the subfolders in a folder, and of the files in it. Leave out hidden entries.

  Raises:
    UserError: the folder can't be read, a name isn't UTF-8, or an entry is neither folder nor file.
  """
  try:
    with os.scandir(folder) as entries:
      visible = sorted((entry for entry in entries if not entry.name.startswith('.')), key=lambda entry: entry.name)
  except OSError as error:
    raise UserError(
      f'{folder} cannot be read ({error.strerror}); expected a readable folder: change its permissions'
    ) from None
  folders, files = [], []
  for entry in visible:
    if not _is_utf8(entry.name):
      shown = os.fsencode(entry.name).decode(errors='backslashreplace')
      raise UserError(f'{folder}/{shown} has a name that is not UTF-8; expected a name in UTF-8: rename it')
    if entry.is_dir():
      folders.append(entry.name)
    elif entry.is_file():
      files.append(entry.name)
    else:
      raise UserError(
        f'{entry.path} is neither a file nor a folder (perhaps a broken link); expected one of them: repair it, or '
        'remove it'
      )
  return folders, files


def _is_utf8(name: str) -> bool:
  try:
    name.encode()
  except UnicodeEncodeError:
    return False
  return True


def file_sha256(path: str | os.PathLike[str]) -> str:
  """Return the SHA-256 of a file's content, in hexadecimal. Raise OSError if the file can't be read."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
