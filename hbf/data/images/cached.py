"""Decoded images in files, which later runs read in place of the encoded images."""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from hbf.arguments import cache_folder
from hbf.data.images import sources
from hbf.data.images.dataset import Dataset
from hbf.data.images.sources import Labeled, Source, Stamped, Target
from hbf.data.pipeline import host
from hbf.data.pipeline.identity import identity
from hbf.errors import UserError
from hbf.files import draft

_TARGETS = '.targets.npy'  # ending of the file of the targets, in place of .npy
_PART = 1024  # number of images in memory while a file is written


@dataclasses.dataclass(frozen=True)
class CachedSource:
  """A `Source` whose decoded images are read from a .npy file. It has the fingerprint of the original source.

  Attributes:
    source: the original source.
    labels: target of each image: classes, int [n], or labels or values, [n, K].
    path: the file of all images, uint8 [n, H, W, C].
  """

  source: Source
  labels: np.ndarray
  path: str

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    return np.array(self._images[index]), self.labels[index].tolist()

  def __getstate__(self) -> dict[str, Any]:
    """Pickle the fields only. Another process opens the file of images itself."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def read_labels(self) -> np.ndarray:
    """Return `labels`, the target of every image."""
    return self.labels

  def fingerprint_parts(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return bytes for the fingerprint of the data, from the examples `sample`, int [n], of the original source.

    See `hbf.data.images.sources.Stored`.
    """
    return sources.fingerprint_parts(self.source, sample)

  @functools.cached_property
  def _images(self) -> np.ndarray:
    return np.load(self.path, mmap_mode='r')


def through_cache(dataset: Dataset, directory: str) -> Dataset:
  """Return a data set whose images are read from files in a folder. Write files that are missing.

  The files are in DIRECTORY/NAME-SHAPE-FINGERPRINT, so changed data, or images of another size, get files of their
  own. If sources are `Stamped`, a checksum of their stamps follows. A file gets its name only when it is complete.

  Raises:
    UserError: an image can't be read, or the folder is no local one, can't be written or has a damaged file.
  """
  shape = 'x'.join(map(str, dataset.image_shape))
  checksums = [identity(dataset)['fingerprint'][:32], *_stamps(dataset)]
  folder = cache_folder(directory) / '-'.join([dataset.name, shape, *checksums])
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: folder / f'{split}.npy' for split in dataset.splits}
    for split, source in dataset.splits.items():
      if not files[split].exists():
        sources.check(source, np.arange(len(source)))  # finds a damaged image before hours of decoding
    splits = {split: _through_file(source, str(files[split])) for split, source in dataset.splits.items()}
  except OSError as error:
    raise UserError(
      f'{folder} cannot be used ({error}); expected a folder with room for all decoded images: set data.cache to '
      'another folder, or to an empty text'
    ) from error
  return dataclasses.replace(dataset, splits=splits)


def _stamps(dataset: Dataset) -> list[str]:
  """Return a checksum of the stamps of the splits, in a list. [] if there is no stamp."""
  stamps = [source.stamp() for _, source in sorted(dataset.splits.items()) if isinstance(source, Stamped)]
  return [hashlib.sha256(b''.join(stamps)).hexdigest()[:16]] if any(stamps) else []


def _through_file(source: Source, path: str) -> CachedSource:
  if not os.path.exists(path):
    _write(source, path)
  cached = CachedSource(source, _labels(source, path), path)
  try:
    found = cached._images.shape
  except (ValueError, EOFError):
    found = ()
  if found != (len(source), *host.image_shape(source)):
    raise UserError(f'{path} is damaged; expected the images of {len(source)} examples: remove it')
  return cached


def _labels(source: Source, path: str) -> np.ndarray:
  """Return the target of every example, from a file beside the images if the source would have to decode them."""
  if isinstance(source, Labeled):
    return source.read_labels()
  file = pathlib.Path(path).with_suffix(_TARGETS)
  if not file.exists():  # an earlier version wrote the images
    _write_labels(sources.labels(source), file)
  try:
    labels = np.load(file)
  except (ValueError, EOFError):
    labels = np.empty(0)
  if len(labels) != len(source):
    raise UserError(f'{file} is damaged; expected the targets of {len(source)} examples: remove it')
  return labels.astype(np.int64 if labels.ndim == 1 else np.float32)


def _write_labels(labels: np.ndarray, file: pathlib.Path) -> None:
  with draft(file) as target:
    np.save(target, labels)


def _write(source: Source, path: str) -> None:
  """Write all images of a source to a .npy file, and the targets beside it if the source would decode them again."""
  shape, target_shape = host.image_shape(source), np.shape(source[0][1])
  labels = []
  with draft(pathlib.Path(path)) as file:
    # A file that is mapped to memory would end the process, without a message, if the disk becomes full.
    header = {'descr': '|u1', 'fortran_order': False, 'shape': (len(source), *shape)}
    np.lib.format.write_array_header_1_0(file, header)
    for start in range(0, len(source), _PART):
      indices = np.arange(start, min(start + _PART, len(source)))
      images, targets = host.read_many(source, indices, shape, target_shape)
      file.write(images.tobytes())
      labels.append(targets)
    if not isinstance(source, Labeled):
      _write_labels(np.concatenate(labels), pathlib.Path(path).with_suffix(_TARGETS))
