"""Data sets in memory, from a user's own arrays."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hbf.data.images import codec
from hbf.data.images.dataset import Dataset
from hbf.errors import UserError

NAME = 'arrays'  # name of the data set in a config


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayData:
  """Labeled images to train on and to test on, for `hbf.train`.

  Images of type uint8 are not copied. Do not change them during a run.

  Attributes:
    x_train: images [N, H, W, C] with one channel (gray) or three channels (RGB). They are uint8, or floats from 0 to
      1, which are rounded to 256 levels.
    y_train: labels of x_train, whole numbers [N] from 0 on.
    x_test: images of the same height, width and channels as x_train.
    y_test: labels of x_test.
    class_names: the name of each label. None: the names are the labels as text, from '0' to the largest in y_train.

  Raises:
    ValueError: an array has a wrong shape, type or range. The message names the array and the expected value.
  """

  x_train: np.ndarray
  y_train: np.ndarray
  x_test: np.ndarray
  y_test: np.ndarray
  class_names: Sequence[str] | None = None

  def __post_init__(self) -> None:
    """Check all arrays and convert them to uint8 and int64."""
    arrays, names = checked(
      {'train': (self.x_train, self.y_train), 'test': (self.x_test, self.y_test)}, self.class_names
    )
    (x_train, y_train), (x_test, y_test) = arrays['train'], arrays['test']
    values = {'x_train': x_train, 'y_train': y_train, 'x_test': x_test, 'y_test': y_test, 'class_names': names}
    for name, value in values.items():
      object.__setattr__(self, name, value)

  def __repr__(self) -> str:
    """Return a text with the sizes of the arrays, not their values."""
    shape, classes = '×'.join(map(str, self.x_train.shape[1:])), len(self.class_names or ())
    return f'ArrayData({len(self.x_train)} + {len(self.x_test)} images of {shape}, {classes} classes)'


@dataclasses.dataclass(frozen=True)
class ArraySource:
  """A source whose images are in memory; see `hbf.data.images.sources.Source`.

  Attributes:
    images: images, uint8 [N, H, W, C].
    labels: class of each image, int [N].
    size: height and width in pixels that every image is resized to. None keeps the stored size.
  """

  images: np.ndarray
  labels: np.ndarray
  size: int | None = None

  def __len__(self) -> int:
    return len(self.images)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    image = self.images[index]
    return image if self.size is None else codec.resize(image, self.size), int(self.labels[index])

  def read_labels(self) -> np.ndarray:
    """Return the class of every example, int [n]."""
    return self.labels

  def traits(self, sample: np.ndarray) -> Iterable[bytes]:
    """Return all labels and the images of the examples `sample` as bytes; see `hbf.data.images.sources.Stored`."""
    return (self.labels.tobytes(), self.images[sample].tobytes())


def from_arrays(data: ArrayData) -> Dataset:
  """Return a user's arrays as a data set."""
  arrays = {'train': (data.x_train, data.y_train), 'test': (data.x_test, data.y_test)}
  return as_dataset(NAME, data.class_names or (), arrays, None)


def as_dataset(
  name: str, classes: Sequence[str], arrays: Mapping[str, tuple[np.ndarray, np.ndarray]], size: int | None
) -> Dataset:
  """Return a data set of checked arrays by split. None keeps the size of the images."""
  height, width, channels = arrays['train'][0].shape[1:]
  splits = {split: ArraySource(images, labels, size) for split, (images, labels) in arrays.items()}
  return Dataset(name, tuple(classes), (size or height, size or width, channels), splits)


def checked(
  arrays: Mapping[str, tuple[Any, Any]], class_names: Sequence[str] | None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]:
  """Return images and labels by split as uint8 [N, H, W, C] and int64 [N], and the names of the classes.

  Args:
    arrays: images and labels by split; see `ArrayData`. One split is `train`.
    class_names: the name of each label. None: the names are '0', '1' and so on.

  Raises:
    UserError: an array has a wrong shape, type or range. The message names it x_SPLIT or y_SPLIT.
  """
  x_train = to_images('x_train', arrays['train'][0])
  shape = x_train.shape[1:]
  images = {
    split: x_train if split == 'train' else to_images(f'x_{split}', x, shape, 'as x_train')
    for split, (x, _) in arrays.items()
  }
  names = None if class_names is None else _names(class_names)
  y_train = _labels('y_train', arrays['train'][1], 'x_train', x_train, names)
  names = tuple(map(str, range(int(y_train.max()) + 1))) if names is None else names
  if len(names) < 2:
    raise UserError('y_train has label 0 only: expected two classes or more; every answer would be right')
  labels = {split: _labels(f'y_{split}', y, f'x_{split}', images[split], names) for split, (_, y) in arrays.items()}
  return {split: (images[split], labels[split]) for split in arrays}, names


def to_images(name: str, value: Any, shape: Sequence[int] | None = None, why: str = '') -> np.ndarray:
  """Return images as uint8 [N, H, W, C].

  Args:
    name: name of the argument, for messages.
    value: images as uint8, or as floats from 0 to 1.
    shape: required height, width and channels. None accepts any shape.
    why: reason for the required shape, for messages, such as 'as x_train'.

  Raises:
    UserError: the value has a wrong shape, type or range.
  """
  images = np.asarray(value)
  expected = '[N, H, W, C]' if shape is None else f'[N, {", ".join(map(str, shape))}], {why}'
  if images.ndim != 4 or 0 in images.shape or (shape is not None and images.shape[1:] != tuple(shape)):
    hint = f': add a channel axis, {name}[..., None]' if images.ndim == 3 and images.shape[-1] not in (1, 3) else ''
    raise UserError(f'{name} has shape {list(images.shape)}: expected {expected}{hint}')
  if images.shape[-1] not in (1, 3):
    raise UserError(f'{name} has {images.shape[-1]} channels: expected 1 (gray) or 3 (RGB) as the last axis')
  if images.dtype == np.uint8:
    return images
  if not np.issubdtype(images.dtype, np.floating):
    raise UserError(f'{name} has type {images.dtype}: expected uint8, or floats from 0 to 1')
  low, high = float(images.min()), float(images.max())
  if not (low >= 0 and high <= 1):  # The condition is written so that NaN fails it.
    raise UserError(
      f'{name} has values from {low:g} to {high:g}: expected floats from 0 to 1, or uint8. Rescale {name}'
    )
  return np.round(images * images.dtype.type(255)).astype(np.uint8)


def _labels(name: str, value: Any, images_name: str, images: np.ndarray, classes: Sequence[str] | None) -> np.ndarray:
  """Return labels as int64 [N]. Raise UserError if their number or range is wrong."""
  labels = np.asarray(value)
  if labels.shape != images.shape[:1]:
    hint = f': use {name}.ravel()' if labels.shape == (len(images), 1) else ''
    hint = f': use {name}.argmax(-1)' if labels.ndim == 2 and labels.shape[1] > 1 else hint
    raise UserError(
      f'{name} has shape {list(labels.shape)}: expected [{len(images)}], a label for each of {images_name}{hint}'
    )
  if not np.issubdtype(labels.dtype, np.integer):
    raise UserError(f'{name} has type {labels.dtype}: expected whole numbers, such as {name}.astype(int)')
  least, most = int(labels.min()), int(labels.max())
  if least < 0 or (classes is not None and most >= len(classes)):
    wrong = least if least < 0 else most
    expected = '0 or more' if classes is None else f'0 to {len(classes) - 1}, for {len(classes)} classes'
    raise UserError(f'{name} has label {wrong}: expected {expected}. Change the labels, or give class_names')
  return labels.astype(np.int64)


def _names(names: Any) -> tuple[str, ...]:
  """Return the names of classes as a tuple. Raise UserError unless there are two or more, all different."""
  wrong = isinstance(names, str) or not all(isinstance(name, str) for name in names)
  if wrong or len(set(names)) != len(names) or len(names) < 2:
    raise UserError(f'class_names is {names!r}: expected two texts or more, all different, one for each label')
  return tuple(names)
