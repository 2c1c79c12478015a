"""Stored runs of a comparison: a folder for each run, or the packed form of `hbf.comparison.pack`."""

import abc
import functools
import json
import pathlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.comparison.grid import Grid
from hbf.comparison.runs import NOT_RUN, failure
from hbf.errors import UserError
from hbf.tasks.registry import make_task
from hbf.training.workdir import (
  FREE,
  MEASURED,
  Predictions,
  as_config,
  check_keys,
  check_kinds,
  config_differences,
  damaged,
  flatten,
  in_use,
  load_config,
  other_data,
  parse_json,
  read_data,
  read_predictions,
  read_result,
)
from hbf.training.writers import read_metrics

PACKED = 'runs.jsonl'
CURE = 'restore it from a copy, or pack the comparison again'


class StoredRuns(abc.ABC):
  """The stored runs of a comparison. The name of a run is the name of its folder.

  Every method except `names` takes the name of a run. For a run that is not stored, there is no result, no metrics
  and no predictions.
  """

  @abc.abstractmethod
  def names(self) -> list[str]:
    """Return the names of all runs."""

  @abc.abstractmethod
  def config(self, name: str) -> ConfigDict | None:
    """Return the config of a run, translated to current keys. None if there is no config."""

  @abc.abstractmethod
  def data(self, name: str, *keys: str) -> dict[str, Any] | None:
    """Return the content of a run's data.json. None for an old run, which has no such file.

    Raises:
      UserError: the content lacks one of `keys`, or it is damaged.
    """

  @abc.abstractmethod
  def result(self, name: str, *keys: str) -> dict[str, Any] | None:
    """Return the content of a run's result.json, or None if the run is not finished.

    Raises:
      UserError: the content lacks one of `keys`, or it is damaged.
    """

  @abc.abstractmethod
  def metrics(self, name: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""

  @abc.abstractmethod
  def predictions(self, name: str) -> Predictions | None:
    """Return the arrays of predictions.npz. None if the run has none."""

  @abc.abstractmethod
  def failure(self, name: str) -> str | None:
    """Return the reason why a run has no result, or None if the run has a result."""


def open_runs(folder: pathlib.Path) -> StoredRuns:
  """Return the stored runs of a comparison folder, packed or not.

  Raises:
    UserError: the packed runs are damaged.
  """
  return PackedRuns(folder) if (folder / PACKED).exists() else RunFolders(folder)


def refuse_packed(folder: pathlib.Path) -> None:
  """Check that a comparison is not packed: no runs can be added to a packed one.

  Raises:
    UserError: the comparison is packed.
  """
  if (folder / PACKED).exists():
    raise UserError(
      f'{folder} is packed, and no runs can be added: unpack it by python -m hbf.comparison.pack --unpack {folder} '
      'FOLDER, choose another --workdir, or give --report for tables'
    )


def check_runs(grid: Grid, folder: pathlib.Path, remedy: str = 'choose another --workdir, or remove it') -> None:
  """Check that each run of a grid that a comparison folder already has, packed or not, is as the grid describes it.

  Raises:
    UserError: a config differs. The message names the run and the keys that differ, and ends with `remedy`.
  """
  runs = open_runs(folder)
  for arm, seed in grid.runs():
    name = arm.run_name(seed)
    stored = runs.config(name)
    if stored is not None and (differ := config_differences(stored, arm.config(seed))):
      raise UserError(f'{folder / name} holds a run of another config ({differ}): {remedy}')


class KnownData(NamedTuple):
  """The identity of the data of a run (`hbf.data.pipeline.identity`), and the run's name or path."""

  identity: Mapping[str, Any]
  run: str


def check_same_data(
  grid: Grid,
  folder: pathlib.Path,
  known: Mapping[str, KnownData] = types.MappingProxyType({}),
  remedy: str = 'choose another --workdir, or remove one',
) -> dict[str, KnownData]:
  """Check that stored runs with equal options of the data have the same data.

  Old runs, which did not store the identity of their data, pass.

  Args:
    grid: the runs.
    folder: folder of the comparison, packed or not.
    known: the data of other runs, by the options of the data (`data_options`).
    remedy: the end of the error message.

  Returns:
    The data of `known` and of the stored runs.

  Raises:
    UserError: the data of two runs differ. The message names both.
  """
  runs, known = open_runs(folder), dict(known)
  for arm, seed in grid.runs():
    name = arm.run_name(seed)
    identity, config = runs.data(name, 'fingerprint'), runs.config(name)
    if identity is not None and config is not None:
      found = KnownData(identity, str(folder / name))
      _refuse_other_data(known.setdefault(data_options(arm.group, config), found), found, remedy)
  return known


def check_requested_data(grid: Grid, known: Mapping[str, KnownData]) -> None:
  """Check that the data that a grid would train on are those of the runs so far.

  Args:
    grid: the runs that are asked for.
    known: the result of `check_same_data`.

  Raises:
    UserError: data of the same options differ.
  """
  for options, arm in {data_options(arm.group, arm.config(0)): arm for arm in grid.arms}.items():
    if options in known:
      found = KnownData(make_task(arm.config(0)).identity(), 'the data of this call')
      _refuse_other_data(known[options], found, 'set data.root or data.dir to those, or choose another --workdir')


def data_options(group: str, config: ConfigDict) -> str:
  """Return the config keys that decide which examples a run sees, and its group, as a text. Paths are left out."""
  left = {*FREE, *(f'data.{key}' for key in MEASURED)}
  keys = {key: value for key, value in flatten({'data': config.data.to_dict()}).items() if key not in left}
  return f'{group} {json.dumps(keys, default=str)}'


def _refuse_other_data(one: KnownData, other: KnownData, remedy: str) -> None:
  if one.identity['fingerprint'] != other.identity['fingerprint']:
    differ = other_data(one.identity, other.identity)
    raise UserError(f'{one.run} has other data than {other.run} ({differ}): {remedy}')


def refuse_busy(paths: Iterable[pathlib.Path]) -> None:
  """Check that no process writes to the folders of comparisons and runs.

  Raises:
    UserError: a process has the lock of a folder.
  """
  if busy := next((path for path in paths if in_use(path)), None):
    raise UserError(f'{busy} is in use by another process: wait for it')


class RunFolders(StoredRuns):
  """Runs in folders, as written by `hbf train`."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  @override
  def names(self) -> list[str]:
    marks = ('config.json', 'metrics.jsonl')
    return sorted({path.parent.name for mark in marks for path in self._folder.glob(f'*/{mark}')})

  @override
  def config(self, name: str) -> ConfigDict | None:
    run = self._folder / name
    return load_config(run) if (run / 'config.json').exists() else None

  @override
  def data(self, name: str, *keys: str) -> dict[str, Any] | None:
    return read_data(self._folder / name, *keys)

  @override
  def result(self, name: str, *keys: str) -> dict[str, Any] | None:
    return read_result(self._folder / name, *keys)

  @override
  def metrics(self, name: str) -> list[dict[str, Any]]:
    return read_metrics(self._folder / name)

  @override
  def predictions(self, name: str) -> Predictions | None:
    return read_predictions(self._folder / name)

  @override
  def failure(self, name: str) -> str | None:
    return failure(self._folder, name)


class PackedRuns(StoredRuns):
  """Packed runs. A line of runs.jsonl is a run, and predictions.npz has the arrays of all runs."""

  def __init__(self, folder: pathlib.Path):
    """Read runs.jsonl. predictions.npz is read when its arrays are first needed.

    Raises:
      UserError: a line is damaged, or two lines have a run of the same name.
    """
    self._folder, self._path = folder, folder / PACKED
    self._lines: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(self._path.read_bytes().splitlines(), 1):
      line = parse_json(text, f'line {number} of {self._path}', CURE)
      check_kinds(line, f'line {number} of {self._path}', CURE, run=str)
      if line['run'] in self._lines:
        raise damaged(self._path, f'two lines have the run {line["run"]}', CURE)
      self._lines[line['run']] = line

  @override
  def names(self) -> list[str]:
    return [*self._lines]

  @override
  def config(self, name: str) -> ConfigDict | None:
    stored = self._object(name, 'config')
    return None if stored is None else as_config(stored, self._source(name, 'config'), CURE)

  @override
  def data(self, name: str, *keys: str) -> dict[str, Any] | None:
    return self._object(name, 'data', *keys)

  @override
  def result(self, name: str, *keys: str) -> dict[str, Any] | None:
    return self._object(name, 'result', *keys)

  @override
  def metrics(self, name: str) -> list[dict[str, Any]]:
    lines = self._lines.get(name, {}).get('metrics', [])
    if not isinstance(lines, list):
      raise damaged(self._source(name, 'metrics'), f'expected a list, found {type(lines).__name__}', CURE)
    for line in lines:
      check_kinds(line, self._source(name, 'metrics'), CURE, step=int, split=str)
    return lines

  @override
  def predictions(self, name: str) -> Predictions | None:
    keys = self._object(name, 'predictions')
    if keys is None or self._arrays is None:
      return None
    if missing := [key for key in keys.values() if key not in self._arrays]:
      raise damaged(self._folder / 'predictions.npz', f'it lacks {", ".join(missing)}', CURE)
    arrays = {part: self._arrays[key] for part, key in keys.items()}
    return Predictions(arrays, self._source(name, 'predictions'), CURE)

  @override
  def failure(self, name: str) -> str | None:
    line = self._lines.get(name, {})
    return None if 'result' in line else line.get('failed', NOT_RUN)

  @functools.cached_property
  def _arrays(self) -> dict[str, np.ndarray] | None:
    """All arrays of predictions.npz by key, with integers as int64. None if the file is missing."""
    arrays = read_predictions(self._folder)
    if arrays is None:
      return None
    return {key: array.astype(np.int64) if array.dtype.kind in 'iu' else array for key, array in arrays.items()}

  def _object(self, name: str, part: str, *keys: str) -> dict[str, Any] | None:
    value = self._lines.get(name, {}).get(part)
    if value is None:
      return None
    if not isinstance(value, dict):
      raise damaged(self._source(name, part), f'expected a JSON object, found {type(value).__name__}', CURE)
    check_keys(value, self._source(name, part), CURE, keys)
    return value

  def _source(self, name: str, part: str) -> str:
    return f'the {part} of {name} in {self._path}'
