"""Data sets of images by name. The rest of the library opens images only through this module."""

import dataclasses
from typing import Any

from hbf.arguments import home_path
from hbf.data import registry
from hbf.data.images import prepare, prepared
from hbf.data.images.array_files import open_array_file
from hbf.data.images.arrays import NAME, ArrayData, are_names, from_arrays
from hbf.data.images.cached import through_cache
from hbf.data.images.checked import checked
from hbf.data.images.dataset import Dataset
from hbf.data.images.folder import open_folder
from hbf.data.images.parquet import open_parquet
from hbf.data.images.sources import Blank
from hbf.data.images.tar import open_tars
from hbf.data.images.targets import CLASSES, CSV, TASK
from hbf.data.registry import DataRequest, Opener
from hbf.errors import UserError


def load(
  *,
  name: str,
  dir: str,
  root: str,
  image_size: int | None,
  download: bool,
  test_split: str = 'test',
  validation_split: str = '',
  columns: str = '',
  cache: str = '',
  targets: str = CLASSES,
) -> Dataset:
  """Open a data set.

  Args:
    name: a data set that hbf can prepare (`hbf.data.images.prepare.PREPARATIONS`), any data set of images with
      classes that TFDS has prepared in `dir`, a format of a user's own data ('image_folder', 'parquet', 'webdataset',
      'array_files'), or a data set of `hbf.register_dataset`.
    dir: the TFDS data directory, local or on a bucket. `~` is the home directory. Only data sets of TFDS use it.
    root: the folder or file of a user's own data.
    image_size: height and width of the images in pixels. The shorter side of an image is resized to this length, and
      the square in the center is cut out. 0 or None keeps the stored images, which must then all have one size.
    download: True to download and prepare a data set that is not in `dir`. The data set `digits` needs no download
      and is always prepared.
    test_split: the data set's own name of the split to test on.
    validation_split: the data set's own name of a split to validate on. '': there is none.
    columns: names of the columns of images and classes in Parquet files, as 'IMAGE,LABEL'. '': find them.
    cache: a folder for decoded images, which later calls read. '': images are decoded each time.
    targets: the required kind of targets: 'classes', 'labels' or 'values' (`hbf.data.images.targets`). The data sets
      'image_folder' and 'array_files' and those of `hbf.register_dataset` may have any kind. Others have classes.

  Raises:
    UserError: the data set is unknown, not prepared or damaged, its images differ in size, or its targets are of
      another kind. The message says what to do.
  """
  refuse_test_on_train(test_split)
  _refuse_shared_validation(validation_split, test_split)
  used = {'train': 'train', 'test': test_split} | ({'validation': validation_split} if validation_split else {})
  request = DataRequest(name, home_path(dir), root, image_size or None, download, used, columns, targets)
  opened = _as_dataset(registry.opener(name, _OPENERS, _open_prepared)(request), request)
  if targets == CLASSES and len(opened.classes) < 2:
    raise UserError(
      f'{root or name} has one class only, {opened.classes[0]}; expected two or more: every answer would be right'
    )
  return through_cache(opened, cache) if cache else opened


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


def _as_dataset(opened: Any, request: DataRequest) -> Dataset:
  """Return the data set that a function opened, if it fits the request.

  Args:
    opened: what the function returned: a `Dataset`, or the `ArrayData` of a user's own function.
    request: the request that the function got.

  Raises:
    UserError: `opened` is something else, or it does not fit the request: a split is missing or empty, or the kind of
      the targets or the size of the images differs. Or it has no classes, or no whole shape of images.
  """
  dataset = from_arrays(opened) if isinstance(opened, ArrayData) else opened
  if not isinstance(dataset, Dataset):
    raise UserError(
      f'the data set {request.name} is of type {type(opened).__name__}; expected hbf.Dataset or hbf.ArrayData for '
      f'images: return one from the registered function'
    )
  if missing := sorted(request.splits.keys() - dataset.splits.keys()):
    raise UserError(
      f'the data set {request.name} lacks {missing[0]}; expected the splits {", ".join(request.splits)}: add it, or '
      'leave data.validation_split empty'
    )
  for split in request.splits:
    if not len(dataset.splits[split]):
      raise UserError(f'the data set {request.name} has no image in {split}: give it one or more')
  if len(dataset.image_shape) != 3:
    raise UserError(
      f'the data set {request.name} has image_shape {dataset.image_shape}; expected height, width and channels: add '
      'the channels, 1 or 3'
    )
  if not dataset.classes:
    raise UserError(f'the data set {request.name} has no classes: name them')
  if not are_names(dataset.classes):
    raise UserError(f'the data set {request.name} has classes {dataset.classes!r}; expected texts, all different')
  if dataset.targets not in TASK:
    raise UserError(
      f'the data set {request.name} has targets {dataset.targets!r}; expected one of {", ".join(TASK)}: change the '
      'registered function'
    )
  if dataset.targets != request.targets:
    raise UserError(
      f'{request.name} has {dataset.targets}, not {request.targets}; expected task {TASK[dataset.targets]} for it. '
      f'For {request.targets}, take image_folder{_listed(request.targets)}, or hbf.ArrayData'
    )
  height, width, _ = dataset.image_shape
  if request.image_size and (height, width) != (request.image_size,) * 2:
    raise UserError(
      f'{request.name} has images of {width}×{height} pixels, and data.image_size is {request.image_size}; expected '
      'the same: set data.image_size to 0, or resize the images in the registered function'
    )
  # The other splits have examples that the config does not name, so a run must not use them.
  used = {split: dataset.splits[split] for split in request.splits}
  dataset = dataclasses.replace(dataset, name=request.name, splits=used)
  return checked(dataset) if request.name in registry.REGISTERED else dataset


def _listed(targets: str) -> str:
  return f' with files {CSV[targets]}' if targets in CSV else ''


def describe(name: str, dir: str, image_size: int | None) -> Dataset | None:
  """Return black images, as many and as large as those of a data set that is not prepared yet.

  With these images, the programs of a run can be compiled before the data set is downloaded. The result is None if
  the data set is prepared, or if hbf does not know the number and the size of its images.

  Args:
    name: name of the data set.
    dir: the TFDS data directory.
    image_size: as in `load`.

  Raises:
    UserError: the images of the data set vary in size, and no `image_size` is given.
  """
  entry = prepare.MANUAL.get(name) or prepare.PREPARATIONS.get(name)
  known = entry.images if entry else None
  if known is None or prepared.find(name, home_path(dir)):
    return None
  shape = _image_shape(name, known.image_shape, image_size)
  splits = {split: Blank(count, shape) for split, count in known.examples.items()}
  return Dataset(name, tuple(map(str, range(known.classes))), shape, splits)


def _image_shape(
  name: str, stored: tuple[int | None, int | None, int], image_size: int | None
) -> tuple[int, int, int]:
  """Return height, width and channels of the images of data set `name` after resizing.

  The argument `stored` has the stored height, width and channels. The height or width is None if it varies.
  """
  height, width, channels = stored
  if image_size:
    return image_size, image_size, channels
  if height is None or width is None:
    raise UserError(f'the images of {name} vary in size; expected one size for all: set data.image_size')
  return height, width, channels


def _open_prepared(request: DataRequest) -> Dataset:
  """Open a data set that TFDS has prepared. Prepare it first if it needs no download, or if a download is allowed."""
  builder = prepared.open_images(prepare.found_or_prepared(request.name, request.dir, request.download))
  features, size = builder.info.features, request.image_size
  shape = _image_shape(request.name, features['image'].shape, size)
  splits = {split: prepared.open_split(builder, own_name, size) for split, own_name in request.splits.items()}
  return Dataset(request.name, tuple(features['label'].names), shape, splits, prepared.names(builder))


def _refuse_arrays(request: DataRequest) -> Dataset:
  """Raise UserError: no config can say where arrays in memory are, so the caller must give them."""
  raise UserError(
    f'the data set is {request.name} in memory, not in a folder: in Python, give the arrays as '
    'data=hbf.ArrayData(…); commands need a run on array_files, the data set of arrays in a file'
  )


# The functions that open the data sets of this package, by name. Others are registered, or prepared by TFDS.
_OPENERS: dict[str, Opener] = {
  **dict.fromkeys(prepare.BUILT_IN, _open_prepared),
  NAME: _refuse_arrays,
  'image_folder': open_folder,
  'parquet': open_parquet,
  'webdataset': open_tars,
  'array_files': open_array_file,
}
