"""Base classes of the TFDS builders in this package."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A mixin for a builder that downloads nothing. In the list of bases, it stands before TFDS's class."""

  # TFDS would look for checksums beside this path. That search needs a package that TFDS does not install.
  code_path = None


class FromArchive(Local):
  """A mixin for a builder that reads a local archive. In the list of bases, it stands before TFDS's class.

  A builder checks the layout, the sizes and the labels of the archive, but not its checksum. It therefore accepts an
  archive that a user has unpacked and packed again.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
