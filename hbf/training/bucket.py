"""Objects on a bucket (s3:// or gs://), and the lock of a run there.

An object store has no append, no rename and no flock. It replaces single objects atomically, and it can refuse to
replace an object that exists. The lock needs only these two.
"""

import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hbf.errors import UserError, first_line
from hbf.training.workdir import CURE, parse_json

EXTRAS = {'s3': 's3fs', 'gs': 'gcsfs'}  # the package that reads each kind of bucket; the extra has the kind's name
BEAT = 10.0  # seconds between two signs of life of a lock's owner
SILENCE = 60.0  # seconds without a sign of life after which a lock counts as left behind
_PATTERN = '*?['  # characters that begin a pattern of names
LOOK = 1.0  # seconds between two looks at the lock of another process


def is_bucket(address: object) -> bool:
  """Return True if an address starts with the name of a kind of bucket, such as s3://."""
  return str(address).partition('://')[0] in EXTRAS and '://' in str(address)


class Bucket:
  """The objects under an address such as s3://bucket/runs/c10. Their names are relative to it.

  Credentials, region and server are those that the user's environment gives to s3fs or gcsfs. All methods raise
  UserError if the bucket is missing, can't be reached or refuses the request.

  Attributes:
    address: the address, without a slash at its end.
  """

  def __init__(self, address: str):
    """Connect to the bucket.

    Raises:
      UserError: the address names a bucket but no folder in it, or has a character of patterns, or the package for
        this kind of bucket is missing.
    """
    kind = address.partition('://')[0]
    if not re.fullmatch(r'\w+://[^/\s]+(/[^/\s]+)+/?', address) or '/..' in address:
      raise UserError(f'{address} names no folder on a bucket: write {kind}://BUCKET/FOLDER')
    if found := set(address) & set(_PATTERN):
      raise UserError(f'{address} has {min(found)!r}, which buckets take for a pattern: choose another --workdir')
    if importlib.util.find_spec(EXTRAS[kind]) is None:
      raise UserError(f"{address} needs the package {EXTRAS[kind]}: install it by pip install 'hbf[{kind}]'")
    import fsspec

    self.address = address.rstrip('/')
    with self._naming_trouble():
      self._store, self._root = fsspec.url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True)

  def read(self, name: str) -> bytes | None:
    """Return the content of an object. None if it does not exist."""
    with self._naming_trouble():
      try:
        return self._store.cat_file(self._path(name))
      except FileNotFoundError:
        return None

  def write(self, name: str, content: bytes) -> None:
    """Write or replace an object."""
    with self._naming_trouble():
      self._store.pipe_file(self._path(name), content)

  def create(self, name: str, content: bytes) -> bool:
    """Write an object unless it exists. Return True if it now has this content.

    The answer of the store is not reliable, so the object is read back. A store may ignore the condition "unless it
    exists". If a request is sent twice, the store may refuse the second although the first has succeeded.
    """
    try:
      with self._naming_trouble():
        self._store.pipe_file(self._path(name), content, mode='create')
    except (OSError, UserError):
      if self.read(name) is None:
        raise
    return self.read(name) == content

  def names(self, folder: str = '') -> list[str]:
    """Return the names of all objects in a folder, sorted and relative to the address. []: there are none."""
    with self._naming_trouble():
      try:
        self._store.invalidate_cache()
        found = self._store.find(self._path(folder) if folder else self._root)
      except FileNotFoundError:
        return []
      return sorted(path.removeprefix(f'{self._root}/') for path in found)

  def is_empty(self) -> bool:
    """Return True if there is nothing at the address."""
    with self._naming_trouble():
      try:
        return not [path for path in self._store.ls(self._root, detail=False) if path.strip('/') != self._root]
      except FileNotFoundError:
        return True

  def upload(self, files: Mapping[str, pathlib.Path]) -> None:
    """Write or replace objects. `files` has the local file of each object, by the name of the object."""
    with self._naming_trouble():
      self._store.put([str(path) for path in files.values()], [self._path(name) for name in files])

  def download(self, files: Mapping[str, pathlib.Path]) -> None:
    """Download objects. `files` has the local file to write for each object, by the name of the object.

    Raises:
      FileNotFoundError: an object is missing.
      UserError: see the class.
    """
    with self._naming_trouble(missing=FileNotFoundError):
      self._store.get([self._path(name) for name in files], [str(path) for path in files.values()])

  def remove(self, names: Sequence[str]) -> None:
    """Remove objects. Do nothing for an object that does not exist."""
    # The store would take a name such as a[1] for a pattern, and remove a1.
    paths = [re.sub(f'[{re.escape(_PATTERN)}]', r'[\g<0>]', self._path(name)) for name in names]
    with self._naming_trouble(), contextlib.suppress(FileNotFoundError):
      if paths:
        self._store.rm(paths)

  def _path(self, name: str) -> str:
    return f'{self._root}/{name}'

  @contextlib.contextmanager
  def _naming_trouble(self, missing: type[Exception] = UserError) -> Iterator[None]:
    """Turn each error of the store inside the context into a `UserError` of one line.

    A FileNotFoundError becomes an error of the type `missing`.
    """
    try:
      yield
    except FileNotFoundError as error:
      raise missing(f'{self.address} cannot be used ({first_line(error)}): make the bucket first') from error
    except PermissionError as error:
      raise UserError(
        f'{self.address} refuses access ({first_line(error)}): see which credentials this process has, and what they '
        'allow'
      ) from error
    except Exception as error:  # each store has its own types of errors
      raise UserError(
        f'{self.address} cannot be reached ({type(error).__name__}: {first_line(error)}): '
        'see the network, the credentials and the address of the server, and give the same command again'
      ) from error


class LockLost(UserError):
  """An error: another process has taken over the run."""


class Lock:
  """The lock of a run on a bucket: objects terms/<term>/lock.json, where a term is a number.

  The process that created the object with the highest term has the lock, and is its owner. To take the lock, a
  process creates the object with the next term. Only one process can do this. The owner rewrites its object every
  BEAT seconds, as a sign of life. If the object stays unchanged for SILENCE seconds, the owner counts as dead, and
  another process may create the object with the next term. The clocks of two machines are never compared. If an owner
  was only suspended, it finds a higher term when it goes on, and stops writing.

  Attributes:
    term: the number of the term that this process took.
  """

  def __init__(self, bucket: Bucket, owner: str, say: Callable[[str], None]):
    """Take the lock.

    Args:
      bucket: the run's objects.
      owner: a name for the local folder of the run. The caller has locked this folder on this host. So an earlier
        owner with the same name and host is certainly dead, and its lock is taken without waiting.
      say: a function that prints a text for the user.

    Raises:
      UserError: another process has the lock.
    """
    self._bucket, self._owner = bucket, {'owner': owner, 'host': socket.gethostname(), 'pid': os.getpid()}
    last = last_term(bucket)
    left = _read(bucket, last)
    if left and not left['released'] and any(left[key] != self._owner[key] for key in ('owner', 'host')):
      _wait_for_end(bucket, last, left, say)
    self.term, self._beats, self._since = last + 1, 0, _now()
    if not bucket.create(_name(self.term), self._content()):
      raise _in_use(bucket, _read(bucket, self.term))

  def check(self) -> None:
    """Raise LockLost if another process has taken over the run."""
    last = last_term(self._bucket)
    holder = _read(self._bucket, last)
    if last != self.term or any(holder.get(key) != value for key, value in self._owner.items()):
      raise LockLost(f'{self._bucket.address} was taken over by {_describe(holder)}: nothing more is written there')

  def beat(self, released: bool = False) -> None:
    """Rewrite the lock's object, as a sign of life. If `released` is True, note in it that the lock is free.

    Raises:
      LockLost: another process has taken over the run.
    """
    self.check()
    self._beats += 1
    self._bucket.write(_name(self.term), self._content(released))

  @contextlib.contextmanager
  def held(self, lost: Callable[[LockLost], None]) -> Iterator[None]:
    """Give signs of life during the context, and release the lock at its end.

    Args:
      lost: a function that is called in another thread if another process has taken the lock.
    """
    ended = threading.Event()

    def live() -> None:
      while not ended.wait(BEAT):
        try:
          self.beat()
        except LockLost as error:
          return lost(error)
        except UserError:  # the store can't be reached; it may answer the next time
          pass

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
      yield
    finally:
      ended.set()
      thread.join()
      with contextlib.suppress(UserError):
        self.beat(released=True)

  def _content(self, released: bool = False) -> bytes:
    about = {**self._owner, 'since': self._since, 'time': _now(), 'beats': self._beats, 'released': released}
    return json.dumps(about, indent=2).encode()


def last_term(bucket: Bucket) -> int:
  """Return the number of the run's newest lock, its term (see `Lock`). 0: nobody has locked the run yet."""
  return max((term_of(name) for name in bucket.names('terms') if name.endswith('/lock.json')), default=0)


def term_of(name: str) -> int:
  """Return the term of an object of a run, a lock or a manifest in `terms`. 0: it is an object of another program."""
  match = re.fullmatch(r'terms/(\d+)/(lock|manifest)\.json', name)
  return int(match[1]) if match else 0


def _name(term: int) -> str:
  return f'terms/{term:08}/lock.json'


def _read(bucket: Bucket, term: int) -> dict[str, Any]:
  """Return the content of the lock with the number `term`. {}: the lock is gone, because there is a newer one."""
  content = bucket.read(_name(term))
  keys = ('owner', 'host', 'pid', 'since', 'time', 'beats', 'released')
  return {} if content is None else parse_json(content, f'{bucket.address}/{_name(term)}', CURE, *keys)


def _wait_for_end(bucket: Bucket, term: int, left: Mapping[str, Any], say: Callable[[str], None]) -> None:
  """Wait until the owner of a lock has released it, or has given no sign of life for SILENCE seconds.

  Args:
    bucket: the run's objects.
    term: the number of the lock.
    left: the content of the lock before the wait.
    say: a function that prints a text for the user.

  Raises:
    UserError: the content of the lock has changed, so its owner is alive.
  """
  say(f'{bucket.address} is locked by {_describe(left)}; waits up to {SILENCE:.0f} s for a sign of life')
  end = time.monotonic() + SILENCE
  while time.monotonic() < end:
    time.sleep(LOOK)
    now = _read(bucket, term)
    if now.get('released'):
      return
    if now != left:
      raise _in_use(bucket, now or left)


def _in_use(bucket: Bucket, holder: Mapping[str, Any]) -> UserError:
  return UserError(f'{bucket.address} is in use by {_describe(holder)}: wait for it, or choose another --workdir')


def _describe(holder: Mapping[str, Any]) -> str:
  if not holder:
    return 'another process'
  return f'process {holder["pid"]} on {holder["host"]} (since {holder["since"]}, last sign of life {holder["time"]})'


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
