"""Readers of data sets that TFDS has prepared as ArrayRecord files. They do not use TensorFlow."""

import contextlib
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from hbf.data.images import codec
from hbf.errors import UserError, first_line

_PART = 1024  # largest number of records in memory while labels are read


class TfdsSource:
  """A `Source` of one split of a prepared TFDS data set."""

  def __init__(self, records: Any, channels: int, size: int | None, folder: str):
    """Make the source.

    Args:
      records: a TFDS data source of serialized tf.train.Examples with two features: `image`, and the class `label`.
      channels: number of channels of the images, 1 or 3.
      size: height and width in pixels that images are resized to. None keeps the stored size.
      folder: the folder of the data set, for messages.
    """
    self._records = records
    self._channels = channels
    self._size = size
    self._folder = folder

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    with _naming_damage(self._folder):
      return self._parse(self._records[int(index)])

  def read(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield image and class of the examples `indices`, int [n]; see `hbf.data.images.sources.Batched`."""
    with _naming_damage(self._folder):
      yield from map(self._parse, self._records.__getitems__(indices.tolist()))

  def read_labels(self) -> np.ndarray:
    """Return the class of every example, int [n]. This method reads all records but decodes no image."""
    parts = (range(i, min(i + _PART, len(self))) for i in range(0, len(self), _PART))
    records = itertools.chain.from_iterable(self._records.__getitems__([*part]) for part in parts)
    with _naming_damage(self._folder):
      return np.fromiter((_fields(record)[1] for record in records), np.int64, len(self))

  def fingerprint_parts(self, sample: np.ndarray) -> Iterator[bytes]:
    """Yield bytes for the fingerprint of the data; see `hbf.data.images.sources.Stored`.

    They are the class and the stored image of each example whose index is in `sample`, int [n].
    """
    with _naming_damage(self._folder):
      for record in self._records.__getitems__(sample.tolist()):
        encoded, label = _fields(record)
        yield str(label).encode()
        yield codec.content(encoded, self._channels)

  def _parse(self, record: bytes) -> tuple[np.ndarray, int]:
    encoded, label = _fields(record)
    image = codec.decode(io.BytesIO(encoded), channels=self._channels, size=self._size, formats=codec.TFDS_FORMATS)
    return image, label


@contextlib.contextmanager
def _naming_damage(folder: str) -> Iterator[None]:
  """Turn an error of the readers of records, messages and images inside the context into a `UserError`."""
  try:
    yield
  except Exception as error:  # the readers raise errors of several types, and the codec raises UserError
    raise UserError(
      f'{folder} is damaged ({first_line(error)}); expected the records that TFDS wrote: remove it, and prepare it '
      'again'
    ) from error


def _fields(record: bytes) -> tuple[bytes, int]:
  """Return the encoded image and the class of a record."""
  # This is much faster than TFDS's own parser, which makes a dict of arrays.
  fields = tf_example_pb2.Example.FromString(record).features.feature
  return fields['image'].bytes_list.value[0], fields['label'].int64_list.value[0]


def find(name: str, directory: str) -> epath.Path | None:
  """Return the folder of the newest prepared version of a data set, or None.

  This function looks at files only. Unlike `tfds.builder`, it does not import the data set's code or ask a server.

  Args:
    name: TFDS's name of the data set, with `/config` if the data set has configs.
    directory: the TFDS data directory, local or on a bucket.

  Raises:
    UserError: `directory` is on a bucket, and the package that reads buckets is missing.
  """
  try:
    folder = epath.Path(directory) / name
    if not folder.is_dir():
      return None
    versions = [path for path in folder.iterdir() if tfds.core.Version.is_valid(path.name)]
    complete = [path for path in versions if (path / 'dataset_info.json').exists()]
    return max(complete, key=lambda path: tfds.core.Version(path.name), default=None)
  except ImportError as error:
    raise UserError(
      f'{directory} cannot be read ({error}); expected a folder, or a bucket and the package that reads it: '
      'for gs:// do `pip install "hbf[gs]"`'
    ) from error


def open_builder(folder: epath.Path) -> tfds.core.DatasetBuilder:
  """Return TFDS's builder of a prepared data set. The other functions of this module read the data set with it.

  Args:
    folder: the folder DIR/NAME/VERSION, from `find`.

  Raises:
    UserError: the data set is not stored as ArrayRecord, or its description is damaged or lacks files.
  """
  try:
    builder = tfds.builder_from_directory(folder)
    _ = builder.info.metadata  # so that damage is found here
  except Exception as error:  # missing and damaged files raise errors of several types
    raise UserError(
      f'{folder} cannot be read ({error}); expected every file that TFDS writes: remove it and prepare it again'
    ) from error
  _require_array_record(builder, folder)
  _require_files(builder, folder)
  return builder


def open_images(folder: epath.Path) -> tfds.core.DatasetBuilder:
  """Return TFDS's builder of a prepared data set of labeled images; see `open_builder`.

  Raises:
    UserError: as for `open_builder`, or the data set has no labeled uint8 images.
  """
  builder = open_builder(folder)
  _require_labeled_images(builder, folder)
  return builder


def open_texts(folder: epath.Path) -> tfds.core.DatasetBuilder:
  """Return TFDS's builder of a prepared data set of texts; see `open_builder`.

  Raises:
    UserError: as for `open_builder`, or the data set has no texts.
  """
  builder = open_builder(folder)
  features = dict(builder.info.features.items())
  if not isinstance(features.get('text'), tfds.features.Text):
    raise UserError(
      f'{folder} has the features {", ".join(sorted(features))}; expected `text`: choose another data set'
    )
  return builder


def read_texts(builder: tfds.core.DatasetBuilder, split: str) -> Iterator[bytes]:
  """Yield the texts of one split. The builder comes from `open_texts`.

  Raises:
    UserError: the split does not exist.
  """
  records = _records(builder, split)
  with _naming_damage(str(builder.data_path)):
    for record in records:
      yield tf_example_pb2.Example.FromString(record).features.feature['text'].bytes_list.value[0]


def _require_array_record(builder: tfds.core.DatasetBuilder, folder: epath.Path) -> None:
  formats = sorted(str(kind.value) for kind in builder.info.available_file_formats())
  if 'array_record' not in formats:
    raise UserError(
      f'{folder} is stored as {", ".join(formats)}; expected array_record, which can be read without TensorFlow: '
      'prepare it in another --dir with `python -m hbf prepare`, or where TensorFlow is installed run '
      f'`tfds convert_format --dataset_version_dir={folder} --out_file_format=array_record`'
    )


def _require_files(builder: tfds.core.DatasetBuilder, folder: epath.Path) -> None:
  for split in builder.info.splits.values():
    for path in split.filepaths:
      if not epath.Path(path).exists():
        raise UserError(
          f'{path} is missing; expected every file that dataset_info.json lists: remove {folder} and prepare it again'
        )


def _require_labeled_images(builder: tfds.core.DatasetBuilder, folder: epath.Path) -> None:
  features = dict(builder.info.features.items())
  image, label = features.get('image'), features.get('label')
  # `image.dtype` would import TensorFlow; `np_dtype` does not.
  is_image = isinstance(image, tfds.features.Image) and image.np_dtype == np.uint8 and image.shape[-1] in (1, 3)
  if not is_image or not isinstance(label, tfds.features.ClassLabel):
    raise UserError(
      f'{folder} has the features {", ".join(sorted(features))}; expected `image` (uint8, 1 or 3 channels) and '
      '`label` (a class): choose another data set'
    )


def open_split(builder: tfds.core.DatasetBuilder, split: str, size: int | None) -> TfdsSource:
  """Open one split of images. The builder comes from `open_images`.

  Args:
    builder: TFDS's builder of the data set.
    split: name of the split.
    size: height and width in pixels that images are resized to. None keeps the stored size.

  Raises:
    UserError: the split does not exist, or its examples have no labels.
  """
  source = TfdsSource(
    _records(builder, split), builder.info.features['image'].shape[-1], size, str(builder.data_path)
  )
  if len(source) and source[0][1] < 0:  # TFDS stores −1 if labels are not public.
    raise UserError(
      f'the split {split!r} of {builder.data_path} has no labels; expected a split with labels: set data.test_split '
      'to another of ' + ', '.join(builder.info.splits)
    )
  return source


def _records(builder: tfds.core.DatasetBuilder, split: str) -> Any:
  """Return the serialized examples of a split."""
  if split not in builder.info.splits:
    raise UserError(
      f'{builder.data_path} has the splits {", ".join(builder.info.splits)}, not {split!r}; expected train and a '
      'split to test on: set data.test_split to its name'
    )
  raw = tfds.decode.DeserializeMethod.RAW_BYTES
  return builder.as_data_source(split, deserialize_method=raw, file_format='array_record')


def names(builder: tfds.core.DatasetBuilder) -> dict[str, str]:
  """Return readable names of the classes by stored name, from the data set's metadata. {} if there are none."""
  return dict((builder.info.metadata or {}).get('names', {}))


def count(builder: tfds.core.DatasetBuilder) -> dict[str, int]:
  """Return the number of examples of each split."""
  return {name: split.num_examples for name, split in builder.info.splits.items()}
