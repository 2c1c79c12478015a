"""Tests of files that are written whole or not at all."""

import contextlib
import os
import time

import pytest

from hbf.errors import UserError
from hbf.files import draft, is_draft
from hbf.training.workdir import replacing


@pytest.mark.parametrize('error', [ValueError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize('opened', [draft, replacing])
def test_an_error_while_a_file_is_written_leaves_the_old_file_alone(tmp_path, opened, error):
  (tmp_path / 'a.json').write_text('old')
  expected = UserError if (error, opened) == (OSError, replacing) else error
  with pytest.raises(expected), opened(tmp_path / 'a.json') as file:
    file.write(b'new')
    raise error('half')
  assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [('a.json', 'old')]


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path):
  """For example, two evaluations of a run."""
  path = tmp_path / 'a.json'
  with draft(path) as first, draft(path) as second:
    first.write(b'1')
    second.write(b'22')
  assert path.read_bytes() == b'1' and list(tmp_path.iterdir()) == [path]


def left_by_a_killed_process(path):
  """Return the file that was to replace the file at `path`."""
  before = set(path.parent.iterdir())
  with contextlib.suppress(SystemExit), draft(path) as file:
    (left,) = set(path.parent.iterdir()) - before
    file.close()
    raise SystemExit
  left.write_text('half')
  return left


@pytest.mark.parametrize(('name', 'begun'), [('config.json', True), ('own.json', False)])
def test_a_file_that_a_killed_process_left_is_known_by_its_name(tmp_path, name, begun):
  assert is_draft(left_by_a_killed_process(tmp_path / name), 'config.json') is begun


def test_what_killed_processes_left_is_removed_when_it_is_a_day_old(tmp_path):
  path = tmp_path / 'archive[1].tar.gz'
  old, of_another, new = map(left_by_a_killed_process, (path, tmp_path / 'archive[1].tar.gz.part', path))
  yesterday = time.time() - 25 * 3600
  for file in (old, of_another):
    os.utime(file, (yesterday, yesterday))
  with draft(path) as file:
    file.write(b'whole')
  assert set(tmp_path.iterdir()) == {path, of_another, new} and path.read_bytes() == b'whole'
