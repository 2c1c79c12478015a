"""Packing of a comparison: all runs are stored in two files, runs.jsonl and predictions.npz.

python -m hbf.comparison.pack runs/small results/small
python -m hbf.comparison.pack --unpack results/small runs/small

The packed folder has runs.jsonl, predictions.npz, and the other files of the comparison. A line of runs.jsonl has the
config, the data, the result and the metrics of a run. predictions.npz has the arrays of all runs. Any other file FILE
of a run RUN gets the name RUN-FILE. `hbf compare --report` reads packed and unpacked folders, and writes the same
tables and curves for both. Checkpoints and printed output are left out.

Unpacking makes the run folders of the finished runs again, so that other arms, seeds and trials can join them.
"""

import contextlib
import json
import pathlib
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hbf.arguments import Parser
from hbf.comparison.grid import Grid
from hbf.comparison.runs import LOGS, NOT_RUN
from hbf.comparison.stored import PACKED, PackedRuns, RunFolders, refuse_busy
from hbf.comparison.tune import TUNING, load_trials
from hbf.errors import UserError, in_one_line
from hbf.training.schema import stamp
from hbf.training.workdir import (
  read_data,
  read_json,
  read_result,
  replace_text,
  write_json,
  write_predictions,
)
from hbf.training.writers import read_metrics

LINES = {'config.json', 'data.json', 'metrics.jsonl', 'predictions.npz', 'result.json'}  # packed files of a run
REPORTS = {'comparison.md', 'comparison.json'}  # left out, because --report writes them again
INTEGERS = (np.int8, np.int16, np.int32)


def pack(folder: pathlib.Path, target: pathlib.Path) -> tuple[list[str], list[str]]:
  """Write a comparison in its packed form.

  Args:
    folder: folder of the comparison, with a folder for each run.
    target: folder to make. If packing fails, nothing is left of it.

  Returns:
    The names of the runs without a result, which are packed too, and the names of the folders that are not packed.

  Raises:
    UserError: the folder is not a comparison, is in use or is packed already. Or the target exists
      already, or it cannot be written.
  """
  runs, about = RunFolders(folder), _about(folder)
  names = [*about, *(name for name in runs.names() if name not in about)]
  if not runs.names():
    raise UserError(f'{folder} has no runs: give the --workdir of a comparison')
  refuse_busy((folder, *map(folder.joinpath, names)))
  lines, arrays, left = [], _Arrays(), []
  for name in names:
    runs.config(name)  # finds a damaged config now, not when the packed form is read
    line = {'run': name, **about.get(name, {}), **_line(folder / name, arrays)}
    if name in about and 'result' not in line:
      line['failed'] = runs.failure(name)
      left.append(name)
    lines.append(json.dumps(line, separators=(',', ':')) + '\n')
  with new_folder(target) as draft:
    for path, name in _copies(folder, names):
      if (draft / name).exists():
        raise UserError(f'{path} and another file would both be {name}: rename one of them')
      shutil.copyfile(path, draft / name)
    if arrays.by_key:
      write_predictions(draft, arrays.by_key)
    replace_text(draft / PACKED, ''.join(lines))
  return left, _left_out(folder, names)


def unpack(folder: pathlib.Path, target: pathlib.Path) -> list[str]:
  """Write a packed comparison as run folders, without checkpoints.

  Args:
    folder: folder of the packed comparison.
    target: folder to make. After an error it does not exist.

  Returns:
    The names of the runs without a result. They have no folders, because they cannot continue without checkpoints.

  Raises:
    UserError: the folder is not a packed comparison, or is damaged. Or the target exists, or it cannot be written.
  """
  if not (folder / PACKED).exists():
    raise UserError(f'{folder} is not packed: it has no {PACKED}')
  runs = PackedRuns(folder)
  finished = [name for name in runs.names() if runs.result(name)]
  with new_folder(target) as draft:
    for name in finished:
      _write_run(draft / name, runs, name)
    for path in sorted(folder.iterdir()):
      if path.is_file() and path.name not in {PACKED, 'predictions.npz'} and not _temporary(path):
        # The longest name that fits: a name of a run may begin with the name of another.
        run = max((name for name in runs.names() if path.name.startswith(f'{name}-')), key=len, default=None)
        if run is None:
          shutil.copyfile(path, draft / path.name)
        elif run in finished:
          shutil.copyfile(path, draft / run / path.name.removeprefix(f'{run}-'))
    for name in runs.names():
      if (reason := runs.failure(name)) not in (None, NOT_RUN):
        (draft / LOGS).mkdir(exist_ok=True)
        replace_text(draft / LOGS / f'{name}.log', f'{reason}\n')
  return [name for name in runs.names() if name not in finished]


def _write_run(run: pathlib.Path, runs: PackedRuns, name: str) -> None:
  """Write the run folder of a packed run. The config is translated to current keys."""
  run.mkdir()
  if (config := runs.config(name)) is not None:
    write_json(run / 'config.json', stamp(json.loads(config.to_json())))
  if (data := runs.data(name)) is not None:
    write_json(run / 'data.json', data)
  replace_text(run / 'metrics.jsonl', ''.join(json.dumps(line) + '\n' for line in runs.metrics(name)))
  if arrays := runs.predictions(name):
    write_predictions(run, arrays)
  write_json(run / 'result.json', runs.result(name) or {})


@contextlib.contextmanager
def new_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Open a context with an empty draft folder. At the end of the context, rename the draft to `target`.

  So the target is made whole or not at all: after an error in the context, the draft is removed.

  Raises:
    UserError: the target exists, or cannot be written.
  """
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise UserError(f'{target} exists: choose another folder, or remove it')
  draft = target.with_name(f'{target.name}.{uuid.uuid4().hex[:8]}.tmp')  # another call may make the same folder
  try:
    draft.mkdir(parents=True)
    yield draft
    draft.replace(target)
  except OSError as error:
    raise UserError(f'{target} could not be written ({error}): check free space and permissions') from error
  finally:
    shutil.rmtree(draft, ignore_errors=True)


class _Arrays:
  """The arrays for predictions.npz: those of all runs, by key. Equal arrays are stored only once."""

  def __init__(self) -> None:
    self.by_key: dict[str, np.ndarray] = {}
    self._keys: dict[tuple[Any, ...], str] = {}

  def add(self, key: str, array: np.ndarray) -> str:
    """Add an array. Return the key under which the array, or an equal one, is stored."""
    small = _smallest(array)
    key = self._keys.setdefault((small.dtype.str, small.shape, small.tobytes()), key)
    self.by_key[key] = small
    return key


def _smallest(array: np.ndarray) -> np.ndarray:
  """Return an array of integers in the smallest integer type for its values. Return other arrays unchanged."""
  if array.dtype.kind not in 'iu' or not array.size:
    return array
  low, high = int(array.min()), int(array.max())
  fits = (kind for kind in INTEGERS if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
  return array.astype(next(fits, array.dtype))


def _about(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Return the group, label and seed of each run of a comparison or search, by name of the run.

  Return {} for a folder of single runs. Raise UserError if the folder is packed already.
  """
  if (folder / PACKED).exists():
    raise UserError(f'{folder} is packed already')
  if (folder / 'grid.json').exists():
    runs = [(arm.run_name(seed), arm.group, arm.label, seed) for arm, seed in Grid.load(folder).runs()]
  elif (folder / TUNING).exists():
    runs = [(trial.run, trial.group, trial.label, trial.seed) for trial in load_trials(folder / TUNING)]
  else:
    runs = []  # a folder of single runs
  return {name: {'group': group, 'label': label, 'seed': seed} for name, group, label, seed in runs}


def _line(run: pathlib.Path, arrays: _Arrays) -> dict[str, Any]:
  """Return the parts of a run that its line in runs.jsonl holds. Add the run's predictions to `arrays`."""
  kept: Mapping[str, np.ndarray] = RunFolders(run.parent).predictions(run.name) or {}
  parts = {
    'config': read_json(run / 'config.json', 'restore it from a copy'),
    'data': read_data(run),
    'result': read_result(run),
    'predictions': {name: arrays.add(f'{run.name}/{name}', array) for name, array in kept.items()},
    'metrics': read_metrics(run),
  }
  return {name: part for name, part in parts.items() if part}


def _copies(folder: pathlib.Path, names: Sequence[str]) -> Iterator[tuple[pathlib.Path, str]]:
  """Yield the files to copy, with their names in the packed folder."""
  for path in sorted(folder.iterdir()):
    if path.is_file() and path.name not in REPORTS and not _temporary(path):
      yield path, path.name
  for name in names:
    for path in sorted((folder / name).glob('*')):
      if path.is_file() and path.name not in LINES and not _temporary(path):
        yield path, f'{name}-{path.name}'


def _temporary(path: pathlib.Path) -> bool:
  return path.name == '.lock' or path.suffix == '.tmp'


def _left_out(folder: pathlib.Path, names: Sequence[str]) -> list[str]:
  """Return the names of the folders that are not packed: folders that are not runs, and folders inside runs."""
  inside = [path for name in names for path in (folder / name).glob('*')]
  beside = [path for path in folder.iterdir() if path.name not in names]
  return sorted({path.name for path in (*beside, *inside) if path.is_dir()})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf.comparison.pack', 'Pack the runs of a comparison into a few files.')
  parser.add_path('runs', help='the --workdir of the comparison')
  parser.add_path('target', help='folder to make, such as results/NAME')
  parser.add_argument('--unpack', action='store_true', help='make run folders of a packed comparison')
  flags = parser.parse_args(arguments)
  if flags.unpack:
    if without := unpack(flags.runs, flags.target):
      print(f'left out, because without a result: {", ".join(without)}', file=sys.stderr)
    print(f'{flags.runs} is unpacked into {flags.target}')
    return 0
  without, left_out = pack(flags.runs, flags.target)
  if without:
    print(f'without a result: {", ".join(without)}', file=sys.stderr)
  if left_out:
    print(f'left out: {", ".join(f"{name}/" for name in left_out)}', file=sys.stderr)
  print(f'{flags.runs} is packed into {flags.target}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
