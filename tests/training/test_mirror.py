"""Run folders on a bucket. The bucket is in memory here; `test_buckets` has a server."""

import contextlib
import io
import pathlib
import shutil
import signal
import time

import fsspec
import pytest
from rich.console import Console

from hbf.errors import UserError
from hbf.training import bucket as buckets
from hbf.training import mirror
from hbf.training.bucket import Bucket, Lock, LockLost
from hbf.training.mirror import local_copy, mirrored
from hbf.training.workdir import locked

ADDRESS = 'memory://bucket/runs/c10'
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
  """Let memory:// be a bucket, empty it, and let locks and uploads hurry."""
  monkeypatch.setitem(buckets.EXTRAS, 'memory', 'fsspec')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  for module, name, seconds in ((buckets, 'BEAT', 0.02), (buckets, 'SILENCE', 0.2), (buckets, 'LOOK', 0.01)):
    monkeypatch.setattr(module, name, seconds)
  monkeypatch.setattr(mirror, 'POLL', 0.01)
  empty_bucket()


def empty_bucket():
  fsspec.filesystem('memory').store.clear()
  fsspec.filesystem('memory').pseudo_dirs[:] = ['']


def fill(folder, step, names=('params/d/1', '_CHECKPOINT_METADATA')):
  """Write files in the order of a run. A checkpoint gets its name when it is complete."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text('{}')
  (folder / 'metrics.jsonl').write_text(f'line {step}\n')
  unfinished = folder / 'checkpoints' / f'{step}.orbax-checkpoint-tmp'
  for name in names:
    (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
    (unfinished / name).write_text(f'{name} of {step}')
  unfinished.rename(folder / 'checkpoints' / str(step))


def contents(folder):
  """Return the text of each file that belongs to a run."""
  return {name: (folder / name).read_text() for name in mirror._inodes(folder) if name != mirror.COPY}


def forget():
  """Remove all local files, as on another machine."""
  shutil.rmtree(mirror._home(Bucket(ADDRESS)), ignore_errors=True)


def test_a_run_goes_on_in_another_place_with_the_same_files():
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
    (folder / 'checkpoints' / '8.orbax-checkpoint-tmp').mkdir()
    (folder / 'checkpoints' / '8.orbax-checkpoint-tmp' / 'unfinished').touch()
    before = contents(folder)
  forget()
  with mirrored(ADDRESS, QUIET) as folder:
    assert contents(folder) == before
    fill(folder, 8)
    shutil.rmtree(folder / 'checkpoints' / '4')
    after = contents(folder)
  assert contents(local_copy(ADDRESS)) == after
  names = Bucket(ADDRESS).names()
  assert sum(name.startswith('files/') for name in names) == len(after)  # what is not needed is removed
  assert [name for name in names if name.startswith('terms/')] == [
    f'terms/00000002/{name}.json' for name in ('lock', 'manifest')
  ]


def test_checkpoints_are_uploaded_while_the_run_goes_on():
  with mirrored(ADDRESS, QUIET) as folder:
    for step in (4, 8):
      fill(folder, step)
      end = time.monotonic() + 20
      while f'checkpoints/{step}/params/d/1' not in contents(local_copy(ADDRESS)) and time.monotonic() < end:
        time.sleep(0.01)
      assert contents(local_copy(ADDRESS)) == contents(folder)


class Killed(BaseException):
  """The process has ended."""


@contextlib.contextmanager
def killed_at(patch, number):
  """Let the process end at its write with this number. An upload of several objects counts each."""
  left = [number]

  def ends(*_):
    left[0] -= 1
    if left[0] < 0:
      raise Killed

  def one_by_one(self, files):
    for name, path in files.items():
      ends()
      upload(self, {name: path})

  upload, write, remove = Bucket.upload, Bucket.write, Bucket.remove
  with patch.context() as inside:
    inside.setattr(Bucket, 'upload', one_by_one)
    inside.setattr(Bucket, 'write', lambda *given: (ends(), write(*given)))
    inside.setattr(Bucket, 'remove', lambda self, names: [(ends(), remove(self, [name])) for name in names])
    with contextlib.suppress(Killed):
      yield
      return


def test_a_kill_between_any_two_writes_leaves_the_state_before_or_after(monkeypatch):
  for module, name, seconds in ((buckets, 'BEAT', 60.0), (mirror, 'POLL', 60.0), (buckets, 'SILENCE', 0.01)):
    monkeypatch.setattr(module, name, seconds)
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4, names=['a'])
    before = contents(folder)
  store, seen, after = fsspec.filesystem('memory').store, [], None
  begun = dict(store)
  while seen.count('after') < 3:  # the last of these is not killed
    forget()
    store.clear()
    store.update(begun)
    with killed_at(monkeypatch, len(seen)), mirrored(ADDRESS, QUIET) as folder:
      fill(folder, 8, names=['a'])
      shutil.rmtree(folder / 'checkpoints' / '4')
      after = contents(folder)
    found = contents(local_copy(ADDRESS))
    assert found in (before, after)
    seen.append('before' if found == before else 'after')
  assert seen == ['before'] * 6 + ['after'] * 3


def test_a_run_that_was_killed_loses_nothing_in_the_same_place(monkeypatch):
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
  with pytest.raises(Killed), monkeypatch.context() as patch, mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 8)
    patch.setattr(Bucket, 'upload', lambda *_: None)
    patch.setattr(mirror.Mirror, 'push', lambda *_: True)
    raise Killed
  with mirrored(ADDRESS, QUIET) as folder:
    assert 'checkpoints/8/params/d/1' in contents(folder)


def test_a_kill_after_the_manifest_loses_nothing_in_the_same_place(monkeypatch):
  monkeypatch.setattr(mirror, 'POLL', 60.0)
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
  write = Bucket.write

  def killed(bucket, name, content):
    write(bucket, name, content)
    if 'manifest' in name:
      raise Killed

  with pytest.raises(Killed), monkeypatch.context() as patch, mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 8)
    patch.setattr(Bucket, 'write', killed)
  fill(folder, 12)  # a checkpoint that was saved during the upload
  before = contents(folder)
  with mirrored(ADDRESS, QUIET) as folder:
    assert contents(folder) == before


def test_a_longer_run_loses_nothing_in_the_same_place(monkeypatch):
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
    (folder / 'result.json').write_text('{}')
  with monkeypatch.context() as patch:
    patch.setattr(mirror.Mirror, 'push', lambda _: False)
    with pytest.raises(Killed), mirrored(ADDRESS, QUIET) as folder:
      (folder / 'result.json').rename(folder / 'result-4.json')
      fill(folder, 8)
      raise Killed
  before = contents(folder)
  with mirrored(ADDRESS, QUIET) as folder:
    assert contents(folder) == before
  assert contents(local_copy(ADDRESS)) == before


def test_a_lock_is_refused_while_its_owner_lives_and_taken_when_it_is_dead_or_gone():
  said, here = [], Bucket(ADDRESS)
  message = rf'{ADDRESS} is in use by process \d+ on .* \(since .*\): wait for it'
  with Lock(here, 'one', said.append).held(print), pytest.raises(UserError, match=message):
    Lock(Bucket(ADDRESS), 'two', said.append)
  assert len(said) == 1 and 'waits up to' in said.pop()
  left = Lock(here, 'two', said.append)  # the first was released
  same = Lock(here, 'two', said.append)  # the same folder, whose owner is dead
  assert not said
  with pytest.raises(LockLost, match='was taken over by process'):
    left.check()
  third = Lock(here, 'three', said.append)  # no sign of life of the second
  assert len(said) == 1 and third.term == same.term + 1
  third.check()


def test_one_of_two_processes_that_take_a_lock_at_once_gets_it(monkeypatch):
  create = Bucket.create
  monkeypatch.setattr(Bucket, 'create', lambda self, name, _: create(self, name, theirs) and False)
  theirs = Lock.__new__(Lock)
  theirs._owner, theirs._since, theirs._beats = {'owner': 'other', 'host': 'far', 'pid': 7}, 'then', 0
  theirs = theirs._content()
  with pytest.raises(UserError, match='in use by process 7 on far'):
    Lock(Bucket(ADDRESS), 'one', print)


def test_a_process_that_was_asleep_changes_nothing(tmp_path):
  def mirror_in(place):
    (tmp_path / place).mkdir()
    lock = Lock(Bucket(ADDRESS), 'one', print)  # the same owner takes over at once
    return mirror.Mirror(Bucket(ADDRESS), lock, tmp_path / place, tmp_path / place / 'run', QUIET)

  asleep = mirror_in('asleep')
  asleep.pull()
  fill(tmp_path / 'asleep' / 'run', 4)
  assert asleep.push()
  mirror_in('other').pull()
  before = dict(fsspec.filesystem('memory').store)
  fill(tmp_path / 'asleep' / 'run', 8)
  with pytest.raises(LockLost, match='was taken over by'):
    asleep.push()
  assert contents(local_copy(ADDRESS)) == contents(tmp_path / 'other' / 'run')
  assert before.items() <= fsspec.filesystem('memory').store.items()  # only files that no manifest names were added


@pytest.fixture
def _ctrl_c():
  former = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores SIGINT
  yield
  signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures('_ctrl_c')
def test_a_run_that_loses_its_lock_is_stopped_like_by_ctrl_c():
  begin = time.monotonic()
  with pytest.raises(UserError, match='taken over'), mirrored(ADDRESS, QUIET), contextlib.suppress(KeyboardInterrupt):
    Lock(Bucket(ADDRESS), mirror._owner(mirror._home(Bucket(ADDRESS))), print)
    time.sleep(60)
  assert time.monotonic() - begin < 30


def test_what_cannot_be_used_is_refused_in_a_line(tmp_path, monkeypatch):
  for address in ('memory://bucket', 'memory://bucket/', 'memory:///run', 'memory://b/../run', 'memory://b/a b'):
    with pytest.raises(UserError, match='names no folder on a bucket: write memory://BUCKET/FOLDER'):
      Bucket(address)
  with pytest.raises(UserError, match='holds no run: give the --workdir you trained with'):
    local_copy(ADDRESS)
  with pytest.raises(UserError, match='holds no run: give the'), mirrored(ADDRESS, QUIET, must_exist=True):
    pass
  assert Bucket(ADDRESS).is_empty()
  Bucket(ADDRESS).write('photo.png', b'')
  with pytest.raises(UserError, match='exists and is not a run'), mirrored(ADDRESS, QUIET):
    pass
  monkeypatch.setitem(buckets.EXTRAS, 'memory', 'absent_package')
  with pytest.raises(UserError, match=r"absent_package: install it by pip install 'hbf\[memory\]'"):
    Bucket(ADDRESS)
  monkeypatch.setattr(mirror.jax, 'process_count', lambda: 2)
  with pytest.raises(UserError, match='for runs of one process only'), mirrored(ADDRESS, QUIET):
    pass
  assert not buckets.is_bucket('runs/c10') and not buckets.is_bucket(pathlib.Path('s3/x'))
  assert local_copy('~/x') == pathlib.Path('~/x').expanduser()


@pytest.mark.parametrize(
  ('error', 'message'),
  [
    (PermissionError('Forbidden'), r'refuses access \(Forbidden\)'),
    (ConnectionError('no route'), r'cannot be reached \(ConnectionError: no route\)'),
  ],
)
def test_trouble_with_a_store_is_named_in_a_line(monkeypatch, error, message):
  def fails(*_, **__):
    raise error

  bucket = Bucket(ADDRESS)
  monkeypatch.setattr(type(bucket._store), 'cat_file', fails)
  with pytest.raises(UserError, match=message):
    bucket.read('x')


def test_an_address_with_a_pattern_is_refused_and_names_are_no_patterns(tmp_path):
  with pytest.raises(UserError, match=r"lr\[1\] has '\[', which buckets take for a pattern: choose another"):
    Bucket('memory://bucket/runs/lr[1]')
  bucket, names = Bucket(ADDRESS), ['a1', 'a[1]', 'b', 'b*', 'c?', 'cd']
  for name in names:
    bucket.write(name, b'')
  bucket.remove(['a[1]', 'b*', 'c?'])
  assert bucket.names() == ['a1', 'b', 'cd']


def test_objects_of_other_programs_among_the_locks_stay():
  Bucket(ADDRESS).write('terms/.DS_Store', b'')
  for step in (1, 2):
    with mirrored(ADDRESS, QUIET) as folder:
      fill(folder, step)
  assert 'terms/.DS_Store' in Bucket(ADDRESS).names('terms')
  assert {'checkpoints/1/_CHECKPOINT_METADATA', 'checkpoints/2/params/d/1'} <= contents(local_copy(ADDRESS)).keys()


@pytest.mark.parametrize('error', [None, KeyError])
def test_a_folder_that_never_rests_is_not_called_uploaded(monkeypatch, error):
  said, expected = io.StringIO(), pytest.raises(error or UserError, match=None if error else 'changes faster than it')
  with expected, mirrored(ADDRESS, Console(file=said, width=500)) as folder:
    fill(folder, 4)
    monkeypatch.setattr(mirror, '_stage', lambda *_: None)
    if error:
      raise error
  assert 'has all files' not in said.getvalue()
  assert ('warning: not uploaded' in said.getvalue()) is bool(error)


def test_a_damaged_or_missing_file_is_named():
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
  bucket = Bucket(ADDRESS)
  [name] = [name for name in bucket.names('files') if name.endswith('config.json')]
  bucket.write(name, b'{ }')
  with pytest.raises(UserError, match=f'{ADDRESS}/{name} is damaged'):
    local_copy(ADDRESS)
  bucket.remove([name])
  with pytest.raises(UserError, match='lacks files that its manifest names'):
    local_copy(ADDRESS)


def test_a_bucket_that_was_emptied_does_not_empty_the_local_folder():
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
  empty_bucket()
  home = mirror._home(Bucket(ADDRESS))
  with (
    pytest.raises(UserError, match=f'{ADDRESS} holds no run any more, but {home} has a copy'),
    mirrored(ADDRESS, QUIET),
  ):
    pass
  assert contents(folder)


def test_errors_of_a_run_name_the_address_and_not_the_local_folder():
  with (
    pytest.raises(UserError, match=f'^{ADDRESS} holds a run of another config$'),
    mirrored(ADDRESS, QUIET) as folder,
  ):
    raise UserError(f'{folder} holds a run of another config')


def test_a_copy_is_for_reading():
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
  with pytest.raises(UserError, match=f'is a copy of {ADDRESS} for reading'), locked(local_copy(ADDRESS)):
    pass


def test_a_copy_loses_what_the_run_has_no_longer_and_keeps_what_commands_wrote():
  with mirrored(ADDRESS, QUIET) as folder:
    fill(folder, 4)
    (folder / 'learned.npz').write_text('classes')
  (local_copy(ADDRESS) / 'explain.html').write_text('page')
  with mirrored(ADDRESS, QUIET) as folder:
    (folder / 'learned.npz').unlink()
    fill(folder, 8)
    left = contents(folder)
  for _ in range(2):
    assert contents(local_copy(ADDRESS)) == left | {'explain.html': 'page'}


def test_a_folder_that_grows_is_caught_at_one_moment(tmp_path, monkeypatch):
  fill(tmp_path / 'run', 4)
  inodes, calls = mirror._inodes, []

  def then_result(folder):
    calls.append(found := inodes(folder))
    (folder / 'result.json').write_text('{}')  # it appears after the first look
    return found

  monkeypatch.setattr(mirror, '_inodes', then_result)
  staged = mirror._stage(tmp_path / 'run', tmp_path / 'staging')
  assert 'result.json' in staged and len(calls) == 4
  with open(tmp_path / 'run' / 'metrics.jsonl', 'a') as log:
    log.write('line 5\n')
  assert staged['metrics.jsonl'].read_text() == 'line 4\n'
