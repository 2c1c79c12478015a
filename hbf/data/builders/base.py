"""Base classes of the TFDS builders in this package."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A mixin for a builder that downloads nothing. It precedes TFDS's class in the list of bases."""

  # TFDS would look for checksums beside this path. That search needs a package that TFDS does not install.
  code_path = None


class FromArchive(Local):
  """A mixin for a builder that reads a local archive. It precedes TFDS's class in the list of bases.

  Builders check the layout, the sizes and the labels, not the checksum. An archive that was packed again is accepted.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
