"""Examples of a user's own sources, checked as they are read."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from hbf.data.images import sources
from hbf.data.images.dataset import Dataset
from hbf.data.images.sources import Labeled, Source, Stamped, Target
from hbf.data.images.targets import CLASSES, LABELS
from hbf.errors import UserError


@dataclasses.dataclass(frozen=True)
class CheckedSource:
  """A `Source` that raises UserError for an image or a target that does not fit its data set.

  Attributes:
    source: the user's source.
    about: the name of the data set and of the split, for messages.
    image_shape: height, width and channels of every image.
    count: the number of classes, labels or values.
    targets: the kind of the targets, see `Dataset`.
  """

  source: Source
  about: tuple[str, str]
  image_shape: tuple[int, int, int]
  count: int
  targets: str

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    image, target = self.source[index]
    return self._checked(index, image, target)

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, Target]]:
    """Return image and target of each of the examples `indices`, int [n]; see `Batched`."""
    for index, (image, target) in zip(indices, sources.read(self.source, indices), strict=True):
      yield self._checked(int(index), image, target)

  def check(self, indices: np.ndarray) -> None:
    """Check the files of the examples `indices`, int [n]; see `Checkable`."""
    sources.check(self.source, indices)

  def fingerprint_parts(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return bytes for the fingerprint of the user's source; see `Stored`."""
    return sources.fingerprint_parts(self.source, sample)

  def stamp(self) -> bytes:
    """Return the stamp of the user's source, or nothing if it has none; see `Stamped`."""
    return self.source.stamp() if isinstance(self.source, Stamped) else b''

  def _checked(self, index: int, image: Any, target: Any) -> tuple[np.ndarray, Target]:
    found = f'{getattr(image, "dtype", type(image).__name__)} {list(np.shape(image))}'
    if found != (expected := f'uint8 {list(self.image_shape)}'):
      raise self._error('an image', f'is {found}; expected {expected}', index)
    self.check_target(index, target)
    return image, target

  def check_target(self, index: int, target: Any) -> None:
    """Raise UserError unless the target of example `index` fits the data set."""
    if self.targets == CLASSES:
      if np.shape(target) or target not in range(self.count):
        raise self._error('a label', f'is {target!r}; expected a whole number up to {self.count - 1}', index)
      return
    if np.shape(target) != (self.count,):
      raise self._error('a label', f'has shape {list(np.shape(target))}; expected [{self.count}]', index)
    kept, expected = (
      (np.isin(target, (0, 1)), '0 or 1') if self.targets == LABELS else (np.isfinite(target), 'finite')
    )
    if not np.all(kept):
      raise self._error('a label', f'is {np.asarray(target).tolist()}; expected numbers that are {expected}', index)

  def _error(self, what: str, fault: str, index: int) -> UserError:
    name, split = self.about
    return UserError(f'{what} of {name} {fault}: change the source (example {index} of {split})')


class LabeledCheckedSource(CheckedSource):
  """A `CheckedSource` whose source can return all targets without decoding images."""

  def read_labels(self) -> np.ndarray:
    """Return the target of every example; see `Labeled`. `checked` has checked each of them.

    Raises:
      UserError: the source returns another number of targets than it has images, or rows of different lengths.
    """
    name, split = self.about
    try:
      labels = np.asarray(sources.labels(self.source))
    except ValueError:
      raise UserError(
        f'the labels of {name} in {split} have different lengths; expected one shape: change read_labels of the '
        'source'
      ) from None
    if np.shape(labels)[:1] != (len(self),):
      raise UserError(
        f'the labels of {name} in {split} have shape {list(labels.shape)}; expected {len(self)}, one for each image: '
        'change read_labels of the source'
      )
    return labels


def checked(dataset: Dataset) -> Dataset:
  """Return a data set whose examples are checked as they are read.

  The first example of each split is checked now, and all targets of sources that return them without images.

  Raises:
    UserError: one of them does not fit. The message has its index.
  """
  splits: dict[str, CheckedSource] = {}
  for split, source in dataset.splits.items():
    kind = LabeledCheckedSource if isinstance(source, Labeled) else CheckedSource
    found = kind(source, (dataset.name, split), dataset.image_shape, len(dataset.classes), dataset.targets)
    _ = found[0]
    if isinstance(found, LabeledCheckedSource):
      for index, target in enumerate(found.read_labels()):
        found.check_target(index, target)
    splits[split] = found
  return dataclasses.replace(dataset, splits=splits)
