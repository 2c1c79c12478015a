"""What the TFDS builders of this project share."""

from typing import Any

from hbf.data.images import archives


class Local:
  """A builder that downloads nothing; a mixin, to stand before TFDS's class."""

  # From its path TFDS would look for checksums of downloads, with a package that it needs but doesn't install.
  code_path = None


class FromArchive(Local):
  """A builder that reads a local archive; a mixin, to stand before TFDS's class.

  Checksums aren't compared: layout, sizes and labels are, so an archive packed anew is welcome.
  """

  def __init__(self, *, archive: archives.Archive, **kwargs: Any):
    self._archive = archive
    super().__init__(**kwargs)
