"""Files that are written whole or not at all."""

import contextlib
import glob
import os
import pathlib
import re
import time
import uuid
from collections.abc import Iterator
from typing import IO

# A draft that nobody has written to for this long was left by a process that is gone.
_STALE_SECONDS = 24 * 3600


@contextlib.contextmanager
def draft(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Open a new file to write, beside `path`. At the end of the context, it replaces the file at `path`.

  After a crash, even of the machine, `path` has either the old file or the complete new file. After an error in the
  context, it has the old file, and the draft is removed. Drafts that killed processes left are removed after a day.

  Raises:
    OSError: the file cannot be written.
  """
  _remove_stale(path)
  temporary = path.with_name(f'{path.name}.{uuid.uuid4().hex[:8]}.tmp')  # another process may write the same file
  try:
    with open(temporary, 'xb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise


def is_draft(path: pathlib.Path, *names: str) -> bool:
  """Return True for a file that a killed call of `draft` left, if it was to get one of these names."""
  found = re.fullmatch(r'(.+)\.[0-9a-f]{8}\.tmp', path.name)
  return found is not None and found[1] in names


def _remove_stale(path: pathlib.Path) -> None:
  for other in path.parent.glob(f'{glob.escape(path.name)}.*.tmp'):
    with contextlib.suppress(OSError):  # another process may remove it, too
      if is_draft(other, path.name) and time.time() - other.stat().st_mtime > _STALE_SECONDS:
        other.unlink()
