"""Base classes of the TFDS builders in this package."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A mixin for a TFDS builder that downloads nothing. It keeps TFDS from searching for checksums of downloads.

  In the list of base classes, it comes before TFDS's class.
  """

  # With a path, TFDS would look for checksums beside it. That search needs a package that TFDS does not install.
  code_path = None


class FromArchive(Local):
  """A mixin for a TFDS builder that reads a local archive, which it stores as `_archive`.

  In the list of base classes, it comes before TFDS's class. A builder checks the layout of the archive, the sizes in
  it and the labels, but not its checksum. So a user may unpack an archive and pack it again.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
