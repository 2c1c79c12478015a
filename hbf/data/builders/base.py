"""Shared parts of the TFDS builders."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A mixin for builders that download nothing. It stands before TFDS's class."""

  # From its path TFDS would look for checksums of downloads, with a package that it needs but doesn't install.
  code_path = None


class FromArchive(Local):
  """A mixin for builders that read a local archive. It stands before TFDS's class.

  The checksum of the archive is not compared, but its layout, sizes and labels are. So an archive that was packed
  again can be used.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
