"""Images and their targets in a .npz file of NumPy."""

import contextlib
import pathlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from hbf.arguments import home_path
from hbf.data.images import arrays, splits
from hbf.data.images.dataset import Dataset
from hbf.data.registry import DataRequest
from hbf.errors import UserError


def open_array_file(request: DataRequest) -> Dataset:
  """Open the .npz file `root` of a request: the arrays x_SPLIT and y_SPLIT of each split that the request names.

  The file may also have the array class_names. `hbf.data.images.arrays.ArrayData` describes the arrays.

  Raises:
    UserError: the file or an array is missing, damaged or of a wrong shape, type or range.
  """
  path = pathlib.Path(home_path(request.root))
  if not request.root or not path.is_file():
    raise UserError(
      f'file {request.root!r} does not exist; expected a .npz file with x_train, y_train, x_test and y_test: set '
      'data.root to it (commands for trained runs: --data_root)'
    )
  with _explain_errors(path), np.load(path, allow_pickle=False) as stored:
    found = [name.removeprefix('x_') for name in stored.files if name.startswith('x_')]
    splits.check(f'{path}: ', 'x_{}', found, request.splits)
    read = {split: (stored[f'x_{name}'], stored[f'y_{name}']) for split, name in request.splits.items()}
    names = stored['class_names'].tolist() if 'class_names' in stored.files else None
  try:
    checked, classes = arrays.checked(read, names)
  except UserError as error:
    raise UserError(f'{path}: {error}') from None
  return arrays.as_dataset(request.name, classes, checked, request.image_size)


@contextlib.contextmanager
def _explain_errors(path: pathlib.Path) -> Iterator[Any]:
  """Turn errors of NumPy in the `with` statement into a `UserError` that names the file."""
  try:
    yield
  except UserError:
    raise
  except KeyError as error:
    raise UserError(f'{path} lacks {error.args[0].split()[0]}; expected an array y_… for each x_…: add it') from error
  except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
    raise UserError(
      f'{path} cannot be read ({" ".join(str(error).split())}); expected a .npz file of arrays of numbers: write it '
      'again by numpy.savez'
    ) from error
