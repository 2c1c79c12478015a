"""Preparation of data sets in TFDS's format, for the command `hbf prepare`."""

import contextlib
import dataclasses
import fcntl
import io
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.core.constants import INCOMPLETE_PREFIX

from hbf.data.builders import cifar, digits, tiny_imagenet, tiny_shakespeare
from hbf.data.images import archives, prepared
from hbf.data.images.archives import Published
from hbf.errors import UserError, choose


@dataclasses.dataclass(frozen=True)
class Images:
  """Facts about a data set of labeled images, known before it is prepared.

  Attributes:
    classes: number of classes.
    image_shape: height, width and channels. The height or width is None if it varies.
    examples: number of examples of `train` and `test`.
  """

  classes: int
  image_shape: tuple[int | None, int | None, int]
  examples: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Preparation:
  """A way to prepare a data set.

  Attributes:
    builder: a function that makes the TFDS builder. Its arguments are `data_dir`, `file_format`, and `archive` if
      `published` is given.
    published: the published archive, or None if the data set needs none.
    images: facts about the images. None for texts, and for a data set that needs no download.
  """

  builder: Callable[..., tfds.core.DatasetBuilder]
  published: Published | None = None
  images: Images | None = None


@dataclasses.dataclass(frozen=True)
class Manual:
  """A data set that only TFDS can prepare, because its publisher asks users to register before they download it.

  Attributes:
    page: address of the page with the archives.
    files: names of the archives.
    images: facts about the images.
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

# TFDS states the checksums of both CIFARs (`url_checksums` in its package). The publisher of Tiny ImageNet states
# none. Several public projects give this checksum, for the file of 248,100,043 bytes.
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
BUILT_IN = (*PREPARATIONS, *MANUAL)  # the names that prepared.py reads without a registration

# Data sets that need no preparation, and advice for a user who tries to prepare them.
UNPREPARED: Mapping[str, str] = {
  **dict.fromkeys(('image_folder', 'parquet', 'webdataset'), 'set data.root to the folder'),
  'array_files': 'set data.root to the file',
  'text_file': 'set data.root to the file or folder',
  'python': 'it comes with Python',
}


def found_or_prepared(name: str, directory: str, download: bool) -> epath.Path:
  """Return the folder of a prepared data set. Prepare it first if it needs no download, or if a download is allowed.

  Args:
    name: name of the data set.
    directory: the TFDS data directory.
    download: True to allow a download.

  Raises:
    UserError: the data set is unknown. Or it is not prepared, and to prepare it would need TensorFlow or a download
      that is not allowed. The message says what to do.
  """
  if folder := prepared.find(name, directory):
    return folder
  try:
    choose('data set', name, {**PREPARATIONS, **MANUAL, **UNPREPARED})
  except UserError as error:
    raise UserError(
      f'{error}; TFDS has prepared no {name} in {directory} either, and no {name}.py in the working folder '
      'registers it'
    ) from None
  refuse_manual(name, directory)
  if name in PREPARATIONS and PREPARATIONS[name].published is not None and not download:
    raise UserError(
      f'{name} is not prepared in {directory}; expected a folder that TFDS has prepared: run '
      f'`python -m hbf prepare {name} --dir {directory}`, or set data.dir to its folder (commands for trained runs: '
      '--data_dir)'
    )
  return prepare(name, directory, archive=None)


def prepare(name: str, directory: str, archive: str | None) -> epath.Path:
  """Prepare a data set as ArrayRecord files. `hbf.data.images.prepared.find` tells if it is prepared already.

  Args:
    name: one of `PREPARATIONS`.
    directory: the TFDS data directory, a local folder. A preparation that fails leaves nothing in DIRECTORY/NAME.
    archive: path of a local archive, as published or packed again. None downloads the published archive to
      DIRECTORY/downloads.

  Returns:
    The folder DIRECTORY/NAME/VERSION.

  Raises:
    UserError: the data set is unknown or not prepared by hbf; the archive is missing, is damaged or has other
      content; or the directory is not writable.
  """
  if name in UNPREPARED:
    raise UserError(f'{name} needs no preparation; name it in the config only: {UNPREPARED[name]}')
  refuse_manual(name, directory)
  preparation = choose('data set', name, PREPARATIONS)
  if '://' in directory:
    raise UserError(f'{directory} is on a bucket; expected a local folder: prepare {name} in one and copy it there')
  options = {}
  if preparation.published is not None:
    path = archive or archives.download(preparation.published, os.path.join(directory, 'downloads'))
    options['archive'] = archives.Archive(path, preparation.published.url)
  return _build(preparation.builder(data_dir=directory, file_format='array_record', **options), directory)


def refuse_manual(name: str, directory: str) -> None:
  """Raise UserError with instructions if only TFDS can prepare the data set."""
  if name in MANUAL:
    manual = MANUAL[name]
    files = ' and '.join(manual.files)
    raise UserError(
      f'{name} is not prepared in {directory}; expected a folder that TFDS has prepared: put {files} '
      f'({manual.page}) into {directory}/downloads/manual and, where TensorFlow is installed, run '
      f'`tfds build {name} --data_dir={directory} --file_format=array_record`; or set data.dir to its folder'
    )


def _build(builder: tfds.core.DatasetBuilder, directory: str) -> epath.Path:
  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  try:
    # TFDS prints to stdout, where commands print results. It also makes a folder for downloads, which stays empty.
    with (
      contextlib.redirect_stdout(io.StringIO()),
      tempfile.TemporaryDirectory() as scratch,
      _without_leftovers(pathlib.Path(builder.data_path.parent)),
    ):
      builder.download_and_prepare(download_dir=scratch)
  except OSError as error:
    # If two processes prepare at once, the second can't rename its folder. The first has then prepared the data set.
    if not builder.is_prepared():
      raise UserError(f'{directory} cannot be written ({error}); expected a folder: set another --dir') from error
  finally:
    with contextlib.suppress(OSError):
      os.rmdir(builder.data_path.parent)  # TFDS leaves this folder empty after a failure. A full folder stays.
  return builder.data_path


@contextlib.contextmanager
def _without_leftovers(folder: pathlib.Path) -> Iterator[None]:
  """Remove what killed preparations have left in a folder of a data set, and make a preparation in the context.

  The processes that prepare the data set share a lock of the folder. So nothing is removed while another one works,
  and a killed process leaves no lock.
  """
  folder.mkdir(parents=True, exist_ok=True)
  handle = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # another process has the lock, or the file system has none
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
      for path in folder.glob(f'{INCOMPLETE_PREFIX}*'):
        shutil.rmtree(path)
    with contextlib.suppress(OSError):
      fcntl.flock(handle, fcntl.LOCK_SH)
    yield
  finally:
    os.close(handle)
