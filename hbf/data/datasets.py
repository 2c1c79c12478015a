"""Data sets of images by name. The rest of the library opens images only through this module."""

import dataclasses
import os
from collections.abc import Mapping

from etils import epath

from hbf.data.images import folder, prepare, prepared
from hbf.data.images.arrays import NAME, ArrayData, ArraySource
from hbf.data.images.sources import Blank, Source
from hbf.data.images.targets import CLASSES, CSV
from hbf.errors import UserError


@dataclasses.dataclass(frozen=True)
class Dataset:
  """Labeled images.

  Attributes:
    name: name of the data set.
    classes: the name of each class, as the data set stores it. Or the name of each label or value, see `targets`.
    image_shape: height, width and channels of every image.
    splits: the sources of examples, with the keys `train` and `test`, and `validation` if the data set has its own
      validation split. These are the keys even if the splits have other names in the data set.
    names: readable names of classes by stored name, for data sets whose stored names are ids such as n01443537.
    targets: the kind of the labels, see `hbf.data.images.targets`.
  """

  name: str
  classes: tuple[str, ...]
  image_shape: tuple[int, int, int]
  splits: Mapping[str, Source]
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  targets: str = CLASSES

  @property
  def class_names(self) -> tuple[str, ...]:
    """Return a readable name of each label."""
    return tuple(self.names.get(name, name) for name in self.classes)


def load(
  *,
  name: str,
  dir: str,
  root: str,
  image_size: int | None,
  download: bool,
  test_split: str = 'test',
  validation_split: str = '',
  targets: str = CLASSES,
) -> Dataset:
  """Open a data set.

  Args:
    name: one of `hbf.data.images.prepare.PREPARATIONS`, any data set of labeled images that TFDS has prepared in
      `dir`, or `image_folder`.
    dir: the TFDS data directory, local or on a bucket. `~` is the home directory. `image_folder` does not use it.
    root: the folder of an `image_folder`, with the images train/CLASS/* and test/CLASS/*. Other data sets ignore it.
    image_size: height and width of the images in pixels. The shorter side of an image is resized to this length, and
      the square in the center is cut out. 0 or None keeps the stored images, which must then all have one size. An
      `image_folder` needs a number.
    download: True to download and prepare a data set that is not in `dir`. The data set `digits` needs no download
      and is always prepared.
    test_split: the data set's own name of the labeled split to test on.
    validation_split: the data set's own name of a labeled split to validate on. '': there is none.
    targets: the kind of the labels, see `hbf.data.images.targets`. An `image_folder` may have any kind. Other data
      sets have classes.

  Raises:
    UserError: the data set is unknown, not prepared or damaged, or its examples are not labeled images of one size.
      The message says what to do.
  """
  refuse_test_on_train(test_split)
  _refuse_shared_validation(validation_split, test_split)
  used = {'train': 'train', 'test': test_split}
  if validation_split:
    used['validation'] = validation_split
  if name == NAME:
    raise UserError('the data set is arrays in memory, not in a folder: give the arrays as data=hbf.ArrayData(…)')
  if name == 'image_folder':
    classes, splits = folder.open_folder(root, image_size, used, targets)
    opened = Dataset(name, classes, (splits['train'].size, splits['train'].size, 3), splits, targets=targets)
  elif targets != CLASSES:
    raise UserError(
      f'{name} has classes, not {targets}; expected task classification for it. For {targets}, take image_folder '
      f'with files {CSV[targets]}, or hbf.ArrayData'
    )
  else:
    directory = os.path.expanduser(dir)
    found = prepare.found_or_prepared(name, directory, download)
    opened = _open_prepared(name, found, used, image_size or None)
  if targets == CLASSES and len(opened.classes) < 2:
    raise UserError(
      f'{root or name} has one class only, {opened.classes[0]}; expected two or more: every answer would be right'
    )
  return opened


def refuse_test_on_train(test_split: str) -> None:
  """Raise UserError if the test split contains the training split, as 'train' and 'train+test' do."""
  if 'train' in test_split.split('+'):
    raise UserError(
      f'data.test_split is {test_split!r}; expected examples that the run is not trained on: set it to another split'
    )


def _refuse_shared_validation(validation_split: str, test_split: str) -> None:
  """Raise UserError if the validation split shares examples with the training split or the test split."""
  for part in validation_split.split('+'):
    if part and part in ('train', *test_split.split('+')):
      raise UserError(
        f'data.validation_split {validation_split!r} has {part}, which the run also '
        f"{'trains' if part == 'train' else 'tests'} on: set it to another split, or to '' and hold out a part of "
        'train by data.validation'
      )


def from_arrays(data: ArrayData) -> Dataset:
  """Return a user's arrays as a data set."""
  splits = {'train': ArraySource(data.x_train, data.y_train), 'test': ArraySource(data.x_test, data.y_test)}
  height, width, channels = data.x_train.shape[1:]
  return Dataset(NAME, tuple(data.class_names or ()), (height, width, channels), splits, targets=data.targets)


def describe(name: str, dir: str, image_size: int | None) -> Dataset | None:
  """Return a data set of black images, as a substitute for a data set that is not prepared.

  The number and the size of the images are those of the data set. Return None if the data set is prepared, or if
  number and size are not known before the preparation. See `load` for the arguments.

  Raises:
    UserError: the images vary in size, and no `image_size` is given.
  """
  entry = prepare.MANUAL.get(name) or prepare.PREPARATIONS.get(name)
  known = entry.images if entry else None
  if known is None or prepared.find(name, os.path.expanduser(dir)):
    return None
  shape = _image_shape(name, known.image_shape, image_size)
  splits = {split: Blank(count, shape) for split, count in known.examples.items()}
  return Dataset(name, tuple(map(str, range(known.classes))), shape, splits)


def _image_shape(
  name: str, stored: tuple[int | None, int | None, int], image_size: int | None
) -> tuple[int, int, int]:
  """Return height, width and channels of the images after resizing."""
  height, width, channels = stored
  if image_size:
    return image_size, image_size, channels
  if height is None or width is None:
    raise UserError(f'the images of {name} vary in size; expected one size for all: set data.image_size')
  return height, width, channels


def _open_prepared(name: str, path: epath.Path, used: Mapping[str, str], image_size: int | None) -> Dataset:
  """Open a prepared data set. `used` maps `train`, `test` and `validation` to the data set's own names."""
  builder = prepared.open_images(path)
  features = builder.info.features
  shape = _image_shape(name, features['image'].shape, image_size)
  splits = {split: prepared.open_split(builder, own_name, image_size) for split, own_name in used.items()}
  return Dataset(name, tuple(features['label'].names), shape, splits, prepared.names(builder))
