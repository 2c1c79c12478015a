"""The folder of a run: who may write there, which config and data it belongs to, and its predictions."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError, choose
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task
from hbf.training.schema import current, stamp

# Keys that may differ when a run is resumed: they change where and how it runs and what is kept, not what is learned.
# (A stream measures mean and deviation on a sample; a run that is resumed keeps those it was started with.)
FREE = (
  'mesh.data',
  'mesh.fsdp',
  'mesh.tensor',
  'model.scan_layers',
  'model.remat',
  'data.dir',
  'data.root',
  'data.download',
  'data.input',
  'data.resident_bytes',
  'data.workers',
  'train.steps_per_call',
  'evaluate.batch_size',
  'checkpoint.every',
  'checkpoint.keep',
  'log.tensorboard',
)


def default_workdir(config: ConfigDict) -> pathlib.Path:
  """runs/<data>-<model>-<recipe>-<seed>."""
  return pathlib.Path('runs') / f'{config.data.name}-{config.model.name}-{config.recipe}-{config.seed}'


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Makes the folder and holds it; the lock goes with the process, however it ends.

  Raises:
    UserError: another run holds it, or something that isn't a run is there.
  """
  if workdir.exists() and (not workdir.is_dir() or (any(workdir.iterdir()) and not _is_run(workdir))):
    raise UserError(f'{workdir} exists and is not a run: choose another --workdir, or remove it')
  with held(workdir):
    yield


@contextlib.contextmanager
def naming_full_disk(workdir: pathlib.Path) -> Iterator[None]:
  """Turns whatever is raised for want of room on the disk into a line.

  Raises:
    UserError: there was none; the message names the folder.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as error:  # Orbax and TensorStore say it in words
    words = (os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    found = next((said for said in words if any(said in str(cause) for cause in _causes(error))), None)
    if found is None:
      raise
    raise UserError(
      f'{workdir} could not be written: {found.lower()}. Make room and give the same command again; '
      'it goes on from the newest checkpoint, and those that are complete are intact'
    ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
  """An error, and those that it arose from."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Makes a folder and holds it against other processes that ask for it; see `locked` for a run's.

  Raises:
    UserError: another process holds it, or its file system has no locks.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / '.lock', 'a') as file:
    if not _lock(file, workdir):
      raise UserError(f'{workdir} is in use by another process: wait for it, or choose another --workdir')
    yield


def in_use(workdir: pathlib.Path) -> bool:
  """Whether a process holds the folder, which needn't be there.

  Raises:
    UserError: its file system has no locks.
  """
  path = workdir / '.lock'
  if not path.exists():
    return False
  with open(path, 'a') as file:
    return not _lock(file, workdir)


def _lock(file: TextIO, folder: pathlib.Path) -> bool:
  """Takes the lock of an open file, which goes with the file; False if another process has it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):  # the latter where locks are those of POSIX underneath
    return False
  except OSError as error:
    raise UserError(
      f'{folder} is on a file system without locks ({error.strerror}), so two runs could write there at once: '
      'choose a --workdir on another'
    ) from None
  return True


def _is_run(workdir: pathlib.Path) -> bool:
  """Whether a run has begun there, or was killed before it had written its config."""
  names = {path.name for path in workdir.iterdir()}
  return 'config.json' in names or names <= {'.lock', 'data.json', 'data.json.tmp', 'config.json.tmp'}


def claim(workdir: pathlib.Path, config: ConfigDict, data: Mapping[str, Any]) -> None:
  """Writes what a run is of, or checks that the workdir was made with the same.

  Args:
    workdir: of the run.
    config: resolved.
    data: what tells its data from others, see `hbf.data.identity`.

  Raises:
    UserError: it wasn't; the message names the keys, or what of the data, that differ.
  """
  if differ := differences(workdir, config):
    raise UserError(f'{workdir} holds a run of another config ({differ}): choose another --workdir')
  check_data(workdir, data)
  if not (workdir / 'data.json').exists() and not (workdir / 'result.json').exists():
    write_json(workdir / 'data.json', data)
  if not (workdir / 'config.json').exists():
    write_json(workdir / 'config.json', stamp(json.loads(config.to_json())))


def differences(workdir: pathlib.Path, config: ConfigDict) -> str:
  """How a config differs from the one of a run in what is learned, in words; '' if it doesn't, or there is no run.

  What the config leaves to be measured (data.mean and data.std) doesn't differ.
  """
  if not (workdir / 'config.json').exists():
    return ''
  old, new = (flatten(json.loads(c.to_json())) for c in (load_config(workdir), config))
  measured = {key for key in ('data.mean', 'data.std') if not new.get(key)}
  keys = sorted((old.keys() | new.keys()) - {*FREE} - measured)
  differ = [f'{key} is {old.get(key)!r} there, {new.get(key)!r} here' for key in keys if old.get(key) != new.get(key)]
  return '; '.join(differ[:3]) + (f' and {len(differ) - 3} more' if len(differ) > 3 else '')


def check_data(workdir: pathlib.Path, data: Mapping[str, Any]) -> None:
  """Checks that data are those of a run; of an old workdir, without data.json, nothing is known.

  Raises:
    UserError: they aren't; the message names what differs.
  """
  path = workdir / 'data.json'
  if not path.exists():
    return
  stored, found = (_without_names(json.loads(text)) for text in (path.read_text(), json.dumps(data)))
  if stored != found:
    raise UserError(
      f'{workdir} was trained on other data ({_other_data(stored, found)}): set data.root or data.dir to those '
      '(eval.py: --data_root, --data_dir), or choose another --workdir'
    )


def _without_names(data: dict[str, Any]) -> dict[str, Any]:
  """What tells data from others; readers may be told more of the same data by now."""
  return {key: value for key, value in data.items() if key != 'names'}


def _other_data(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
  if there.get('tokenizer') != here.get('tokenizer'):
    return 'other tokens'
  words = {'name': 'data set', 'classes': 'classes', 'image_shape': 'image shape', 'splits': 'sizes'}
  for key, what in words.items():
    if there.get(key) != here.get(key):
      return f'{what} {_brief(there.get(key), here.get(key))} there, {_brief(here.get(key), there.get(key))} here'
  return 'as many examples of the same kind, but others'


def _brief(value: Any, other: Any) -> str:
  """A value in words; of classes those that the other lacks, or all where only the order differs."""
  if isinstance(value, list) and isinstance(other, list):
    shown = [str(part) for part in value if part not in other] or list(map(str, value))
    return ', '.join(shown[:5]) + (f' and {len(shown) - 5} more' if len(shown) > 5 else '')
  if isinstance(value, Mapping):
    return ', '.join(f'{count} {name}' for name, count in value.items())
  return str(value)


def load_config(workdir: pathlib.Path) -> ConfigDict:
  """The config of a run, in today's words.

  Raises:
    UserError: the folder isn't a run's, or the run's config can't be said any more.
  """
  path = workdir / 'config.json'
  if not path.is_file():
    raise UserError(f'{workdir} is not the workdir of a run (no config.json): give the --workdir you trained with')
  try:
    return ConfigDict(current(json.loads(path.read_text()))).lock()
  except UserError as error:
    raise UserError(f'{workdir}: {error}') from None


def kind_of(workdir: pathlib.Path) -> type[Task]:
  """The task of a run.

  Raises:
    UserError: as `load_config`.
  """
  return choose('task', load_config(workdir).task, TASKS)


def with_measured(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
  """A config with the mean and deviation of its images, if it leaves them to be measured and the run has done so."""
  left = 'mean' in config.data and not config.data.mean and not config.data.std
  if not left or not (workdir / 'config.json').is_file():
    return config
  stored, resolved = load_config(workdir), config.copy_and_resolve_references()
  resolved.data.update(mean=tuple(stored.data.mean), std=tuple(stored.data.std))
  return resolved


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Replaces a JSON file in one step."""
  replace_text(path, json.dumps(value, indent=2) + '\n')


def replace_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file in one step, so that a crash leaves the old one or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text)
  os.replace(temporary, path)


def read_result(workdir: pathlib.Path) -> dict[str, Any] | None:
  """What result.json holds; None if the run isn't finished."""
  path = workdir / 'result.json'
  return json.loads(path.read_text()) if path.exists() else None


def write_predictions(workdir: pathlib.Path, kept: Mapping[str, np.ndarray]) -> None:
  """Writes predictions.npz: what a task keeps of each example of the test split, by name [n], in its order."""
  temporary = workdir / 'predictions.npz.tmp'
  with open(temporary, 'wb') as file:
    np.savez_compressed(file, **kept)  # type: ignore[arg-type]  # its other argument has a default
  os.replace(temporary, workdir / 'predictions.npz')


def read_predictions(workdir: pathlib.Path) -> dict[str, np.ndarray] | None:
  """What a finished run kept of its test split, by name [n]; None if the workdir has none."""
  path = workdir / 'predictions.npz'
  if not path.exists():
    return None
  with np.load(path) as arrays:
    return dict(arrays)


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """A nested config by dotted key, as {'model.width': 64}."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
