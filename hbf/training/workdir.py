"""The folder of a run: who may write there, which config it belongs to, its logs and its result."""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

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
  workdir.mkdir(parents=True, exist_ok=True)
  with open(workdir / '.lock', 'w') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise UserError(f'{workdir} is in use by another run: wait for it, or choose another --workdir') from None
    yield


def _is_run(workdir: pathlib.Path) -> bool:
  return any((workdir / name).exists() for name in ('config.json', '.lock'))


def claim(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Writes the resolved config, or checks that it is the one the workdir was made with.

  Raises:
    UserError: it isn't; the message names the keys that differ.
  """
  path = workdir / 'config.json'
  mine = json.loads(config.to_json())
  if not path.exists():
    write_json(path, mine)
    return
  theirs = json.loads(path.read_text())
  old, new = _flatten(theirs), _flatten(mine)
  differ = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and key not in FREE]
  if differ:
    shown = '; '.join(f'{key} is {old.get(key)!r} there, {new.get(key)!r} here' for key in differ[:3])
    more = f' and {len(differ) - 3} more' if len(differ) > 3 else ''
    raise UserError(f'{workdir} holds a run of another config ({shown}{more}): choose another --workdir')


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
  """Replaces a file in one step, so that a crash leaves the old one or the new one."""
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(json.dumps(value, indent=2) + '\n')
  os.replace(temporary, path)


def _flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= _flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
