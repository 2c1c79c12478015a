"""The folder of a run: who may write there, which config it belongs to, its logs and its result."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError

# Keys that may differ when a run is resumed: they change where and how it runs and what is kept, not what is learned.
FREE = (
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
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Makes a folder and holds it against other processes that ask for it; see `locked` for a run's.

  Raises:
    UserError: another process holds it.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / '.lock', 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise UserError(f'{workdir} is in use by another process: wait for it, or choose another --workdir') from None
    yield


def _is_run(workdir: pathlib.Path) -> bool:
  return any((workdir / name).exists() for name in ('config.json', '.lock'))


def claim(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Writes the resolved config, or checks that it is the one the workdir was made with.

  Raises:
    UserError: it isn't; the message names the keys that differ.
  """
  if not (workdir / 'config.json').exists():
    write_json(workdir / 'config.json', json.loads(config.to_json()))
  elif differ := differences(workdir, config):
    raise UserError(f'{workdir} holds a run of another config ({differ}): choose another --workdir')


def differences(workdir: pathlib.Path, config: ConfigDict) -> str:
  """How a config differs from the one of a run in what is learned, in words; '' if it doesn't, or there is no run.

  What the config leaves to be measured (data.mean and data.std) doesn't differ.
  """
  if not (workdir / 'config.json').exists():
    return ''
  old, new = (flatten(json.loads(c.to_json())) for c in (load_config(workdir), config))
  measured = {key for key in ('data.mean', 'data.std') if not new[key]}
  keys = sorted((old.keys() | new.keys()) - {*FREE} - measured)
  differ = [f'{key} is {old.get(key)!r} there, {new.get(key)!r} here' for key in keys if old.get(key) != new.get(key)]
  return '; '.join(differ[:3]) + (f' and {len(differ) - 3} more' if len(differ) > 3 else '')


def load_config(workdir: pathlib.Path) -> ConfigDict:
  """The config of a run.

  Raises:
    UserError: the folder isn't a run's.
  """
  path = workdir / 'config.json'
  if not path.is_file():
    raise UserError(f'{workdir} is not the workdir of a run (no config.json): give the --workdir you trained with')
  return ConfigDict(json.loads(path.read_text())).lock()


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Replaces a JSON file in one step."""
  replace_text(path, json.dumps(value, indent=2) + '\n')


def replace_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file in one step, so that a crash leaves the old one or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text)
  os.replace(temporary, path)


def write_predictions(workdir: pathlib.Path, labels: np.ndarray, predictions: np.ndarray) -> None:
  """Writes predictions.npz: labels and predictions, int16 [n], of the test split, in its order."""
  temporary = workdir / 'predictions.npz.tmp'
  with open(temporary, 'wb') as file:
    np.savez_compressed(file, labels=labels.astype(np.int16), predictions=predictions.astype(np.int16))
  os.replace(temporary, workdir / 'predictions.npz')


def read_predictions(workdir: pathlib.Path) -> tuple[np.ndarray, np.ndarray] | None:
  """Labels and predictions of a finished run's test split; None if the workdir has none."""
  path = workdir / 'predictions.npz'
  if not path.exists():
    return None
  with np.load(path) as arrays:
    return arrays['labels'], arrays['predictions']


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """A nested config by dotted key, as {'model.width': 64}."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
