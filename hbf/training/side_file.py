"""Files of a run folder that belong to one of its checkpoints. They have arrays, and facts about them as JSON."""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from hbf.errors import UserError
from hbf.interop.tensors import load_npz
from hbf.training.workdir import check_kinds, damaged, parse_json, replacing

# A run has edits or learned classes, but not both. Each of the two files has the other one, and what to do about it.
EDITS, LEARNED = 'edits.npz', 'learned.npz'
_OTHERS = {
  EDITS: (LEARNED, 'learned classes, which edits can not join yet: forget them by `hbf learn`'),
  LEARNED: (EDITS, 'edits, which learned classes can not join yet: undo them by `hbf edit`'),
}


class OfCheckpoint(Protocol):
  """The edits or the learned classes of one checkpoint of a run."""

  @property
  def step(self) -> int:
    """The step of the checkpoint."""

  @property
  def average(self) -> bool:
    """True if the edits or classes belong to the moving average of the parameters."""


def check_alone(path: pathlib.Path) -> None:
  """Raise UserError if a run would have both edits and learned classes.

  Args:
    path: the path of edits.npz or learned.npz, the file that the run gets. It need not exist yet.
  """
  other, trouble = _OTHERS[path.name]
  if (path.parent / other).exists():
    raise UserError(f'{path.parent} has {trouble}')


def write_arrays(
  path: pathlib.Path,
  about: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
  read: Callable[[pathlib.Path], object],
) -> None:
  """Write or replace a file atomically. If the new file can't be read, the old one stays.

  Args:
    path: the path of the file.
    about: facts about the arrays, which JSON can hold.
    arrays: the arrays by name. No name is 'about'.
    read: the function that reads such a file. It raises UserError if it can't read it.

  Raises:
    UserError: the file can't be written, or `read` can't read it.
  """
  with replacing(path) as file:
    np.savez(file, about=np.array(json.dumps(about)), **arrays)  # type: ignore[arg-type]
    file.flush()
    try:
      read(pathlib.Path(file.name))
    except UserError as error:
      raise UserError(f'{path} was not written, because it could not be read again ({error})') from error


@contextlib.contextmanager
def read_arrays(path: pathlib.Path, cure: str, *keys: str) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
  """Read a file that `write_arrays` wrote. Use the content inside a `with` statement.

  Args:
    path: the path of the file.
    cure: advice for the user if the file is damaged.
    *keys: keys that the facts must have.

  Raises:
    UserError: the file is damaged. A KeyError or ValueError in the `with` statement counts as damage too.

  Yields:
    The facts, and the arrays by name.
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
    **axes: for each name, a letter for each axis, such as centers='nf'. Axes with the same letter have the same size.

  Raises:
    ValueError: an array has values that are not real numbers, or other axes.
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
  """Check that facts name a checkpoint by two keys, the integer `step` and the boolean `average`.

  Args:
    about: the facts.
    path: the file that has them, for messages.
    cure: advice for the user if the file is damaged.

  Raises:
    UserError: a key is missing, or its value has another type.
  """
  check_kinds(about, path, cure, step=int, average=bool)


def check_checkpoint(
  what: str, made: OfCheckpoint, step: int, average: bool, *, workdir: pathlib.Path | None = None, remedy: str = ''
) -> None:
  """Check that edits or learned classes belong to a checkpoint.

  Args:
    what: 'edits' or 'learned classes', for messages.
    made: the edits or learned classes.
    step: the step of the checkpoint.
    average: True if `made` must belong to the moving average of the parameters.
    workdir: the run folder that has `made`. None: it is an object of Python.
    remedy: the command that removes the edits or classes from the folder, such as 'undo', for messages.

  Raises:
    UserError: `step` or `average` differs from that of `made`.
  """
  if (made.step, made.average) == (step, average):
    return
  if workdir is None:
    place, advice = '', f'take the run of checkpoint={made.step}{", average=True" if made.average else ""}'
  else:
    flags = f'--checkpoint={made.step}{" --average" if made.average else ""}'
    place, advice = f' in {workdir}', f'give {flags}, or {remedy} them'
  raise UserError(
    f'the {what}{place} are of step {made.step}{_average(made.average)}, not of step {step}{_average(average)}: '
    f'{advice}'
  )


def _average(average: bool) -> str:
  return ' of the average' if average else ''
