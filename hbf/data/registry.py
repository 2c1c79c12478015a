"""Data sets of a user's own by name, and the request that is given to the function that opens a data set."""

import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hbf.data.images.targets import CLASSES
from hbf.errors import UserError, mistake


@dataclasses.dataclass(frozen=True)
class DataRequest:
  """The part of a config that a function needs to open a data set.

  Attributes:
    name: name of the data set (`data.name`).
    dir: folder of prepared TFDS data sets (`data.dir`).
    root: path of a user's own data (`data.root`). '': none is given.
    image_size: height and width in pixels that images are resized to (`data.image_size`). None keeps the stored size.
    download: True if a download is allowed (`data.download`).
    splits: the data set's own name of each split that is used. Its keys are `train`, `test` and perhaps `validation`.
    columns: names of the columns of images and classes in Parquet files, as 'IMAGE,LABEL' (`data.columns`). '': find
      them.
    targets: the kind of targets that the task needs: 'classes', 'labels' or 'values'; see `hbf.Dataset`.
  """

  name: str
  dir: str = ''
  root: str = ''
  image_size: int | None = None
  download: bool = False
  splits: Mapping[str, str] = dataclasses.field(default_factory=lambda: {'train': 'train', 'test': 'test'})
  columns: str = ''
  targets: str = CLASSES


Opener = Callable[[DataRequest], Any]


@dataclasses.dataclass(frozen=True)
class Registered:
  """A data set of a user's own.

  Attributes:
    open: the function that opens it.
    text: True if it is a text, False if it has images.
    defaults: values of config keys by section, such as {'model': {'patch': 8}}.
  """

  open: Opener
  text: bool
  defaults: Mapping[str, Mapping[str, Any]]


REGISTERED: dict[str, Registered] = {}


def find(name: str) -> Registered | None:
  """Return the registered data set with this name. None if there is none.

  If no registered data set has the name, but the working folder has a file NAME.py that calls `register_dataset`, the
  file is imported first. So commands and the processes that read images find a data set that such a file registers.

  Raises:
    UserError: the file does not register this name, or it raises an error.
  """
  path = pathlib.Path(f'{name}.py')
  if name not in REGISTERED and name.isidentifier() and path.is_file() and b'register_dataset' in path.read_bytes():
    if os.getcwd() not in sys.path:  # The script `hbf` does not search the working folder.
      sys.path.insert(0, os.getcwd())
    try:
      importlib.import_module(name)
    except UserError:
      raise
    except Exception as error:
      raise mistake(path, error) from error
    if name not in REGISTERED:
      raise UserError(
        f'{path} does not register {name}; expected the data set to have the name of its file: call '
        f'hbf.register_dataset({name!r}, …), or rename the file'
      )
  return REGISTERED.get(name)


def opener(name: str, built_in: Mapping[str, Opener], other: Opener) -> Opener:
  """Return the function that opens the data set `name`: the registered one, else that of `built_in`, else `other`.

  A file NAME.py in the working folder is not imported for a name in `built_in`.
  """
  own = REGISTERED.get(name) if name in built_in else find(name)
  return own.open if own else built_in.get(name, other)
