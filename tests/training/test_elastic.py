"""Tests of elastic runs: the agreement of supervisors, with children that only end in one way or another."""

import signal
import socket
import subprocess
import threading
import time

import pytest

from hbf.errors import UserError
from hbf.training import elastic, processes
from hbf.training.workdir import held, locked

LOST = f'exit {processes.LOST_STATUS}'
SAVED = 'mkdir -p "$0/checkpoints/4"; '
HANGS = 'exec sleep 100'
STOPS = 'trap "exit 7" TERM; touch "$0/ready"; while :; do sleep 0.01; done'


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  for name, seconds in (('POLL', 0.01), ('GRACE', 0.05), ('SILENT', 15)):
    monkeypatch.setattr(elastic, f'{name}_SECONDS', seconds)


class Process(threading.Thread):
  """A supervisor in a thread. Its children do what the scripts say, one script a child."""

  def __init__(self, workdir, process, met, *scripts):
    super().__init__(daemon=True)
    self.result, self.launched, self._left = None, [], list(scripts)
    self._workdir, self._met = workdir, met
    self.supervisor = elastic.Supervisor(workdir, process, f'host{process}', self._launch)
    self.start()

  def _launch(self, coordinator, processes, process):
    if not self.launched:
      self._met.wait(20)
    script = self._left.pop(0)
    self.launched.append((coordinator.partition(':')[0], processes, process))
    if isinstance(script, threading.Event):
      script.wait()
      script = LOST
    return subprocess.Popen(['sh', '-c', script, str(self._workdir)])

  def run(self):
    try:
      self.result = self.supervisor.run('first:1', self._met.parties)
    except UserError as error:
      self.result = str(error)

  def end(self):
    self.join(20)
    assert not self._left
    return self.result


def start(workdir, *scripts):
  """Start a supervisor for each list of scripts. Their first children start together."""
  met = threading.Barrier(len(scripts))
  return [Process(workdir, process, met, *each) for process, each in enumerate(scripts)]


def wait_for(path):
  while not path.exists():
    time.sleep(0.01)


@pytest.mark.parametrize(
  ('present', 'newer', 'busy', 'expected'),
  [
    ({2: 'c:3', 1: 'b:2'}, False, False, elastic.Roster([1, 2], 'b:2')),
    ({0: 'a:1', 1: 'b:2', 2: 'c:3'}, True, False, elastic.Roster([0, 1, 2], 'a:1')),
    ({0: 'a:1', 1: 'b:2', 2: 'c:3'}, False, False, 'all 3 processes are still there'),
    ({2: 'c:3'}, True, True, 'still in use'),
  ],
)
def test_a_roster_has_fewer_processes_or_the_run_has_gone_further(present, newer, busy, expected):
  roster = elastic.choose_roster([0, 1, 2], present, newer, busy)
  assert expected in roster.end if isinstance(expected, str) else roster == expected


def test_those_that_are_left_go_on_and_one_that_notices_late_is_called(tmp_path):
  run = start(tmp_path, [LOST, 'exit 0'], ['kill -9 $$'], [HANGS, 'exit 0'])
  assert [process.end() for process in run] == [0, 128 + signal.SIGKILL, 0]
  assert [process.launched for process in run] == [
    [('first', 3, 0), ('host0', 2, 0)],
    [('first', 3, 1)],
    [('first', 3, 2), ('host0', 2, 1)],
  ]


def test_losses_follow_each_other_until_one_is_left_and_older_files_do_no_harm(tmp_path):
  for _ in range(2):
    run = start(tmp_path, ['exit 1'], [LOST, 'exit 9'], ['kill -ABRT $$', f'exit {processes.UNMET_STATUS}', 'exit 0'])
    assert [process.end() for process in run] == [1, 9, 0]
    assert run[2].launched == [('first', 3, 2), ('host1', 2, 1), ('host2', 1, 0)]
  assert sorted(path.name for path in (tmp_path / 'elastic').glob('*.json')) == [f'{n}.json' for n in (1, 2, 3, 4)]


def test_if_none_is_lost_the_run_goes_on_only_from_a_newer_checkpoint(tmp_path):
  run = start(tmp_path, [SAVED + LOST, LOST], [LOST, LOST])
  assert all('all 2 processes are still there' in process.end() for process in run)


def test_processes_that_never_met_do_not_go_on_with_fewer(tmp_path):
  (process,) = start(tmp_path, [f'exit {processes.UNMET_STATUS}'])
  assert process.end() == processes.UNMET_STATUS


def test_a_process_that_is_silent_is_left_out_and_ends_when_it_wakes(tmp_path, monkeypatch):
  monkeypatch.setattr(elastic, 'SILENT_SECONDS', 0.1)
  wake = threading.Event()
  first, second = start(tmp_path, [LOST, 'exit 0'], [wake])
  assert first.end() == 0
  wake.set()
  assert 'went on without this one' in second.end()


def test_nothing_is_started_while_another_process_has_the_run_folder(tmp_path, monkeypatch):
  monkeypatch.setattr(elastic, 'SILENT_SECONDS', 0.1)
  with held(tmp_path):
    first, second = start(tmp_path, ['exit 1'], [LOST])
    assert first.end() == 1
    assert 'the run folder is still in use' in second.end()


def test_a_signal_reaches_the_child_and_ends_an_agreement(tmp_path):
  (running,) = start(tmp_path, [STOPS])
  wait_for(tmp_path / 'ready')
  running.supervisor.received.append(signal.SIGTERM)
  assert running.end() == 7

  waiting, _ = start(tmp_path, [LOST], [threading.Event()])
  wait_for(tmp_path / 'elastic' / '0' / '1.json')
  waiting.supervisor.received.append(signal.SIGTERM)
  assert waiting.end() == 128 + signal.SIGTERM


def test_a_run_begins_in_a_folder_that_has_only_the_files_of_supervisors(tmp_path):
  with held(tmp_path / 'elastic' / '0'), locked(tmp_path):
    pass


def test_two_processes_cannot_have_the_same_index(tmp_path):
  with held(tmp_path / 'elastic' / '0'):
    (process,) = start(tmp_path, [])
    assert 'elastic/0 is in use by another process' in process.end()


def test_flags_and_folders_that_make_no_elastic_run_are_refused_at_once(tmp_path):
  with pytest.raises(UserError, match='--elastic needs --coordinator, --processes and --process'):
    elastic.supervise(tmp_path, '', None, None)
  (tmp_path / 'thesis.tex').touch()
  with pytest.raises(UserError, match='exists and is not a run'):
    elastic.supervise(tmp_path, 'localhost:9876', 2, 1)


def test_others_reach_a_process_by_the_name_or_address_that_leads_to_it():
  assert processes.reachable_host('localhost:9876') == 'localhost'
  assert processes.reachable_host('[::1]:9876') in ('[::1]', socket.gethostname())
