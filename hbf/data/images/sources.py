"""Sources: random access to images with their targets, and subsets of a source.

The target of an image (`Target`) is the number of its class, or a vector of K labels or values. Functions and
variables call targets of every kind `labels`.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from hbf.data.pipeline import order
from hbf.errors import UserError

# The value is arbitrary. Another value changes the examples that every run holds out.
_HOLD_OUT_SEED = 143

Target = int | Sequence[float] | np.ndarray


class Source(Protocol):
  """Images of one shape with their targets, by index. A source can be pickled, and several threads can use it."""

  def __len__(self) -> int:
    """Return the number of examples."""

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    """Return the image, uint8 [height, width, channels], and the target of example `index`."""


@runtime_checkable
class Checkable(Protocol):
  """A source that can check its files for damage."""

  def check(self, indices: np.ndarray) -> None:
    """Check the files of the examples `indices`, int [n].

    Raises:
      UserError: an example can't be read. The message names its file.
    """


@runtime_checkable
class Batched(Protocol):
  """A source that can read many examples in one call, faster than one by one."""

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, Target]]:
    """Return image and target of each of the examples `indices`, int [n]."""


@runtime_checkable
class Labeled(Protocol):
  """A source that can return all targets without decoding images."""

  def read_labels(self) -> np.ndarray:
    """Return the target of every example: classes, int [n], or labels or values, [n, K]."""


@runtime_checkable
class Stored(Protocol):
  """A source whose fingerprint does not depend on the size that its images are resized to."""

  def fingerprint_parts(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return bytes from which a fingerprint of the source is computed.

    The bytes contain the targets and the stored images of the examples `sample`. They may also contain facts about
    all examples, if these are quick to find, such as the sizes of files.

    Args:
      sample: indices of examples, int [n].
    """


@runtime_checkable
class Stamped(Protocol):
  """A source that can tell quickly that images have changed which its fingerprint does not cover."""

  def stamp(self) -> bytes:
    """Return bytes that change if the stored images change.

    They depend neither on the location of the data nor on the size that images are resized to.
    """


@dataclasses.dataclass(frozen=True)
class Blank:
  """A source of black images of class 0, as a substitute for a data set that is not prepared."""

  count: int
  image_shape: tuple[int, int, int]

  def __len__(self) -> int:
    return self.count

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    return np.zeros(self.image_shape, np.uint8), 0

  def read_labels(self) -> np.ndarray:
    """Return the class 0 for every example; see `Labeled`."""
    return np.zeros(self.count, np.int64)


@dataclasses.dataclass(frozen=True)
class Subset:
  """A source of some examples of another source. `indices`, int [n], selects the examples and gives their order."""

  source: Source
  indices: np.ndarray

  def __len__(self) -> int:
    return len(self.indices)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    return self.source[int(self.indices[index])]

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, Target]]:
    """Return image and target of each of the examples `indices`, int [n], of this subset; see `Batched`."""
    return read(self.source, self.indices[indices])

  def read_labels(self) -> np.ndarray:
    """Return the target of every example of this subset; see `Labeled`."""
    return labels(self.source)[self.indices]

  def check(self, indices: np.ndarray) -> None:
    """Check the examples `indices`, int [n], of this subset; see `Checkable`."""
    check(self.source, self.indices[indices])


def read(source: Source, indices: np.ndarray) -> Iterable[tuple[np.ndarray, Target]]:
  """Return image and target of each of the examples `indices`, int [n], by the fastest method that the source has."""
  return source.read(indices) if isinstance(source, Batched) else (source[int(index)] for index in indices)


def check(source: Source, indices: np.ndarray) -> None:
  """Check the examples `indices`, int [n], for damage if the source can be checked (`Checkable`).

  Raises:
    UserError: an example can't be read. The message names its file.
  """
  if isinstance(source, Checkable):
    source.check(indices)


def fingerprint_parts(source: Source, sample: np.ndarray) -> Iterable[bytes]:
  """Return bytes from which the fingerprint of a source is computed; see `Stored`.

  The bytes depend at least on the examples `sample`, int [n].
  """
  if isinstance(source, Stored):
    return source.fingerprint_parts(sample)
  return (part for image, label in read(source, sample) for part in (str(label).encode(), image.tobytes()))


def labels(source: Source) -> np.ndarray:
  """Return the target of every example: classes, int [n], or labels or values, [n, K].

  Use the fastest method that the source has.
  """
  if isinstance(source, Labeled):
    return source.read_labels()
  found = np.array([label for _, label in read(source, np.arange(len(source)))])
  return found.astype(np.int64 if found.ndim == 1 else np.float32)


def hold_out(source: Source, fraction: float, stratify: bool) -> tuple[Subset, Subset]:
  """Split a source into a training part and a validation part.

  The split is pseudo-random but fixed. It depends on the number of examples, on `fraction` and, with `stratify`, on
  the classes. It does not depend on a run's seed. `stratify` does not change the number of examples in a part.

  Args:
    source: the source to split.
    fraction: fraction of the examples that goes to validation, in [0, 1). 0 makes the validation part empty.
    stratify: True to hold out the same fraction of every class, rounded to whole examples.

  Returns:
    (train, validation), each in the order of `source`.

  Raises:
    UserError: `fraction` is out of range.
  """
  if not 0 <= fraction < 1:
    raise UserError(f'the validation fraction is {fraction}; expected 0 (none) or more, and below 1: change it')
  shuffled = order.permutation(_HOLD_OUT_SEED, 0, len(source))
  held = round(fraction * len(source))
  is_held = np.arange(len(source)) < held
  if stratify and held:
    shuffled = shuffled[np.argsort(labels(source)[shuffled], kind='stable')]
    # The examples are sorted by class. Every (n / held)th of them is held out.
    is_held = np.diff(np.arange(len(source) + 1) * held // len(source)) > 0
  return Subset(source, np.sort(shuffled[~is_held])), Subset(source, np.sort(shuffled[is_held]))
