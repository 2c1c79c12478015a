"""Elastic runs: if a process is lost, the supervisors of the other processes start a new round of child processes.

The new round goes on from the run's last checkpoint. JAX cannot replace a process, and it ends all processes if one
is lost. So each process of an elastic run has a supervisor, which starts the ordinary command as its child. If
children end because a process is lost, a new round begins: the supervisors that are left agree on its processes, and
start new children. They agree through files in the run folder. R is the number of a round. P is the index of a
process in the command that the user gave. In later rounds, the child of this process may have a lower index.

- elastic/P/.lock: the supervisor of process P locks this file while it lives.
- elastic/P/R.json: process P takes part in round R.
- elastic/R.json: the roster of round R, or the reason why the run ends.

The supervisor with the lowest P of those that are left writes the roster. A round can have only one roster, so the
processes never form two groups. If the user starts the run again, the numbers of the rounds go on. So older files do
no harm.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hbf.errors import UserError
from hbf.training.processes import LOST_STATUS, UNMET_STATUS, free_port, join_arguments, reachable_host
from hbf.training.signals import handled
from hbf.training.workdir import check_run_folder, held, in_use, read_json, write_json

FOLDER = 'elastic'
POLL_SECONDS = 0.5
GRACE_SECONDS = 5  # the time that a child has to end by itself, once another process is known to be lost
SILENT_SECONDS = 150  # the silence after which a process with a lock counts as lost; file servers release locks late
AGREE_SECONDS = 300  # the time that a supervisor waits for a roster
PARENT = 'HBF_SUPERVISOR'  # the environment variable with the process id of a child's supervisor

Launch = Callable[[str, int, int], 'subprocess.Popen[Any]']  # of a coordinator, a number of processes and an index


@dataclasses.dataclass(frozen=True)
class Roster:
  """The processes of a round.

  Attributes:
    members: the processes of this round, by their indices in the first round, in increasing order. The index of a
      child in this round is its position in this list.
    coordinator: HOST:PORT of the first member.
    end: the reason why the run ends. '': it goes on.
  """

  members: Sequence[int]
  coordinator: str
  end: str = ''


def choose_roster(members: Sequence[int], present: Mapping[int, str], newer: bool, busy: bool) -> Roster:
  """Return the roster of the next round, with all processes that are present.

  The roster ends the run if the run folder is still locked. It also ends the run if nothing would be different in the
  next round: all members are present, and the last round has saved no checkpoint.

  Args:
    members: the `members` of the last round's roster.
    present: HOST:PORT of each process that is there for the next round, by its index in the first round. There is at
      least one.
    newer: True if the run has saved a checkpoint in the last round.
    busy: True if a process still holds the lock of the run folder.
  """
  end = ''
  if busy:
    end = 'the run folder is still in use by a process that does not answer: end that process, and start all again'
  elif len(present) == len(members) and not newer:  # otherwise a run might start again forever
    end = (
      f'all {len(members)} processes are still there, but they lost each other before the next checkpoint: see the '
      'errors above, and start all again'
    )
  return Roster(sorted(present), present[min(present)], end)


@dataclasses.dataclass
class Supervisor:
  """The supervisor of one process of an elastic run.

  Attributes:
    workdir: the run folder.
    process: the index of this process in the first round.
    host: the host name or address by which the other processes reach this one.
    launch: a function (coordinator, number of processes, index) → child, which starts a child.
    received: the signals to this process. A signal handler appends to this list.
  """

  workdir: pathlib.Path
  process: int
  host: str
  launch: Launch
  received: list[int] = dataclasses.field(default_factory=list)

  def run(self, coordinator: str, processes: int) -> int:
    """Run a child in each round, until a child ends for another reason than a lost process. Return its exit status.

    After a signal there is no new round either.

    Args:
      coordinator: HOST:PORT of process 0 in the first round.
      processes: the number of processes in the first round.

    Raises:
      UserError: the run cannot go on.
    """
    with held(self._folder / str(self.process)):
      first = number = self._newest_round()
      roster = Roster(range(processes), coordinator)
      while True:
        before = self._newest_checkpoint()
        status = self._run_child(roster, number)
        lost = {LOST_STATUS, 128 + signal.SIGABRT} | ({UNMET_STATUS} if number > first else set())
        if status not in lost or self.received:
          return status
        number += 1
        former, found = roster, self._agree(roster.members, number, before)
        if found is None:
          return 128 + self.received[0]
        roster = found
        if self.process == roster.members[0]:
          count = f'{len(roster.members)} of {len(former.members)}'
          print(f'processes left: {count}; the run goes on from its last checkpoint', file=sys.stderr, flush=True)

  def _run_child(self, roster: Roster, number: int) -> int:
    """Start the child of round `number`, pass signals on to it and wait for its end.

    Return the exit status that a shell would report. If the child still runs GRACE_SECONDS after another process
    has begun the next round, kill it, and return LOST_STATUS.
    """
    child = self.launch(roster.coordinator, len(roster.members), roster.members.index(self.process))
    sent, limit = 0, float('inf')
    try:
      while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
          status = child.wait(POLL_SECONDS)
          return status if status >= 0 else 128 - status
        for kind in self.received[sent:]:
          child.send_signal(kind)
          sent += 1
        # This child may notice a loss late, or may itself hang.
        if limit == float('inf') and any(self._presence(p, number + 1).exists() for p in roster.members):
          limit = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > limit:
          return LOST_STATUS
    finally:
      child.kill()
      child.wait()

  def _agree(self, members: Sequence[int], number: int, before: int) -> Roster | None:
    """Agree with the other processes on the roster of a new round, and return it. Return None after a signal.

    Args:
      members: the `members` of the last round's roster.
      number: the number of the new round.
      before: the step of the newest checkpoint at the start of the last round, to see if that round saved one.

    Raises:
      UserError: the run ends, or goes on without this process.
    """
    write_json(self._presence(self.process, number), {'address': f'{self.host}:{free_port()}'})
    begin = time.monotonic()
    while not (found := read_json(self._folder / f'{number}.json', 'start all again')):
      if self.received:
        return None
      seconds = time.monotonic() - begin
      if seconds > AGREE_SECONDS:
        raise UserError('the processes that are left found no agreement: start all again')
      living = [p for p in members if p == self.process or in_use(self._folder / str(p))]
      joined = {p: read_json(self._presence(p, number), 'start all again') for p in living}
      present = {p: value['address'] for p, value in joined.items() if value}
      if self.process == min(present) and (len(present) == len(living) or seconds > SILENT_SECONDS):
        busy = in_use(self.workdir)
        if not busy or seconds > SILENT_SECONDS:
          self._propose(choose_roster(members, present, self._newest_checkpoint() > before, busy), number)
          continue
      time.sleep(POLL_SECONDS)
    roster = Roster(**found)
    if roster.end:
      raise UserError(roster.end)
    if self.process not in roster.members:
      raise UserError('the other processes went on without this one, because it did not answer')
    return roster

  def _propose(self, roster: Roster, number: int) -> None:
    """Write the roster of round `number`, unless the round has a roster already."""
    own = self._folder / str(self.process) / 'proposal'
    write_json(own, dataclasses.asdict(roster))
    try:
      os.link(own, self._folder / f'{number}.json')  # unlike a renamed file, a link never replaces another file
    except FileExistsError:
      pass
    except OSError as error:
      raise UserError(f'{self._folder} cannot hold hard links ({error.strerror}): start all again') from error

  @property
  def _folder(self) -> pathlib.Path:
    return self.workdir / FOLDER

  def _presence(self, process: int, number: int) -> pathlib.Path:
    return self._folder / str(process) / f'{number}.json'

  def _newest_round(self) -> int:
    """Return the highest number of a round for which `elastic/` has a file. 0 if there is none."""
    return _highest(path.stem for path in self._folder.rglob('*.json'))

  def _newest_checkpoint(self) -> int:
    """Return the step of the run's newest checkpoint. 0 if there is none."""
    return _highest(path.name for path in self.workdir.glob('checkpoints/*'))


def _highest(names: Iterable[str]) -> int:
  """Return the highest number among names, some of which may not be numbers. 0 if there is none."""
  return max((int(name) for name in names if name.isdecimal()), default=0)


def supervise(workdir: pathlib.Path, coordinator: str, processes: int | None, process: int | None) -> int:
  """Run this command as a child, and start it again with the processes that are left whenever some are lost.

  Args:
    workdir: the run folder.
    coordinator: HOST:PORT of process 0.
    processes: the number of processes.
    process: the index of this process.

  Returns:
    The exit status of the last child.

  Raises:
    UserError: an argument is missing or not valid, the run folder is not valid, or the run cannot go on.
  """
  given = join_arguments(coordinator, processes, process)
  if not given:
    raise UserError(
      '--elastic needs --coordinator, --processes and --process. With Slurm, Kubernetes or a TPU pod, leave out '
      '--elastic, and let the launcher start all processes again'
    )
  check_run_folder(workdir)
  supervisor = Supervisor(workdir, given['process_id'], reachable_host(coordinator), _launch_again)
  for kind in handled():
    signal.signal(kind, lambda number, _: supervisor.received.append(number))
  return supervisor.run(coordinator, given['num_processes'])


def end_with_supervisor() -> None:
  """If this process is the child of a supervisor, end it when the supervisor ends.

  Otherwise the child could live on, and keep the lock of the run folder.
  """
  parent = int(os.environ.pop(PARENT, 0))
  if not parent:
    return
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; it also ends a process that is stopped

  def watch() -> None:  # for other systems, and if the supervisor has ended before
    while os.getppid() == parent:
      time.sleep(1)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def _launch_again(coordinator: str, processes: int, process: int) -> 'subprocess.Popen[Any]':
  """Start the command of this process again, without --elastic. The arguments replace its flags of the same names."""
  # If a flag is given twice, the last one counts.
  flags = ['--noelastic', f'--coordinator={coordinator}', f'--processes={processes}', f'--process={process}']
  # A session of its own: Ctrl-C reaches the child only through the supervisor, once.
  return subprocess.Popen(
    [sys.executable, *sys.orig_argv[1:], *flags], env=os.environ | {PARENT: str(os.getpid())}, start_new_session=True
  )
