"""Run folders on a bucket: a local folder in which a run works, a copy on the bucket, and a manifest of its files.

The training knows only the local folder. While a run trains, a thread uploads each new checkpoint together with the
other files of the run. The bucket has these objects:

    terms/<term>/lock.json        the lock of the run, taken by one owner (`hbf.training.bucket.Lock`)
    terms/<term>/manifest.json    the name, size and checksum of every file of the run, as the owner last uploaded it
    files/<checksum>/<name>       the files

A file is never replaced, because its checksum is in its name. Files are uploaded first, and the manifest last. So at
any moment the newest manifest, which has the highest term, describes a state from which the run can go on. Each owner
writes only the manifest of its own term. So a process that has lost the lock without noticing can't change the state.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from rich.console import Console

from hbf.arguments import home_path
from hbf.data.images.files import file_sha256
from hbf.errors import UserError
from hbf.evaluation.tables import say
from hbf.training.bucket import Bucket, Lock, LockLost, is_bucket, term_of
from hbf.training.machine import cache_folder
from hbf.training.side_file import EDITS, LEARNED
from hbf.training.workdir import COPY, CURE, held, naming_trouble, parse_json, read_json, write_json

POLL = 0.5  # seconds between two looks for a new checkpoint
_REMOVABLE = ('result.json', EDITS, LEARNED)  # a longer run, `hbf edit` and `hbf learn` remove these
_TRIES = 20  # attempts to catch a folder while nothing in it appears or vanishes
_Files = dict[str, dict[str, Any]]  # name in the run folder: {'sha256': …, 'bytes': …}


@contextlib.contextmanager
def mirrored(address: str | os.PathLike[str], console: Console, must_exist: bool = False) -> Iterator[pathlib.Path]:
  """Give a `with` statement the local folder of a run, for commands that train or change the run.

  If the address is on a bucket, the folder first gets the files of the run from there. Its files are uploaded after
  each checkpoint, and at the end of the context. If the address is not on a bucket, it is itself the folder.

  Args:
    address: a local folder, or an address on a bucket.
    console: where messages are printed.
    must_exist: True to refuse an address on a bucket that has no run yet.

  Raises:
    UserError: the bucket can't be used, or another process has the lock. Or the address holds objects that are not
      a run, or nothing although `must_exist` is True.
  """
  if not is_bucket(address):
    yield pathlib.Path(home_path(address))
    return
  if jax.process_count() > 1:
    raise UserError(f'{address} is on a bucket, for runs of one process only: choose a --workdir that all share')
  bucket = Bucket(str(address))
  home = _home(bucket)
  folder = home / 'run' / _folder_name(bucket)
  with contextlib.ExitStack() as stack:
    with _named(bucket.address, home):
      stack.enter_context(held(home))
    if _newest(bucket) is None and must_exist:  # it raises if something else is there, before a lock is written
      raise _no_run(bucket)
    lock = Lock(bucket, _owner(home), lambda text: say(console, text))
    mirror = Mirror(bucket, lock, home, folder, console)
    with _named(bucket.address, folder), lock.held(mirror.lose):
      with naming_trouble(folder):
        mirror.pull()
      with mirror.uploading():
        yield folder
    say(console, f'{bucket.address} has all files of the run')


def local_copy(address: str | os.PathLike[str]) -> pathlib.Path:
  """Return a local folder with the files of a run, for commands that only read the run.

  If the address is on a bucket, the folder is a copy. A file that a command writes into the copy is not uploaded. If
  the address is not on a bucket, it is itself the folder.

  Raises:
    UserError: the bucket can't be read, or holds no run.
  """
  if not is_bucket(address):
    return pathlib.Path(home_path(address))
  bucket = Bucket(str(address))
  home = _home(bucket)
  folder = home / 'copy' / _folder_name(bucket)
  with naming_trouble(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with open(home / '.copy-lock', 'a') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)  # of two commands that begin at once, one downloads
      for _ in range(_TRIES):
        if (files := _newest(bucket)) is None:
          raise _no_run(bucket)
        with contextlib.suppress(FileNotFoundError):  # the run goes on, and has just replaced this state
          _update_copy(bucket, files, folder, home)
          return folder
  raise UserError(f'{bucket.address} lacks files that its manifest names: {CURE}')


def _update_copy(bucket: Bucket, files: _Files, folder: pathlib.Path, home: pathlib.Path) -> None:
  """Bring a copy for reading to the state of a manifest. Files that commands wrote into the copy stay.

  Args:
    bucket: the objects of the run.
    files: the files of the manifest.
    folder: the copy.
    home: the folder of all local files for this run. Its copy.json has the names of the files that the copy may have
      from the bucket.

  Raises:
    FileNotFoundError: an object is missing.
    UserError: a file is damaged.
  """
  listed = home / 'copy.json'
  stored = read_json(listed, 'remove it', 'names') or {'names': []}
  write_json(listed, {'names': sorted({*stored['names'], *files})})  # if this process is killed, none is forgotten
  _download(bucket, files, folder, home / 'copy-downloads')
  for name in (_inodes(folder).keys() & stored['names']) - files.keys():
    (folder / name).unlink()
  _remove_checkpoints(folder, files)
  write_json(listed, {'names': sorted(files)})
  (folder / COPY).write_text(bucket.address)


class Mirror:
  """A bucket's copy of a local run folder, kept up to date by the process that has the lock."""

  def __init__(self, bucket: Bucket, lock: Lock, home: pathlib.Path, folder: pathlib.Path, console: Console):
    """Store the arguments.

    Args:
      bucket: the objects of the run.
      lock: the lock, which this process has.
      home: the folder of all local files for this run, such as uploads that have begun.
      folder: the run folder, which lies in `home`.
      console: where warnings are printed.
    """
    self._bucket, self._lock, self._home, self._folder, self._console = bucket, lock, home, folder, console
    self._uploaded: _Files = {}
    self._sums: dict[tuple[str, int, int], str] = {}  # of files in checkpoints, which never change
    self._lost: LockLost | None = None
    self._interrupts = False

  def pull(self) -> None:
    """Bring the local folder to the state on the bucket, and write a manifest of this state for the term of the lock.

    The local folder may already have this state and newer checkpoints. Then it stays as it is. So a run that was
    killed loses nothing on this machine.

    Raises:
      UserError: the address holds objects that are not a run, or a file is damaged or missing.
    """
    stored, known = _newest(self._bucket), read_json(self._home / 'manifest.json', CURE, 'files')
    if stored is None and known is not None:
      raise UserError(
        f'{self._bucket.address} holds no run any more, but {self._home} has a copy of one: remove this folder to '
        'begin anew, or restore the objects'
      )
    states = [known['files'], known.get('next')] if known else []
    if stored is None or stored not in states or not _has(self._folder, stored):
      (self._home / 'manifest.json').unlink(missing_ok=True)
      try:
        _download(self._bucket, stored or {}, self._folder, self._home / 'downloads')
      except FileNotFoundError as error:
        raise UserError(f'{self._bucket.address} lacks a file that its manifest names ({error}): {CURE}') from error
      for name in _inodes(self._folder).keys() - (stored or {}).keys():
        (self._folder / name).unlink()
      _remove_checkpoints(self._folder, stored or {})
    self._write_manifest(stored or {})
    self._remove_others()

  @contextlib.contextmanager
  def uploading(self) -> Iterator[None]:
    """Upload each new checkpoint during the context, and all files at its end.

    Raises:
      UserError: the upload at the end failed. The local folder has all files, and the same command goes on from them.
    """
    ended = threading.Event()
    thread = threading.Thread(target=self._follow, args=[ended], daemon=True)
    self._interrupts = threading.current_thread() is threading.main_thread()
    thread.start()
    try:
      try:
        yield
      finally:
        self._interrupts = False
        ended.set()
        thread.join()
    except BaseException:
      if self._lost:
        raise self._lost from None
      try:
        self._push_all()
      except UserError as error:
        say(self._console, f'warning: not uploaded: {error}')
      raise
    if self._lost:
      raise self._lost
    self._push_all()

  def _push_all(self) -> None:
    """Upload the folder for the last time. Raise UserError if something keeps changing its files."""
    if not self.push():
      raise UserError(
        f'{self._folder} changes faster than it can be uploaded: end what writes into it, and give the same command '
        'again'
      )

  def lose(self, error: LockLost) -> None:
    """Remember that the lock is lost, and stop the run as Ctrl-C does."""
    self._lost = self._lost or error
    if self._interrupts:
      self._interrupts = False
      signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # it also ends a wait

  def _follow(self, ended: threading.Event) -> None:
    """Upload the folder whenever its checkpoints or its result.json have changed, until the event is set."""
    seen, told = set[str](), ''
    while not ended.wait(POLL):
      if (now := self._milestones()) == seen:
        continue
      try:
        seen = now if self.push() else seen
      except LockLost as error:
        return self.lose(error)
      except UserError as error:  # the run goes on, and this thread tries again
        if str(error) != told:
          told = str(error)
          say(self._console, f'warning: not uploaded: {told}')

  def _milestones(self) -> set[str]:
    """Return the names whose change starts an upload: complete checkpoints, and result.json if it is there."""
    steps = {path.name for path in (self._folder / 'checkpoints').glob('*') if path.name.isdecimal()}
    return steps | {path.name for path in self._folder.glob('result.json')}

  def push(self) -> bool:
    """Upload the files that have changed, then the manifest. Then remove the objects that it names no longer.

    Return False, without an upload, if files appeared or vanished in the folder during each attempt to copy it.
    """
    with naming_trouble(self._home):
      staged = _stage(self._folder, self._home / 'uploads')
      if staged is None:
        return False
      files = {name: self._describe(name, path) for name, path in staged.items()}
    if files == self._uploaded:
      return True
    old = {_object(name, about) for name, about in self._uploaded.items()}
    new = {_object(name, about): staged[name] for name, about in files.items()}
    self._bucket.upload({key: path for key, path in new.items() if key not in old})
    # So the local folder is known to have the next state, even if this process is killed before it writes that the
    # bucket has it.
    write_json(self._home / 'manifest.json', {'format': 1, 'files': self._uploaded, 'next': files})
    self._write_manifest(files)
    self._lock.check()
    self._bucket.remove(sorted(old - new.keys()))
    return True

  def _describe(self, name: str, path: pathlib.Path) -> dict[str, Any]:
    about = path.stat()
    if not name.startswith('checkpoints/'):
      return {'sha256': file_sha256(path), 'bytes': about.st_size}
    same = (name, about.st_ino, about.st_mtime_ns)
    self._sums[same] = self._sums.get(same) or file_sha256(path)
    return {'sha256': self._sums[same], 'bytes': about.st_size}

  def _write_manifest(self, files: _Files) -> None:
    """Write the manifest to the bucket, and then to the local file that says which state the local folder has."""
    self._lock.check()
    manifest = {'format': 1, 'files': files}
    self._bucket.write(_manifest(self._lock.term), json.dumps(manifest, indent=2).encode())
    write_json(self._home / 'manifest.json', manifest)
    self._uploaded = files

  def _remove_others(self) -> None:
    """Remove the locks and manifests of earlier owners, and the files that the manifest does not name."""
    kept = {_object(name, about) for name, about in self._uploaded.items()}
    terms = [name for name in self._bucket.names('terms') if 0 < term_of(name) < self._lock.term]
    self._bucket.remove(terms + [name for name in self._bucket.names('files') if name not in kept])


def _no_run(bucket: Bucket) -> UserError:
  return UserError(f'{bucket.address} holds no run: give the --workdir you trained with')


def _newest(bucket: Bucket) -> _Files | None:
  """Return the files of the newest manifest. None if nothing is at the address.

  Raises:
    UserError: the address holds objects that are not a run, or the manifest is damaged.
  """
  for _ in range(_TRIES):
    terms = [name for name in bucket.names('terms') if term_of(name) and name.endswith('/manifest.json')]
    if not terms:
      if not bucket.names('terms') and not bucket.is_empty():
        raise UserError(f'{bucket.address} exists and is not a run: choose another --workdir, or remove it')
      return None
    if (content := bucket.read(terms[-1])) is not None:  # None: the next owner has just removed it
      return parse_json(content, f'{bucket.address}/{terms[-1]}', CURE, 'files')['files']
  raise UserError(f'{bucket.address} changes faster than it can be read: give the same command again')


def _download(bucket: Bucket, files: _Files, folder: pathlib.Path, scratch: pathlib.Path) -> None:
  """Download the files of a manifest that a folder does not have yet.

  Args:
    bucket: the objects of the run.
    files: the files of the manifest.
    folder: the folder that gets the files, each after a check of its checksum.
    scratch: a folder for the files before this check. Its old content is removed.

  Raises:
    FileNotFoundError: an object is missing.
    UserError: a file is damaged.
  """
  shutil.rmtree(scratch, ignore_errors=True)
  scratch.mkdir(parents=True)
  lacking = [name for name, about in files.items() if not _is(folder / name, about)]
  if wrong := [name for name in lacking if '..' in name.split('/') or name.startswith('/')]:
    raise UserError(f'{bucket.address} has a file {wrong[0]!r}, which lies outside a run folder: {CURE}')
  parts = {name: scratch / str(number) for number, name in enumerate(lacking)}
  bucket.download({_object(name, files[name]): path for name, path in parts.items()})
  for name, path in parts.items():
    if not _is(path, files[name]):
      raise UserError(f'{bucket.address}/{_object(name, files[name])} is damaged: {CURE}')
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, folder / name)


def _stage(folder: pathlib.Path, staging: pathlib.Path) -> dict[str, pathlib.Path] | None:
  """Copy a run folder into the folder `staging` for an upload, while the run may go on.

  Files of checkpoints get hard links, which stay if the run deletes the files. All others are copied, since a run may
  append to them.

  Returns:
    The path of each copy or link, by the file's name in the run folder. None if files appeared or vanished during
    each attempt.
  """
  for _ in range(_TRIES):
    shutil.rmtree(staging, ignore_errors=True)
    found, staged = _inodes(folder), dict[str, pathlib.Path]()
    with contextlib.suppress(FileNotFoundError):
      for name in found:
        staged[name] = staging / name
        staged[name].parent.mkdir(parents=True, exist_ok=True)
        (_link if name.startswith('checkpoints/') else shutil.copyfile)(folder / name, staged[name])
      if _inodes(folder) == found:
        return staged
  return None


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
  try:
    os.link(source, target)
  except FileNotFoundError:
    raise
  except OSError:  # a file system without links
    shutil.copyfile(source, target)


def _inodes(folder: pathlib.Path) -> dict[str, int]:
  """Return the inode of each file of a run, by the file's name. If a file is replaced, its inode changes.

  Files that are being written are left out.
  """
  found = {}
  for parent, _, files in os.walk(folder):
    for path in (pathlib.Path(parent, file) for file in files):
      name = path.relative_to(folder).as_posix()
      kind, _, rest = name.partition('/')
      unfinished = kind == 'checkpoints' and not rest.partition('/')[0].isdecimal()
      if not unfinished and not name.endswith('.tmp') and name != '.lock' and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
          found[name] = path.stat().st_ino
  return found


def _has(folder: pathlib.Path, files: _Files) -> bool:
  """Return True if a folder has the files of a manifest, or is ahead of it.

  Newer checkpoints may be in place of the manifest's. Files that a command may have removed may be missing.
  """
  others = [name for name in files if not name.startswith('checkpoints/') and name not in _REMOVABLE]
  wanted, there = _steps(files), _steps(_inodes(folder))
  return all((folder / name).is_file() for name in others) and max(wanted, default=0) <= max(there, default=0)


def _steps(names: Mapping[str, Any]) -> set[int]:
  return {int(name.split('/')[1]) for name in names if name.startswith('checkpoints/')}


def _remove_checkpoints(folder: pathlib.Path, files: _Files) -> None:
  """Remove the checkpoints that are not among the files of a manifest, and all unfinished checkpoints."""
  kept = {str(step) for step in _steps(files)}
  for path in (folder / 'checkpoints').glob('*'):
    if path.name not in kept and path.is_dir():
      shutil.rmtree(path)


def _is(path: pathlib.Path, about: Mapping[str, Any]) -> bool:
  return path.is_file() and path.stat().st_size == about['bytes'] and file_sha256(path) == about['sha256']


def _object(name: str, about: Mapping[str, Any]) -> str:
  return f'files/{about["sha256"][:16]}/{name}'


def _manifest(term: int) -> str:
  return f'terms/{term:08}/manifest.json'


def _home(bucket: Bucket) -> pathlib.Path:
  """Return the folder of all local files for a run on a bucket: ~/.cache/hbf/buckets/<checksum of the address>."""
  server = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL') or ''
  return cache_folder('buckets') / hashlib.sha256(f'{server} {bucket.address}'.encode()).hexdigest()[:16]


def _folder_name(bucket: Bucket) -> str:
  return bucket.address.rpartition('/')[2]


def _owner(home: pathlib.Path) -> str:
  """Return the name that a local folder has in locks: a random text, drawn once and stored in the folder."""
  path = home / 'owner.json'
  if (stored := read_json(path, 'remove it', 'owner')) is None:
    write_json(path, stored := {'owner': uuid.uuid4().hex})
  return stored['owner']


@contextlib.contextmanager
def _named(address: str, folder: pathlib.Path) -> Iterator[None]:
  """If the context raises a `UserError`, replace the path `folder` in its message by `address`."""
  try:
    yield
  except UserError as error:
    if str(folder) not in str(error):
      raise
    raise UserError(str(error).replace(str(folder), address)) from error
