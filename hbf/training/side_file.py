"""Files of a run folder that belong to one of its checkpoints. They have arrays, and facts about them as JSON."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from hbf.errors import UserError
from hbf.interop.tensors import load_npz
from hbf.training.workdir import check_kinds, damaged, parse_json, replacing


class OfCheckpoint(Protocol):
  """Something that belongs to one checkpoint of a run."""

  @property
  def step(self) -> int:
    """The step of the checkpoint."""

  @property
  def average(self) -> bool:
    """True if the parameters are the moving average."""


def write_arrays(path: pathlib.Path, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
  """Write or replace a file atomically.

  Args:
    path: the path of the file.
    about: facts about the arrays, which JSON can hold.
    arrays: the arrays by name. No name is 'about'.

  Raises:
    UserError: the file can't be written.
  """
  with replacing(path) as file:
    np.savez(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]


@contextlib.contextmanager
def read_arrays(path: pathlib.Path, cure: str, *keys: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
  """Open a file that `write_arrays` wrote, for a `with` statement that uses its facts and its arrays.

  Args:
    path: the path of the file.
    cure: advice for the user if the file is damaged.
    *keys: keys that the facts must have.

  Raises:
    UserError: the file is damaged, or the statement finds that it is: it raises KeyError, ValueError or such.
  """
  try:
    arrays = load_npz(path)
    yield parse_json(str(arrays.pop('about')).encode(), path, cure, *keys), arrays
  except UserError:
    raise
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
    raise damaged(path, str(error), cure) from error


def check_shapes(arrays: Mapping[str, np.ndarray], **axes: str) -> None:
  """Check that arrays are real numbers with the expected axes.

  Args:
    arrays: the arrays by name.
    **axes: for each name, a letter for each axis. Axes with the same letter have the same size.

  Raises:
    ValueError: an array is of another kind.
    KeyError: an array is missing.
  """
  sizes: dict[str, int] = {}
  for name, letters in axes.items():
    array = arrays[name]
    if array.dtype.kind != 'f' or array.ndim != len(letters):
      raise ValueError(f'{name} has {array.dtype} values and {array.ndim} axes: expected numbers and {len(letters)}')
    for letter, size in zip(letters, array.shape, strict=True):
      if sizes.setdefault(letter, size) != size:
        raise ValueError(f'{name} has the shape {array.shape}: expected {sizes[letter]} where it has {size}')


def check_of_checkpoint(about: Mapping[str, Any], path: pathlib.Path, cure: str) -> None:
  """Check that facts name a checkpoint: the step, and whether the parameters are the moving average.

  Raises:
    UserError: they do not.
  """
  check_kinds(about, path, cure, step=int, average=bool)


def check_checkpoint(
  what: str, remedy: str, workdir: pathlib.Path, stored: OfCheckpoint, step: int, average: bool
) -> None:
  """Check that something belongs to a checkpoint.

  Args:
    what: its name in the plural, such as 'edits'.
    remedy: the verb for its removal, such as 'undo'.
    workdir: the run folder.
    stored: the checkpoint to which it belongs.
    step: the step of the checkpoint.
    average: True if the parameters are the moving average.

  Raises:
    UserError: it belongs to another checkpoint.
  """
  if (stored.step, stored.average) != (step, average):
    raise UserError(
      f'the {what} in {workdir} are of step {stored.step}{_average(stored.average)}, not of step {step}'
      f'{_average(average)}: give --checkpoint={stored.step}{" --average" if stored.average else ""}, '
      f'or {remedy} them'
    )


def _average(average: bool) -> str:
  return ' of the average' if average else ''
