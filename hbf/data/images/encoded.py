"""Sources of encoded images, such as the files of a folder, and the classes that their files name."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np

from hbf.data.images import codec
from hbf.data.images.dataset import Dataset
from hbf.data.images.sources import Target
from hbf.data.images.targets import CLASSES, MOST_CLASSES
from hbf.data.pipeline.host import THREADS
from hbf.data.registry import DataRequest
from hbf.errors import UserError

_PART = 1024  # number of images that a thread checks in one task. A task for each image would take much memory.


class EncodedSource(abc.ABC):
  """A `Source` of encoded images, read as RGB. A subclass is a dataclass that can read an encoded image.

  Attributes:
    labels: the targets of the images: a class for each image, [n], or K labels or K values for each, [n][K].
    size: height and width in pixels that every image is resized to. None keeps the stored size.
    shape: height and width that a stored image must have if `size` is None. None accepts every image.
  """

  labels: Sequence[int] | Sequence[tuple[float, ...]] | np.ndarray
  size: int | None
  shape: tuple[int, int] | None

  @abc.abstractmethod
  def name(self, index: int) -> str:
    """Return the name of an example for messages. It begins with the path of a file."""

  @abc.abstractmethod
  def content(self, index: int) -> bytes:
    """Return an encoded image. Raise UserError if it can't be read."""

  @abc.abstractmethod
  def facts(self) -> Iterable[bytes]:
    """Return facts about all examples as bytes, for the fingerprint of the data.

    The facts are quick to find, such as the sizes of files.
    """

  def decode(self, index: int) -> np.ndarray:
    """Return a decoded image, uint8 [height, width, 3]."""
    return codec.decode_file(self.name(index), channels=3, size=self.size, content=self.content(index))

  def check_one(self, index: int) -> None:
    """Raise UserError if the content of an image is cut off, or is not an image."""
    codec.check_file(self.name(index), self.content(index))

  def __len__(self) -> int:
    return len(self.labels)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    image = self.decode(index)
    if self.size is None and self.shape is not None and image.shape[:2] != self.shape:
      found, first = (f'{width}×{height}' for height, width in (image.shape[:2], self.shape))
      raise UserError(
        f'{self.name(index)} has {found} pixels and the first image has {first}; expected one size for all: set '
        'data.image_size, for example to 64'
      )
    label = self.labels[index]
    return image, label if isinstance(label, tuple) else int(label)

  def read_labels(self) -> np.ndarray:
    """Return the target of every image: classes, int [n], or labels or values, float32 [n, K]."""
    labels = np.array(self.labels)
    return labels.astype(np.int64 if labels.ndim == 1 else np.float32)

  def check(self, indices: np.ndarray) -> None:
    """Check the examples `indices`, int [n], for damage. If images are not resized, check their sizes too.

    Raises:
      UserError: an image can't be read or has another size. The message names its file.
    """
    check: Callable[[int], Any] = self.__getitem__ if self.size is None else self.check_one

    def check_part(start: int) -> None:
      for index in indices[start : start + _PART]:
        check(int(index))

    with futures.ThreadPoolExecutor(THREADS) as pool:
      for _ in pool.map(check_part, range(0, len(indices), _PART)):
        pass

  def fingerprint_parts(self, sample: np.ndarray) -> Iterator[bytes]:
    """Yield bytes for the fingerprint of the data; see `hbf.data.images.sources.Stored`.

    They are facts about all examples, and the encoded image of each example whose index is in `sample`, int [n].
    """
    yield from self.facts()
    with futures.ThreadPoolExecutor(THREADS) as pool:
      yield from pool.map(self.content, sample)


def as_dataset(name: str, classes: Sequence[str], splits: Mapping[str, Any], targets: str = CLASSES) -> Dataset:
  """Return the data set of the sources `splits`, which are `EncodedSource`s by split.

  If images are not resized, all must have the size of the first training image. See `Dataset` for the other
  arguments.
  """
  first = splits['train']
  height, width = (first.size, first.size) if first.size else first.decode(0).shape[:2]
  sized = {split: dataclasses.replace(source, shape=(height, width)) for split, source in splits.items()}
  return Dataset(name, tuple(classes), (height, width, 3), sized, targets=targets)


def labeled_dataset(
  request: DataRequest, sources: Mapping[str, Any], stored: Mapping[str, Sequence[Any]], names: Sequence[str] | None
) -> Dataset:
  """Return a data set of images with classes.

  Its sources are copies of `sources`. Their `labels` are the class numbers, and `request` gives their `size`.

  Args:
    request: the request for the data set, which has its name and the size of its images.
    sources: `EncodedSource`s by split. Their own `labels` and `size` are not used.
    stored: the class of each image as the files store it, by split; see `_number_classes`.
    names: names of the classes; see `_number_classes`.

  Raises:
    UserError: as for `_number_classes`.
  """
  classes, labels = _number_classes(stored, names, lambda split, index: sources[split].name(index))
  size = request.image_size
  labeled = {split: dataclasses.replace(source, labels=labels[split], size=size) for split, source in sources.items()}
  return as_dataset(request.name, classes, labeled)


def _number_classes(
  stored: Mapping[str, Sequence[Any]], names: Sequence[str] | None, where: Callable[[str, int], str]
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
  """Return the names of the classes, and the class of each example by split, int [n].

  Args:
    stored: the class of each example as the files store it, by split. All are whole numbers from 0 on, or all are
      names.
    names: names of the classes in the order of their numbers, if the files store numbers. None: the names are '0',
      '1' and so on, up to the largest number in `train`. If the files store names, this argument is not used, and
      the classes are the sorted names in `train`.
    where: a function from split and index to the name of an example for messages.

  Raises:
    UserError: a class is of another type, or is not a class of `train` or `names`. The message names the example. Or
      all examples of `train` have one class.
  """
  train = stored['train']
  kind = type(train[0])
  if kind is str:
    classes = tuple(sorted({label for label in train if type(label) is str}))
  else:
    largest = max((label for label in train if type(label) is int), default=0)
    classes = tuple(map(str, range(min(max(largest, 0), MOST_CLASSES) + 1) if names is None else names))
  number = {name if kind is str else at: at for at, name in enumerate(classes)}
  for split, labels in stored.items():
    for index, label in enumerate(labels):
      if kind not in (int, str) or type(label) is not kind or label not in number:
        known = f'one of the {len(classes)} classes of train' if kind is str else f'0 to {len(classes) - 1}'
        expected = known if type(label) in (int, str) else 'a whole number or a name'
        raise UserError(
          f'{where(split, index)} has the label {label!r}; expected {expected}: change the label, or remove the image'
        )
  if len(set(train)) < 2:
    raise UserError(
      f'{where("train", 0)} has the label {train[0]!r}, and so have all images of train; expected two classes or '
      'more: add images of another class'
    )
  return classes, {split: np.array([number[label] for label in labels], np.int64) for split, labels in stored.items()}
