"""Data sets in memory, from a user's own arrays."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hbf.data.images import codec
from hbf.data.images.dataset import Dataset
from hbf.data.images.sources import Target
from hbf.data.images.targets import CLASSES, LABELS, MOST_CLASSES, VALUES, check_labels, to_values
from hbf.errors import UserError

NAME = 'arrays'  # name of the data set in a config


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayData:
  """Images with their targets, to train on and to test on, for `hbf.train`.

  Targets are what a network learns to predict. The shape and the type of y_train decide the task,
  which the config must name, as in hbf.get_config('arrays', task='regression'):

  - task classification: the class of each image, whole numbers [N] from 0 on
  - task multi_label: K labels of each image, booleans or whole numbers 0 and 1, [N, K]
  - task regression: K values of each image, floats [N, K]

  Images of type uint8 are not copied. Do not change them during a run.

  Attributes:
    x_train: images [N, H, W, C] with one channel (gray) or three channels (RGB). They are uint8, or floats from 0 to
      1, which are rounded to 256 levels.
    y_train: the targets of x_train.
    x_test: images of the same height, width and channels as x_train.
    y_test: the targets of x_test, of the same kind as y_train.
    class_names: the name of each class, or of each of the K labels or values. None: the names are '0', '1' and so on.

  Raises:
    ValueError: an array has a wrong shape, type or range. The message names the array and the expected value.
  """

  x_train: np.ndarray
  y_train: np.ndarray
  x_test: np.ndarray
  y_test: np.ndarray
  class_names: Sequence[str] | None = None

  def __post_init__(self) -> None:
    """Check all arrays, and convert them to the types that `checked` returns."""
    arrays, names = checked(
      {'train': (self.x_train, self.y_train), 'test': (self.x_test, self.y_test)}, self.class_names
    )
    (x_train, y_train), (x_test, y_test) = arrays['train'], arrays['test']
    values = {'x_train': x_train, 'y_train': y_train, 'x_test': x_test, 'y_test': y_test, 'class_names': names}
    for name, value in values.items():
      object.__setattr__(self, name, value)

  @property
  def targets(self) -> str:
    """The kind of the targets: 'classes', 'labels' or 'values'."""
    return _kind(self.y_train)

  def __repr__(self) -> str:
    """Return a text with the sizes of the arrays, not their values."""
    shape, count = '×'.join(map(str, self.x_train.shape[1:])), len(self.class_names or ())
    return f'ArrayData({len(self.x_train)} + {len(self.x_test)} images of {shape}, {count} {self.targets})'


@dataclasses.dataclass(frozen=True)
class ArraySource:
  """A source whose images are in memory; see `hbf.data.images.sources.Source`.

  Attributes:
    images: images, uint8 [N, H, W, C].
    labels: target of each image: classes, int [N], or labels or values, [N, K].
    size: height and width in pixels that every image is resized to. None keeps the stored size.
  """

  images: np.ndarray
  labels: np.ndarray
  size: int | None = None

  def __len__(self) -> int:
    return len(self.images)

  def __getitem__(self, index: int) -> tuple[np.ndarray, Target]:
    return self._sized(self.images[index]), self.labels[index].tolist()

  def read(self, indices: np.ndarray) -> Iterable[tuple[np.ndarray, Target]]:
    """Return images and targets of the examples `indices`, int [n]; see `hbf.data.images.sources.Batched`."""
    return zip(map(self._sized, self.images[indices]), self.labels[indices].tolist(), strict=True)

  def _sized(self, image: np.ndarray) -> np.ndarray:
    return image if self.size is None else codec.resize(image, self.size)

  def read_labels(self) -> np.ndarray:
    """Return `labels`, the target of every example."""
    return self.labels

  def fingerprint_parts(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return bytes for the fingerprint of the data; see `hbf.data.images.sources.Stored`.

    They are the targets of all examples, and the images of the examples whose indices are in `sample`, int [n].
    """
    return (self.labels.tobytes(), self.images[sample].tobytes())

  def stamp(self) -> bytes:
    """Return a checksum of all images; see `hbf.data.images.sources.Stamped`."""
    return hashlib.sha256(np.ascontiguousarray(self.images).data).digest()


def from_arrays(data: ArrayData) -> Dataset:
  """Return a user's arrays as a data set."""
  arrays = {'train': (data.x_train, data.y_train), 'test': (data.x_test, data.y_test)}
  return as_dataset(NAME, data.class_names or (), arrays, None)


def as_dataset(
  name: str, classes: Sequence[str], arrays: Mapping[str, tuple[np.ndarray, np.ndarray]], size: int | None
) -> Dataset:
  """Return the data set of arrays that `checked` returned.

  Args:
    name: name of the data set.
    classes: the name of each class, label or value.
    arrays: images and targets by split.
    size: height and width in pixels that images are resized to. None keeps their size.
  """
  x_train, y_train = arrays['train']
  height, width, channels = x_train.shape[1:]
  splits = {split: ArraySource(images, labels, size) for split, (images, labels) in arrays.items()}
  return Dataset(name, tuple(classes), (size or height, size or width, channels), splits, targets=_kind(y_train))


def _kind(labels: np.ndarray) -> str:
  """Return the kind of the targets `labels`, which `checked` returned: CLASSES, LABELS or VALUES."""
  if labels.ndim == 1:
    return CLASSES
  return LABELS if labels.dtype == np.uint8 else VALUES


def checked(
  arrays: Mapping[str, tuple[Any, Any]], class_names: Sequence[str] | None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
  """Check a user's arrays and convert them. Return them, and the names of the classes, labels or values.

  The returned arrays are images and targets by split. The images are uint8 [N, H, W, C]. The targets are classes,
  int64 [N], or labels, uint8 [N, K], or values, float32 [N, K].

  Args:
    arrays: images and targets by split, as in `ArrayData`. One split is `train`.
    class_names: the name of each class, label or value. None: the names are '0', '1' and so on.

  Raises:
    UserError: an array has a wrong shape, type or range. The message calls the array x_SPLIT or y_SPLIT.
  """
  x_train = to_images('x_train', arrays['train'][0])
  shape = x_train.shape[1:]
  images = {
    split: x_train if split == 'train' else to_images(f'x_{split}', x, shape, 'as x_train')
    for split, (x, _) in arrays.items()
  }
  stored = {split: _rectangular(f'y_{split}', labels) for split, (_, labels) in arrays.items()}
  y = stored['train']
  # Whole numbers [N, 1] are classes with an axis too many, not one label of each image.
  is_vectors = y.ndim == 2 and (y.shape[1] > 1 or np.issubdtype(y.dtype, np.floating))
  names, labels = (_checked_vectors if is_vectors else _checked_classes)(stored, images, class_names)
  return {split: (images[split], labels[split]) for split in arrays}, names


def _rectangular(name: str, value: Any) -> np.ndarray:
  """Return targets as an array. Raise UserError if they have different shapes. `name` is for the message."""
  try:
    return np.asarray(value)
  except ValueError:
    raise UserError(
      f'{name} has rows of different lengths: expected a number, or K numbers, for each image'
    ) from None


def _checked_classes(
  stored: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray], class_names: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
  """Return the names of the classes, and the class of each image by split, int64 [N].

  `stored` has the user's classes, and `images` the checked images, by split.
  """
  names = None if class_names is None else _names(class_names)
  y_train = _class_numbers('y_train', stored['train'], 'x_train', images['train'], names)
  if y_train.min() == y_train.max():
    raise UserError(f'y_train has label {y_train[0]} only: expected two classes or more; every answer would be right')
  if names is None:
    if y_train.max() >= MOST_CLASSES:
      raise UserError(
        f'y_train has label {y_train.max()}: expected numbers of classes, below {MOST_CLASSES:,}. From other '
        'numbers, names, y_train = np.unique(y_train, return_inverse=True) makes them'
      )
    names = tuple(map(str, range(int(y_train.max()) + 1)))
  return names, {
    split: _class_numbers(f'y_{split}', y, f'x_{split}', images[split], names) for split, y in stored.items()
  }


def _checked_vectors(
  stored: Mapping[str, np.ndarray], images: Mapping[str, np.ndarray], class_names: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
  """Return the names of K labels or values, and the targets by split: labels uint8, or values float32, [N, K].

  `stored` has the user's labels or values, and `images` the checked images, by split.
  """
  width = stored['train'].shape[1]
  names = tuple(map(str, range(width))) if class_names is None else _names(class_names, least=1)
  if len(names) != width:
    raise UserError(f'class_names has {len(names)} names: expected {width}, one for each column of y_train')
  is_values = np.issubdtype(stored['train'].dtype, np.floating)
  return names, {
    split: _vectors(f'y_{split}', y, len(images[split]), width, is_values) for split, y in stored.items()
  }


def to_images(name: str, value: Any, shape: Sequence[int] | None = None, why: str = '') -> np.ndarray:
  """Return images as uint8 [N, H, W, C].

  Args:
    name: name of the array, for messages.
    value: images as uint8, or as floats from 0 to 1.
    shape: required height, width and channels. None accepts any shape.
    why: reason for the required shape, for messages, such as 'as x_train'.

  Raises:
    UserError: the value has a wrong shape, type or range.
  """
  try:
    images = np.asarray(value)
  except ValueError:
    raise UserError(f'{name} has images of different shapes: crop or resize them to one shape') from None
  expected = '[N, H, W, C]' if shape is None else f'[N, {", ".join(map(str, shape))}], {why}'
  if images.ndim != 4 or 0 in images.shape or (shape is not None and images.shape[1:] != tuple(shape)):
    raise UserError(f'{name} has shape {list(images.shape)}: expected {expected}{_hint(name, images, shape)}')
  if images.shape[-1] not in (1, 3):
    raise UserError(f'{name} has {images.shape[-1]} channels: expected 1 (gray) or 3 (RGB) as the last axis')
  if images.dtype == np.uint8:
    return images
  if not np.issubdtype(images.dtype, np.floating):
    raise UserError(f'{name} has type {images.dtype}: expected uint8, or floats from 0 to 1')
  low, high = float(images.min()), float(images.max())
  if math.isnan(low):
    raise UserError(f'{name} has values that are not numbers (NaN): expected floats from 0 to 1, or uint8')
  if not (low >= 0 and high <= 1):
    raise UserError(
      f'{name} has values from {low:g} to {high:g}: expected floats from 0 to 1, or uint8. Rescale {name}'
    )
  return np.round(images * images.dtype.type(255)).astype(np.uint8)


def _hint(name: str, images: np.ndarray, shape: Sequence[int] | None) -> str:
  """Return the end of the message about images of a wrong shape. The arguments are those of `to_images`."""
  if not images.size:
    return ', and N is 1 or more'
  if images.ndim != 3:
    return ''
  if images.shape[-1] in (1, 3) and shape in (None, images.shape):
    return f': for one image, give {name}[None]'
  return f': add a channel axis, {name}[..., None]' if shape is None or shape[-1] == 1 else ''


def _class_numbers(
  name: str, labels: np.ndarray, images_name: str, images: np.ndarray, classes: Sequence[str] | None
) -> np.ndarray:
  """Return the class numbers of N images as an array, int64 [N].

  Args:
    name: name of the array of class numbers, for messages.
    labels: the class numbers.
    images_name: name of the array of images, for messages.
    images: the images, [N, H, W, C].
    classes: names of the classes. None: any number of classes is allowed.

  Raises:
    UserError: the class numbers have a wrong shape, type or range.
  """
  if labels.shape != images.shape[:1]:
    hint = f': use {name}.ravel()' if labels.shape == (len(images), 1) else ''
    raise UserError(
      f'{name} has shape {list(labels.shape)}: expected [{len(images)}], a label for each of {images_name}{hint}'
    )
  if labels.dtype.kind in 'USO':
    raise UserError(
      f'{name} has type {labels.dtype}: expected whole numbers. With names, class_names, {name} = '
      f'np.unique({name}, return_inverse=True) gives the numbers'
    )
  if not np.issubdtype(labels.dtype, np.integer):
    raise UserError(
      f'{name} has type {labels.dtype}: expected whole numbers, such as {name}.astype(int). For task regression, '
      f'expected floats [{len(images)}, K], such as {name}[:, None]'
    )
  least, most = int(labels.min()), int(labels.max())
  if least < 0 or (classes is not None and most >= len(classes)):
    wrong = least if least < 0 else most
    expected = '0 or more' if classes is None else f'0 to {len(classes) - 1}, for {len(classes)} classes'
    raise UserError(f'{name} has label {wrong}: expected {expected}. Change the labels, or give class_names')
  return labels.astype(np.int64)


def _vectors(name: str, vectors: np.ndarray, count: int, width: int, is_values: bool) -> np.ndarray:
  """Return the labels or values of N images as an array of labels, uint8 [N, K], or of values, float32 [N, K].

  Args:
    name: name of the array, for messages.
    vectors: the labels or values.
    count: N, the number of images.
    width: K, the required number of labels or values of an image.
    is_values: True for values, False for labels.

  Raises:
    UserError: the array has a wrong shape, type or range.
  """
  if vectors.shape != (count, width) or not width:
    columns = width or 'K'
    raise UserError(f'{name} has shape {list(vectors.shape)}: expected [{count}, {columns}], a row for each image')
  if is_values:
    return to_values(name, vectors)
  if not (vectors.dtype == bool or np.issubdtype(vectors.dtype, np.integer)):
    raise UserError(f'{name} has type {vectors.dtype}: expected whole numbers 0 and 1, as in y_train')
  return check_labels(name, vectors)


def _names(names: Any, least: int = 2) -> tuple[str, ...]:
  """Return the names of classes, labels or values as a tuple.

  Raises:
    UserError: a name is not a text, two names are equal, or there are fewer than `least`.
  """
  if not are_names(names, least):
    some = {1: 'one text', 2: 'two texts'}[least]
    raise UserError(f'class_names is {names!r}: expected {some} or more, all different, one for each label')
  return tuple(names)


def are_names(names: Any, least: int = 1) -> bool:
  """Return True for a sequence of `least` or more texts, all different."""
  try:
    found = () if isinstance(names, str) else tuple(names)
  except TypeError:  # a single number, for example
    return False
  return len(found) >= least and all(isinstance(name, str) for name in found) and len(set(found)) == len(found)
