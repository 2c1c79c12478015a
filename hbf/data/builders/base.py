"""Base classes of the TFDS builders in this package."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A mixin for a builder that downloads nothing. Put it before TFDS's class in the list of base classes."""

  # With a path, TFDS would look for checksums beside it. That search needs a package that TFDS does not install.
  code_path = None


class FromArchive(Local):
  """A mixin for a builder that reads a local archive. Put it before TFDS's class in the list of base classes.

  A builder checks the layout, the sizes and the labels of the archive, but not its checksum. So a user may unpack an
  archive and pack it again.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
