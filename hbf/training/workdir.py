"""The run folder: its lock, its config, the identity of its data, and its predictions."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

import numpy as np
from ml_collections import ConfigDict

from hbf import files
from hbf.arguments import is_url
from hbf.config.defaults import keys, stage_keys
from hbf.data.images.arrays import NAME as ARRAYS
from hbf.errors import UserError, choose, first_line
from hbf.interop.tensors import load_npz
from hbf.markdown import printable
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task
from hbf.training.schema import current, stamp

# Keys that may differ when a run is resumed: they do not change the learned parameters.
# Key data.input may change the measured mean and deviation, but a resumed run keeps those that it has measured.
FREE = (
  'mesh.data',
  'mesh.fsdp',
  'mesh.tensor',
  'model.scan_layers',
  'model.remat',
  'data.dir',
  'data.root',
  'data.download',
  'data.cache',
  'data.input',
  'data.resident_bytes',
  'data.workers',
  'train.steps_per_call',
  'evaluate.batch_size',
  'checkpoint.every',
  'checkpoint.keep',
  'log.to',
  'log.profile',
)
# Keys whose values are measured on the training data if they are empty.
MEASURED = ('mean', 'std', 'target_mean', 'target_std')
_SECTIONS = ('checkpoint', 'data', 'evaluate', 'log', 'model', 'optimizer', 'recipe', 'seed', 'train')
CURE = 'restore it from a copy, or choose another --workdir'  # of a damaged file of a run, for messages
DATA_CURE = 'restore it from a copy, or remove it; the data of the run are then not checked'
TEACHER = 'teacher.json'  # the checksum of a teacher's weights, see hbf.training.teacher
COPY = '.copy-of'  # a file with an address on a bucket marks a folder as a copy for reading
PATH_ROOM = 300  # bytes of the longest path inside a run folder, with a margin
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE)


def default_workdir(config: ConfigDict) -> pathlib.Path:
  """Return the default run folder, runs/<data>-<model>-<recipe>-<seed>."""
  return pathlib.Path('runs') / f'{config.data.name}-{config.model.name}-{config.recipe}-{config.seed}'


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Make and lock a run folder. The lock ends with the context, or if the process crashes.

  Raises:
    UserError: the path can't be a folder, another process has the lock, the folder has files but no run, or it is a
      copy of a run on a bucket.
  """
  check_run_folder(workdir)
  with held(workdir):
    yield


def check_run_folder(workdir: pathlib.Path) -> None:
  """Check that a path is, or can become, a run folder.

  Raises:
    UserError: the path can't be a folder, the folder has files but no run, or it is a copy of a run on a bucket.
  """
  check_place(workdir)
  if (workdir / COPY).exists():
    address = (workdir / COPY).read_text()
    raise UserError(
      f'{workdir} is a copy of {address} for reading: to write, copy the folder and remove {COPY} there'
    )
  if workdir.exists() and (not workdir.is_dir() or (any(workdir.iterdir()) and not _is_run(workdir))):
    raise UserError(f'{workdir} exists and is not a run: choose another --workdir, or remove it')


def check_place(folder: pathlib.Path) -> None:
  """Check the path of a run folder. The folder need not exist.

  Raises:
    UserError: the folder is a URL, or its path is too long or not UTF-8, or the system refuses the path.
  """
  if is_url(str(folder)):
    url = str(folder).replace(':/', '://', 1)
    raise UserError(f'{url} is a URL, but a local folder is needed here: choose a local --workdir')
  if printable(path := str(folder.absolute())) != path:
    raise UserError(f'{printable(path)} is not UTF-8, which checkpoints need: choose another --workdir')
  # Otherwise a run would fail at its first checkpoint, whose paths are longer.
  if len(os.fsencode(folder.absolute())) + PATH_ROOM > os.pathconf('/', 'PC_PATH_MAX'):
    raise UserError(f'{folder} is too long for the paths of files inside it: choose a shorter --workdir')
  try:
    folder.stat()
  except FileNotFoundError:
    pass
  except OSError as error:
    raise _unusable(folder, error) from None


def _unusable(folder: pathlib.Path, error: OSError) -> UserError:
  return UserError(f'{folder} cannot be used as a folder ({_words(error)}): choose another --workdir')


def _words(error: OSError) -> str:
  return (error.strerror or str(error)).lower()


@contextlib.contextmanager
def naming_trouble(workdir: pathlib.Path) -> Iterator[None]:
  """Turn an error inside the context into a `UserError` of one line, if the system refused to read or write.

  Raises:
    UserError: the disk is full, a permission is missing, or I/O failed. The message names the folder.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    again = 'give the same command again; it goes on from the newest checkpoint'
    if found := reason_of(error, _FULL):
      raise UserError(
        f'{workdir} could not be written: {found}. Make room and {again}, and those that are complete are intact'
      ) from error
    if found := reason_of(error):
      raise UserError(
        f'the run in {workdir} met trouble: {found} ({first_line(error, 300)}). Mend that and {again}'
      ) from error
    raise


def reason_of(error: BaseException, codes: Collection[int] = _FULL + _REFUSED) -> str | None:
  """Return the operating system's message for an error if its errno is one of `codes`, else None.

  Errors of Orbax and TensorStore have no errno, but they contain the message, or were caused by an error that
  contains it. So this function also looks for the message in the error and in its causes.
  """
  for cause in _causes(error):
    for code in codes:
      if getattr(cause, 'errno', None) == code or os.strerror(code) in str(cause):
        return os.strerror(code).lower()
  return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
  """Yield an error, its cause, the cause of its cause, and so on."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


@contextlib.contextmanager
def held(workdir: pathlib.Path) -> Iterator[None]:
  """Make a folder and lock it against other processes. See `locked` for run folders.

  Raises:
    UserError: the folder can't be written, another process has the lock, or the file system has no locks.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    lock = open(workdir / '.lock', 'a')  # noqa: SIM115 (closed below)
  except OSError as error:
    raise _unusable(workdir, error) from None
  with lock as file:
    if not _lock(file, workdir):
      raise UserError(f'{workdir} is in use by another process: wait for it, or choose another --workdir')
    yield


def in_use(workdir: pathlib.Path) -> bool:
  """Return True if a process has the lock of the folder. The folder need not exist.

  Raises:
    UserError: the file system of the folder has no locks.
  """
  path = workdir / '.lock'
  if not path.exists():
    return False
  with open(path) as file:  # to read, because the folder may be another user's
    return not _lock(file, workdir, fcntl.LOCK_SH)  # shared, so that two processes that ask do not see each other


def _lock(file: TextIO, folder: pathlib.Path, kind: int = fcntl.LOCK_EX) -> bool:
  """Lock an open file until it is closed. Return False if another process has the lock.

  Args:
    file: the file.
    folder: the folder that the lock is for, for messages.
    kind: LOCK_EX or LOCK_SH of `fcntl`.
  """
  try:
    fcntl.flock(file, kind | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):  # PermissionError on file systems with POSIX locks
    return False
  except OSError as error:
    raise UserError(
      f'{folder} is on a file system without locks ({error.strerror}), so two runs could write there at once: '
      'choose a --workdir on another'
    ) from None
  return True


def _is_run(workdir: pathlib.Path) -> bool:
  """Return True if a run has begun in the folder, even if it was killed before it wrote its config."""
  names = {path.name for path in workdir.iterdir() if not files.is_draft(path, 'config.json', 'data.json')}
  return 'config.json' in names or names <= {'.lock', 'elastic', 'data.json'}


def claim(workdir: pathlib.Path, config: ConfigDict, data: Mapping[str, Any]) -> None:
  """Write the config and the data's identity into a run folder. If a run has begun there, check that they are equal.

  config.json is written last. Without it no run has begun, and data.json is from a start that was killed.

  Args:
    workdir: the run folder.
    config: the resolved config.
    data: the identity of the data, see `hbf.data.pipeline.identity`.

  Raises:
    UserError: the config or the data differ. The message names the keys that differ, or the part of the data.
  """
  begun, described = ((workdir / name).exists() for name in ('config.json', 'data.json'))
  if begun:
    if differ := differences(workdir, config):
      raise UserError(f'{workdir} holds a run of another config ({differ}): choose another --workdir')
    check_data(workdir, data)
  if not begun or not (described or (workdir / 'result.json').exists()):
    write_json(workdir / 'data.json', data)
  if not begun:
    write_json(workdir / 'config.json', stamp(json.loads(config.to_json())))


def differences(workdir: pathlib.Path, config: ConfigDict) -> str:
  """Describe the differences of a config from the config of a run folder, see `config_differences`.

  The path of a teacher may differ if the folder has the checksum of its weights, which identifies the teacher.

  Returns:
    A text; '' if nothing differs, or the folder holds no run.
  """
  if not (workdir / 'config.json').exists():
    return ''
  stored = load_config(workdir)
  if stored.train.teacher and config.train.teacher and (workdir / TEACHER).exists():
    stored.train.teacher = config.train.teacher
  return config_differences(stored, config)


def config_differences(stored: ConfigDict, config: ConfigDict) -> str:
  """Describe the differences of a config from the stored config of a run.

  Keys that do not change the learned parameters (FREE) are left out. So are measured keys such as data.mean if
  `config` has no values for them yet.

  Returns:
    A text; '' if nothing differs.
  """
  old, new = (flatten(json.loads(c.to_json())) for c in (stored, config))
  measured = {f'data.{key}' for key in MEASURED if not new.get(f'data.{key}')}
  keys = sorted((old.keys() | new.keys()) - {*FREE} - measured)
  differ = [f'{key} is {old.get(key)!r} there, {new.get(key)!r} here' for key in keys if old.get(key) != new.get(key)]
  return '; '.join(differ[:3]) + (f' and {len(differ) - 3} more' if len(differ) > 3 else '')


def check_data(workdir: pathlib.Path, data: Mapping[str, Any]) -> None:
  """Check that data are the data of a run. An old run folder without data.json passes without a check.

  Args:
    workdir: the run folder.
    data: the identity of the data, see `hbf.data.pipeline.identity`.

  Raises:
    UserError: the data differ. The message names a difference.
  """
  read = read_data(workdir, 'fingerprint')
  if read is None:
    return
  stored, found = (_without_names(facts) for facts in (read, json.loads(json.dumps(data))))
  if stored != found:
    theirs = 'set data.root or data.dir to those (commands for trained runs: --data_root, --data_dir)'
    cure = 'give the same arrays' if found['name'] == ARRAYS else theirs
    raise UserError(
      f'{workdir} was trained on other data ({other_data(stored, found)}): {cure}, or choose another --workdir'
    )


def _without_names(data: dict[str, Any]) -> dict[str, Any]:
  """Return the identity of data without its entry `names`, which older run folders do not have."""
  return {key: value for key, value in data.items() if key != 'names'}


def other_data(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
  """Describe the difference of two identities of data, see `hbf.data.pipeline.identity`, that are not equal."""
  if there.get('tokenizer') != here.get('tokenizer'):
    return 'other tokens'
  words = {'name': 'data set', 'classes': 'classes', 'image_shape': 'image shape', 'splits': 'sizes'}
  for key, what in words.items():
    if there.get(key) != here.get(key):
      return f'{what} {_brief(there.get(key), here.get(key))} there, {_brief(here.get(key), there.get(key))} here'
  return 'as many examples of the same kind, but others'


def _brief(value: Any, other: Any) -> str:
  """Describe a value that differs from `other`, for a message.

  If both are lists, name the items that `other` lacks. If it lacks none, name all items of `value`.
  """
  if isinstance(value, list) and isinstance(other, list):
    shown = [str(part) for part in value if part not in other] or list(map(str, value))
    return ', '.join(shown[:5]) + (f' and {len(shown) - 5} more' if len(shown) > 5 else '')
  if isinstance(value, Mapping):
    return ', '.join(f'{count} {name}' for name, count in value.items())
  return str(value)


def load_config(workdir: pathlib.Path) -> ConfigDict:
  """Return the config of a run, with the keys of this code (`hbf.training.schema`).

  Raises:
    UserError: the folder is a URL or not a run folder. Or the config is not valid, see `as_config`.
  """
  path = workdir / 'config.json'
  stored = read_json(path, CURE)
  if stored is None:
    check_place(workdir)  # a URL has a message of its own
    raise UserError(f'{workdir} is not the workdir of a run (no config.json): give the --workdir you trained with')
  return as_config(stored, path, CURE)


def as_config(stored: dict[str, Any], source: object, cure: str) -> ConfigDict:
  """Return the config of a config.json, translated to the keys of this code.

  Args:
    stored: the content of config.json.
    source: the path of config.json, for error messages.
    cure: advice for the user if config.json is damaged.

  Raises:
    UserError: the config uses an option that was removed, is of a newer version, or is damaged.
  """
  try:
    config = current(stored)
  except UserError as error:
    raise UserError(f'{source}: {error}') from None
  except (AttributeError, KeyError, TypeError, ValueError) as error:  # for example a section that is a number
    raise damaged(source, f'{type(error).__name__}: {error}', cure) from error
  check_keys(config, source, cure, _SECTIONS)  # after `current`, because older versions may have other sections
  _check_values(config, source, cure)
  return ConfigDict(config).lock()


def _check_values(config: dict[str, Any], source: object, cure: str) -> None:
  """Check that a config has all keys of this code, and that their values are valid. See `as_config`."""
  sections = {name.partition('.')[0]: dict for name in keys('classification') if '.' in name}
  check_kinds(config, source, cure, **sections, task=str, seed=int)
  check_kinds(config['model'], source, cure, name=str, stage1=dict, stage2=dict)
  flat = flatten(config)
  try:
    choose('task', config['task'], TASKS)
    known = keys(config['task']) | stage_keys(config['model']['name'])
    for name, key in known.items():
      if name in flat:
        key.values.check(name, flat[name])
  except UserError as error:
    raise damaged(source, str(error), cure) from None
  # A resolved config has no expansion.
  check_keys(flat, source, cure, [name for name in known if name != 'model.expansion'])


def kind_of(workdir: pathlib.Path) -> type[Task]:
  """Return the class of a run's task.

  Raises:
    UserError: see `load_config`.
  """
  return choose('task', load_config(workdir).task, TASKS)


def with_measured(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
  """Return `config` with the run's values for data.mean and the other keys in MEASURED, where `config` has none.

  The values of a run on other data, or of another task, do not fit. `claim` names the difference of the configs.
  """
  # If only one of a pair is empty, it stays empty, and the task says so.
  pairs = ((mean, std) for mean, std in zip(MEASURED[::2], MEASURED[1::2], strict=True) if mean in config.data)
  left = [key for pair in pairs if not any(config.data[key] for key in pair) for key in pair]
  if not left or not (workdir / 'config.json').is_file():
    return config
  stored, resolved = load_config(workdir), config.copy_and_resolve_references()
  if (stored.task, stored.data.name) != (config.task, config.data.name):
    return config
  resolved.data.update({key: tuple(stored.data.get(key, ())) for key in left})
  return resolved


def read_json(path: pathlib.Path, cure: str, *keys: str) -> dict[str, Any] | None:
  """Return the JSON object in a file. None if there is no such file.

  Args:
    path: the path of the file.
    cure: advice for the user if the file is damaged.
    *keys: keys that the object must have.

  Raises:
    UserError: the file cannot be read, or is damaged.
  """
  try:
    text = path.read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return None
  except OSError as error:
    raise UserError(f'{path} cannot be read ({_words(error)}): see who may read it') from None
  return parse_json(text, path, cure, *keys)


def parse_json(text: bytes, source: object, cure: str, *keys: str) -> dict[str, Any]:
  """Return the JSON object in a text; see `read_json`. `source` is the file with the text, for error messages."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:  # ValueError also if the text is not UTF-8
    raise damaged(source, str(error) if text.strip() else 'it is empty', cure) from error
  if not isinstance(value, dict):
    raise damaged(source, f'expected a JSON object, found {type(value).__name__}', cure)
  check_keys(value, source, cure, keys)
  return value


def check_keys(value: Mapping[str, Any], source: object, cure: str, keys: Sequence[str]) -> None:
  """Check that a JSON object has these keys; see `read_json`. `source` is the file with the object, for messages.

  Raises:
    UserError: some keys are missing.
  """
  if missing := [key for key in keys if key not in value]:
    raise damaged(source, f'it lacks {", ".join(missing)}', cure)


def check_kinds(value: Any, source: object, cure: str, /, **kinds: type | tuple[type, ...]) -> None:
  """Check that a JSON value is an object. For each key in `kinds`, it must have a value of the given type.

  See `check_keys` for the other arguments.

  Raises:
    UserError: the value is not an object, or a key is missing or has a value of another type.
  """
  if not isinstance(value, Mapping):
    raise damaged(source, f'expected a JSON object, found {type(value).__name__}', cure)
  check_keys(value, source, cure, [*kinds])
  for key, kind in kinds.items():
    # A bool is an int in Python, but it is no number in JSON.
    if not isinstance(value[key], kind) or (isinstance(value[key], bool) and kind is not bool):
      raise damaged(source, f'its {key} is {json.dumps(value[key])[:80]}', cure)


def check_shape(value: Any, source: object, cure: str) -> None:
  """Check that a JSON value is the shape of an image: its height, width and channels.

  See `check_keys` for the other arguments.

  Raises:
    UserError: the value is not a list of three positive integers.
  """
  if not (isinstance(value, list) and len(value) == 3 and all(type(size) is int and size > 0 for size in value)):
    raise damaged(source, f'its image_shape is {json.dumps(value)[:80]}', cure)


def damaged(source: object, what: str, cure: str) -> UserError:
  """Return an error that names the file `source`, the fault `what` in its content, and the advice `cure`."""
  return UserError(f'{source} is damaged ({what}): {cure}')


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Write a JSON file atomically. An existing file is replaced."""
  replace_text(path, json.dumps(value, indent=2) + '\n')


def replace_text(path: pathlib.Path, text: str) -> None:
  """Write a text file atomically. An existing file is replaced."""
  with replacing(path) as file:
    file.write(text.encode())


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Open a file to write that replaces the file at `path`. See `hbf.files.draft`.

  Raises:
    UserError: the file cannot be written.
  """
  try:
    with files.draft(path) as file:
      yield file
  except OSError as error:
    raise UserError(
      f'{path} could not be written ({_words(error)}): make room, or see who may write there'
    ) from error


def read_data(workdir: pathlib.Path, *keys: str) -> dict[str, Any] | None:
  """Return the content of a run's data.json. None if the run is too old to have this file. See `read_json`."""
  return read_json(workdir / 'data.json', DATA_CURE, *keys)


def read_result(workdir: pathlib.Path, *keys: str) -> dict[str, Any] | None:
  """Return the content of a run's result.json. None if the run isn't finished. See `read_json`."""
  cure = 'remove it, and give the command that trained the run again; it goes on from the newest checkpoint'
  return read_json(workdir / 'result.json', cure, *keys)


def write_predictions(workdir: pathlib.Path, per_example: Mapping[str, np.ndarray]) -> None:
  """Write predictions.npz: the arrays [n] of `per_example` by name, for the n test examples in order."""
  with replacing(workdir / 'predictions.npz') as file:
    np.savez_compressed(file, **per_example)  # type: ignore[arg-type]  # its other argument has a default


class Predictions(dict[str, np.ndarray]):
  """The arrays of a run's predictions by name, each [n] for n test examples. A missing name is a `UserError`."""

  def __init__(self, arrays: Mapping[str, np.ndarray], source: object, cure: str):
    """Hold the arrays. `source` is the file, and `cure` is the advice if an array is missing."""
    super().__init__(arrays)
    self._source, self._cure = source, cure

  def __missing__(self, name: str) -> np.ndarray:
    raise damaged(self._source, f'it lacks the array {name}', self._cure)


def read_predictions(workdir: pathlib.Path) -> Predictions | None:
  """Return the arrays of a run's predictions.npz. None if the folder has no such file.

  Raises:
    UserError: the file cannot be read.
  """
  path = workdir / 'predictions.npz'
  if not path.exists():
    return None
  cure = 'remove it; intervals over the examples are then left out'
  try:
    return Predictions(load_npz(path), path, cure)
  except ValueError as error:
    raise damaged(path, str(error), cure) from error


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Return a nested config as a flat dict with dotted keys, such as {'model.width': 64}. All begin with `prefix`."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
  return flat
