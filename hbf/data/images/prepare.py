"""Preparation of data sets as TFDS's ArrayRecord files."""

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
from collections.abc import Callable, Mapping

import tensorflow_datasets as tfds
from etils import epath

from hbf.data.builders import cifar, digits, tiny_imagenet, tiny_shakespeare
from hbf.data.images import archives, prepared
from hbf.data.images.archives import Published
from hbf.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class Images:
  """Known facts about a data set of labeled images that may not be prepared.

  Attributes:
    classes: number of classes.
    image_shape: height, width and channels. None if it varies.
    examples: number of examples by split. `test` is the one to test on.
  """

  classes: int
  image_shape: tuple[int | None, int | None, int]
  examples: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Preparation:
  """The way to prepare a data set.

  Attributes:
    builder: makes its TFDS builder. It takes `data_dir`, `file_format`, and `archive` unless `published` is None.
    published: its archive. None if the data need none.
    images: facts about its images. None for texts, and for data that are always there.
  """

  builder: Callable[..., tfds.core.DatasetBuilder]
  published: Published | None = None
  images: Images | None = None


@dataclasses.dataclass(frozen=True)
class Manual:
  """A data set that TFDS alone prepares, from archives that its publisher gives to registered users.

  Attributes:
    page: address of the publisher's page.
    files: names of the archives.
    images: facts about its images.
  """

  page: str
  files: tuple[str, ...]
  images: Images


MANUAL: Mapping[str, Manual] = {
  'imagenet2012': Manual(
    'https://image-net.org/download-images',
    ('ILSVRC2012_img_train.tar', 'ILSVRC2012_img_val.tar'),
    Images(classes=1000, image_shape=(None, None, 3), examples={'train': 1_281_167, 'test': 50_000}),
  ),
}

# The checksums of both CIFARs are TFDS's (url_checksums in its package). Tiny ImageNet's publisher states none: it's
# the one that several public projects give of the file of 248,100,043 bytes.
PREPARATIONS: Mapping[str, Preparation] = {
  'digits': Preparation(digits.Digits),
  'cifar10': Preparation(
    cifar.Cifar10,
    Published(
      'https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz',
      'c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd',
    ),
    Images(10, (32, 32, 3), {'train': 50_000, 'test': 10_000}),
  ),
  'cifar100': Preparation(
    cifar.Cifar100,
    Published(
      'https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz',
      '58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec',
    ),
    Images(100, (32, 32, 3), {'train': 50_000, 'test': 10_000}),
  ),
  'tiny_imagenet': Preparation(
    tiny_imagenet.TinyImagenet,
    Published(
      'https://cs231n.stanford.edu/tiny-imagenet-200.zip',
      '6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821',
    ),
    Images(200, (64, 64, 3), {'train': 100_000, 'test': 10_000}),
  ),
  'tiny_shakespeare': Preparation(
    tiny_shakespeare.TinyShakespeare,
    Published(
      'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
      '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
    ),
  ),
}
# Data that lie elsewhere, or come with Python, and what to do instead of preparing them.
UNPREPARED: Mapping[str, str] = {
  'image_folder': 'set data.root to the folder',
  'text_file': 'set data.root to the file or folder',
  'python': 'it comes with Python',
}


def found_or_prepared(name: str, directory: str, download: bool) -> epath.Path:
  """Return the folder of a data set. Prepare it if it needs no download or may be downloaded.

  Raises:
    UserError: the data set is unknown or not prepared. The message says what to do.
  """
  if folder := prepared.find(name, directory):
    return folder
  try:
    choose('data set', name, {**PREPARATIONS, **MANUAL, **UNPREPARED})
  except UserError as error:
    raise UserError(f'{error}; nor is a {name} that TFDS has prepared in {directory}') from None
  refuse_manual(name, directory)
  if name in PREPARATIONS and PREPARATIONS[name].published is not None and not download:
    raise UserError(
      f'{name} is not prepared in {directory}; expected a folder that TFDS has prepared: run '
      f'`python -m hbf prepare {name} --dir {directory}`, or set data.dir to where it is'
    )
  return prepare(name, directory, archive=None)


def prepare(name: str, directory: str, archive: str | None) -> epath.Path:
  """Prepare a data set as ArrayRecord. `prepared.find` tells whether it is prepared already.

  Args:
    name: one of `PREPARATIONS`.
    directory: the TFDS data directory, a local folder. Nothing is left in DIRECTORY/NAME if the preparation fails.
    archive: local file, as published or packed again. None downloads the published one to DIRECTORY/downloads.

  Returns:
    The folder DIRECTORY/NAME/VERSION.

  Raises:
    UserError: the name is unknown, the archive is missing, damaged or another one, or the directory cannot be
      written.
  """
  if name in UNPREPARED:
    raise UserError(f'{name} needs no preparation; expected in the config only: {UNPREPARED[name]}')
  refuse_manual(name, directory)
  preparation = choose('data set', name, PREPARATIONS)
  if '://' in directory:
    raise UserError(f'{directory} is on a bucket; expected a local folder: prepare {name} in one and copy that there')
  options = {}
  if preparation.published is not None:
    path = archive or archives.download(preparation.published, os.path.join(directory, 'downloads'))
    options['archive'] = archives.Archive(path, preparation.published.url)
  return _build(preparation.builder(data_dir=directory, file_format='array_record', **options), directory)


def refuse_manual(name: str, directory: str) -> None:
  """Raise UserError, with what to do instead, for a data set that TFDS alone prepares."""
  if name in MANUAL:
    manual = MANUAL[name]
    files = ' and '.join(manual.files)
    raise UserError(
      f'{name} is not prepared in {directory}; expected a folder that TFDS has prepared: put {files} '
      f'({manual.page}) into {directory}/downloads/manual and, where TensorFlow is installed, run '
      f'`tfds build {name} --data_dir={directory} --file_format=array_record`; or set data.dir to where it is'
    )


def _build(builder: tfds.core.DatasetBuilder, directory: str) -> epath.Path:
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  try:
    # TFDS announces itself on stdout, which belongs to the scripts, and makes folders for downloads: there are none.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as scratch:
      builder.download_and_prepare(download_dir=scratch)
  except OSError as error:
    # Of two processes that prepare at once the second can't rename its folder, and needn't.
    if not builder.is_prepared():
      raise UserError(f'{directory} can not be written ({error}); expected a folder: set another --dir') from error
  finally:
    with contextlib.suppress(OSError):
      os.rmdir(builder.data_path.parent)  # Only if it is empty: TFDS removes what it made but for this.
  return builder.data_path
