"""Random access to labeled images: the protocol of every data set, and parts of a source."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from hbf.data.pipeline import order
from hbf.errors import UserError

# Any number does, but changing it changes which examples every run holds out.
_HOLD_OUT_SEED = 143


class Source(Protocol):
  """Labeled images of one shape, by number. It can be pickled, and many threads may read it at once."""

  def __len__(self) -> int:
    """Return the number of examples."""

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    """Return the image, uint8 [height, width, channels], and the label of example `index`."""


@runtime_checkable
class Checkable(Protocol):
  """A source of files that have not been checked yet."""

  def check(self, indices: np.ndarray) -> None:
    """Read the examples `indices`, int [n].

    Raises:
      UserError: one can't be read; the message names its file.
    """


@runtime_checkable
class Batched(Protocol):
  """A source that reads many examples faster than one after another."""

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, int]]:
    """Return the examples `indices`, int [n]."""


@runtime_checkable
class Labeled(Protocol):
  """A source that knows labels without decoding images."""

  def read_labels(self) -> np.ndarray:
    """Return the class of every example, int [n]."""


@runtime_checkable
class Stored(Protocol):
  """A source of encoded images. Its traits do not depend on the size that images are brought to."""

  def traits(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return what tells this source from others: what is cheap of all examples, and all of those in `sample`.

    Args:
      sample: examples, int [n].
    """


@dataclasses.dataclass(frozen=True)
class Blank:
  """Black images of a shape, of class 0. They stand for a data set that is not there."""

  count: int
  image_shape: tuple[int, int, int]

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    return np.zeros(self.image_shape, np.uint8), 0

  def read_labels(self) -> np.ndarray:
    """Return zeros; see `Labeled`."""
    return np.zeros(self.count, np.int64)


@dataclasses.dataclass(frozen=True)
class Subset:
  """The examples `indices`, int [n], of `source`, in that order."""

  source: Source
  indices: np.ndarray

  def __len__(self) -> int:
    return len(self.indices)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    return self.source[int(self.indices[index])]

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, int]]:
    """Return the examples `indices`, int [n], of this subset; see `Batched`."""
    return read(self.source, self.indices[indices])

  def check(self, indices: np.ndarray) -> None:
    """Check the examples `indices`, int [n], of this subset; see `Checkable`."""
    check(self.source, self.indices[indices])


def read(source: Source, indices: np.ndarray) -> Iterable[tuple[np.ndarray, int]]:
  """Return the examples `indices`, int [n], the fastest way that the source has."""
  return source.read(indices) if isinstance(source, Batched) else (source[int(index)] for index in indices)


def check(source: Source, indices: np.ndarray) -> None:
  """Find damaged files among the examples `indices`, int [n], if the source can hold any.

  Raises:
    UserError: an example can't be read; the message names its file.
  """
  if isinstance(source, Checkable):
    source.check(indices)


def traits(source: Source, sample: np.ndarray) -> Iterable[bytes]:
  """Return what tells a source from others, from the examples `sample`, int [n], at least; see `Stored`."""
  if isinstance(source, Stored):
    return source.traits(sample)
  return (part for image, label in read(source, sample) for part in (str(label).encode(), image.tobytes()))


def labels(source: Source) -> np.ndarray:
  """Return the class of every example, int [n], the cheapest way that the source has."""
  if isinstance(source, Labeled):
    return source.read_labels()
  return np.array([label for _, label in read(source, np.arange(len(source)))], np.int64)


def hold_out(source: Source, fraction: float, stratify: bool) -> tuple[Subset, Subset]:
  """Split a source into a part to train on and a part to validate on.

  The split is pseudo-random but fixed: it depends on the number of examples, `fraction` and, if stratified, the
  labels, not on a run's seed. Both ways hold out the same number of examples.

  Args:
    source: to be split.
    fraction: of the examples that go to validation, in [0, 1); with 0 that part is empty.
    stratify: hold out the same fraction of every class, rounded up or down to whole examples.

  Returns:
    (train, validation), each in the order of `source`.

  Raises:
    UserError: `fraction` is out of range.
  """
  if not 0 <= fraction < 1:
    raise UserError(f'validation fraction {fraction}: expected 0 (none) or more, and below 1; set one in that range')
  shuffled = order.permutation(_HOLD_OUT_SEED, 0, len(source))
  held = round(fraction * len(source))
  is_held = np.arange(len(source)) < held
  if stratify and held:
    shuffled = shuffled[np.argsort(labels(source)[shuffled], kind='stable')]
    # Of examples in the order of their classes every (n / held)th is taken.
    is_held = np.diff(np.arange(len(source) + 1) * held // len(source)) > 0
  return Subset(source, np.sort(shuffled[~is_held])), Subset(source, np.sort(shuffled[is_held]))
