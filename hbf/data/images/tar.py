"""Images in tar files as WebDataset writes them. They are read from the tar files without unpacking."""

import contextlib
import dataclasses
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from hbf.data.images import codec
from hbf.data.images.dataset import Dataset
from hbf.data.images.encoded import EncodedSource, labeled_dataset
from hbf.data.images.splits import find_shards
from hbf.data.pipeline.host import THREADS
from hbf.data.registry import DataRequest
from hbf.errors import UserError

_IMAGES = ('jpg', 'jpeg', 'png', 'webp', 'tif', 'tiff', 'bmp', 'gif', 'ppm', 'pgm')
# The label in a member with this ending.
_LABELS: dict[str, Callable[[bytes], Any]] = {'cls': int, 'json': lambda content: json.loads(content)['label']}
_BLOCK = 512  # bytes in a block of a tar file


@dataclasses.dataclass(frozen=True, eq=False)
class TarSource(EncodedSource):
  """A `Source` of images in tar files.

  Attributes:
    paths: paths of the tar files.
    names: name of each image in its tar file, [n].
    spans: for each image, the index of its tar file in `paths`, the position of its first byte in this file, and its
      number of bytes, int [n, 3].
    labels: class of each image, int [n].
    size: as in `EncodedSource`.
    shape: as in `EncodedSource`.
  """

  paths: tuple[str, ...]
  names: tuple[str, ...]
  spans: np.ndarray
  labels: np.ndarray
  size: int | None = None
  shape: tuple[int, int] | None = None

  def name(self, index: int) -> str:
    """Return the path of a tar file and the name of the image in it."""
    return f'{self.paths[self.spans[index, 0]]}: {self.names[index]}'

  @override
  def content(self, index: int) -> bytes:
    return self._read(index, 0, int(self.spans[index, 2]))

  def check_one(self, index: int) -> None:
    """Check an image. For a JPEG or PNG, only its first and its last bytes are read."""
    length = int(self.spans[index, 2])
    if not codec.is_whole(self._read(index, 0, 8), self._read(index, max(length - 8, 0), length)):
      super().check_one(index)

  @override
  def facts(self) -> Iterator[bytes]:
    for label, name, size in zip(self.labels, self.names, self.spans[:, 2], strict=True):
      yield f'{label} {name} {size}'.encode()

  def _read(self, index: int, start: int, stop: int) -> bytes:
    number, first, length = map(int, self.spans[index])
    with codec.explain_errors(self.name(index)), open(self.paths[number], 'rb') as file:
      file.seek(first + start)
      return file.read(min(stop, length) - start)


class _Member(NamedTuple):
  """An image in a tar file: its name, start in bytes, length in bytes, and class as the file stores it."""

  name: str
  start: int
  length: int
  label: Any


def open_tars(request: DataRequest) -> Dataset:
  """Open the images in train-*.tar and in the tar files of the other splits, and read the classes of all images.

  An image is a member KEY.jpg, KEY.png or KEY with the ending of another format. Its class is the number in the
  member KEY.cls, or the entry "label" of the member KEY.json, a number or a name. Other members are not used.

  Raises:
    UserError: a file is missing, cut off, compressed or not a tar file, or an image has no class or a wrong one.
  """
  shards = find_shards(request, 'tar')
  with futures.ThreadPoolExecutor(THREADS) as pool:
    members = {split: list(pool.map(_index, paths)) for split, paths in shards.items()}
  unlabeled = {split: _source(shards[split], found) for split, found in members.items()}
  stored = {split: [member.label for shard in found for member in shard] for split, found in members.items()}
  return labeled_dataset(request, unlabeled, stored, None)


def _source(paths: tuple[str, ...], shards: list[list[_Member]]) -> TarSource:
  """Return the source of a split. Its `labels` are −1, until `labeled_dataset` replaces them.

  Args:
    paths: the tar files of the split.
    shards: for each tar file, its images.
  """
  names = tuple(member.name for shard in shards for member in shard)
  spans = [(number, member.start, member.length) for number, shard in enumerate(shards) for member in shard]
  return TarSource(paths, names, np.array(spans, np.int64), np.full(len(names), -1))


def _index(path: str) -> list[_Member]:
  """Return the images of a tar file in their order, with their classes. The content of images is not read."""
  images: dict[str, tarfile.TarInfo] = {}
  labels: dict[str, dict[str, bytes]] = {}  # content by ending by key
  with _explain_errors(path), tarfile.open(path, 'r:') as tar:
    for member in tar:
      # The key is the name up to the first point after the folders.
      parts = re.fullmatch(r'((?:.*/)?[^./]+)\.([^/]*)', member.name)
      key, ending = (parts[1], parts[2].lower()) if parts and member.isreg() else ('', '')
      if ending in _LABELS and (file := tar.extractfile(member)):
        labels.setdefault(key, {})[ending] = file.read()
      elif ending in _IMAGES:
        if not _is_unicode(member.name):
          raise _wrong(f'{path}: {member.name!a}', 'is not UTF-8', 'a name in UTF-8')
        if key in images:
          raise _wrong(f'{path}: {member.name}', f'has the key of {images[key].name}', 'one image for each key')
        images[key] = member
    # At a damaged header, `tarfile` ends without an error. But a whole file has a block of zeros behind its members.
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(_BLOCK) != bytes(_BLOCK):
      raise tarfile.ReadError('no end mark')
  if not images:
    raise _wrong(path, 'has no image', f'KEY.jpg, KEY.png or another of {", ".join(_IMAGES)}')
  return [
    _Member(image.name, image.offset_data, image.size, _label(f'{path}: {image.name}', key, labels.get(key, {})))
    for key, image in images.items()
  ]


def _label(image: str, key: str, found: Mapping[str, bytes]) -> Any:
  """Return the class of an image as its tar file stores it, a number or a name.

  Args:
    image: path of the tar file and name of the image, for messages.
    key: KEY, the name of the image without its ending.
    found: content of KEY.cls and KEY.json by ending. If both are there, KEY.cls counts.
  """
  if not found:
    raise _wrong(image, 'has no label', f'{key}.cls with a number, or {key}.json with "label"')
  ending = min(found)
  try:
    label = _LABELS[ending](found[ending])
  except (ValueError, TypeError, KeyError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors.
    raise _wrong(image, f'has no label in {key}.{ending}', 'a whole number in .cls, "label" in .json') from None
  if isinstance(label, str) and not _is_unicode(label):
    raise _wrong(image, f'has the label {label!a}', 'a text of whole Unicode characters')
  return label


def _is_unicode(text: str) -> bool:
  """Return False if a text has a surrogate, a part of a character. Python reads bytes that are not UTF-8 as such."""
  try:
    return bool(text.encode())
  except UnicodeEncodeError:
    return False


def _wrong(name: str, reason: str, expected: str) -> UserError:
  return UserError(f'{name} {reason}; expected {expected}: write the tar file again')


@contextlib.contextmanager
def _explain_errors(path: str) -> Iterator[None]:
  """Turn errors of `tarfile` in the `with` statement into a `UserError` that names the file."""
  try:
    yield
  except (tarfile.TarError, OSError, EOFError) as error:
    raise UserError(
      f'{path} is cut off, damaged or another kind of file ({" ".join(str(error).split())}); expected a tar file '
      'that is not compressed: unpack it by gunzip, or copy it again'
    ) from error
