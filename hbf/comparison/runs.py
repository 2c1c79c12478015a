"""Execution of the runs of a grid, each in its own process. Finished runs are skipped, interrupted runs continue."""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from hbf.comparison.devices import Device, lock_core
from hbf.comparison.grid import Grid
from hbf.evaluation.tables import say
from hbf.training.signals import signals
from hbf.training.workdir import in_use

TRAIN = (sys.executable, '-m', 'hbf', 'train')
POLL_SECONDS = 0.2
NOT_RUN = 'not run yet'  # in place of the reason why a run has no result
LOGS = 'logs'  # folder with what the runs print


@dataclasses.dataclass(frozen=True)
class PendingRun:
  """A run that is not finished.

  Attributes:
    name: name of the run's folder.
    arguments: arguments of `hbf train` without the workdir.
  """

  name: str
  arguments: tuple[str, ...]


def run_all(
  grid: Grid,
  workdir: pathlib.Path,
  devices: Sequence[Device],
  console: Console,
  prune: Callable[[str], str] = lambda name: '',
) -> bool:
  """Run all unfinished runs, one at a time on each device.

  A failed run is reported. It is not tried again in this call, but in the next one.

  Args:
    grid: the runs.
    workdir: folder of the comparison.
    devices: the devices.
    console: where the progress is printed.
    prune: a function that is called again and again with the name of each running run. It returns the reason why the
      run should be stopped for good, or ''. The reason becomes the last line of the run's log.

  Returns:
    False if a signal ended the call. Then the runs have saved their state, and the next call continues them.
  """
  waiting = collections.deque(_unfinished(grid, workdir))
  total, free = len(waiting), collections.deque(devices)
  running: list[_Process] = []
  say(console, f'{len(grid.runs()) - total} runs finished, {total} to do in {workdir}')
  with signals() as stopped, _stopped_on_error(running):
    while (waiting and not stopped()) or running:
      if stopped():
        for process in running:
          process.stop()
      elif waiting and free:
        # Processes of a killed comparison may still train some of the runs, each on a device that shall not get more.
        idle = [run for run in waiting if not in_use(workdir / run.name)]
        if idle and len(free) > len(waiting) - len(idle):
          waiting.remove(idle[0])
          running.append(_Process(idle[0], workdir, free.popleft()))
          beside = ' beside another run, so both are slow' if running[-1].crowded else ''
          say(console, f'{idle[0].name}: started on {running[-1].device}{beside}, {len(waiting)} more to do')
      for process in running:
        process.prune(prune(process.run.name))
      for process in [process for process in running if process.ended()]:
        running.remove(process)
        free.append(process.device)
        if process.failed() and in_use(workdir / process.run.name):
          say(console, f'{process.run.name}: another process still trains it; its end is awaited')
          waiting.append(process.run)
        else:
          say(console, f'{process.run.name}: {process.outcome()}')
      waiting = collections.deque(run for run in waiting if not _finished(workdir / run.name))
      time.sleep(POLL_SECONDS)
    return not stopped()


@contextlib.contextmanager
def _stopped_on_error(running: Sequence['_Process']) -> Iterator[None]:
  """Ask all processes to save their state and to end if an error ends the context, such as one of `prune`."""
  try:
    yield
  except BaseException:
    for process in running:
      process.stop()
    raise


def all_finished(grid: Grid, workdir: pathlib.Path) -> bool:
  """Return True if every run of the grid has a result."""
  return not any(_unfinished(grid, workdir))


def failure(workdir: pathlib.Path, name: str) -> str | None:
  """Return the reason why a run has no result, from its printed output. Return None if the run has a result."""
  if _finished(workdir / name):
    return None
  log = _log(workdir, name)
  lines = log.read_text(errors='replace').strip().splitlines() if log.exists() else []
  errors = [line for line in lines if line.startswith('error: ')]
  return (errors or lines or [NOT_RUN])[-1]


class _Process:
  """A process of `hbf train`. `crowded` is True if its core has a run of another process too."""

  def __init__(self, run: PendingRun, workdir: pathlib.Path, device: Device):
    self.run, self.device = run, device
    self._workdir, self._begin, self._asked_to_stop, self._pruned = workdir, time.monotonic(), False, ''
    self.crowded, locks = lock_core(device.number) if device.kind == 'cpu' else (False, ())
    try:
      with open(_new_log(workdir, run.name), 'x') as log:
        self._process = subprocess.Popen(
          [*TRAIN, *run.arguments, f'--workdir={workdir / run.name}'],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=os.environ | device.environment(),
          pass_fds=locks,
          process_group=0,  # a signal to the group of this process reaches the run through it, once
        )
    finally:
      for descriptor in locks:  # the run has a copy, and so the lock, until it ends
        os.close(descriptor)
    if device.kind == 'cpu':
      with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(self._process.pid, {device.number})  # its later threads inherit the core

  def ended(self) -> bool:
    return self._process.poll() is not None

  def failed(self) -> bool:
    """Return True if the process has ended with an error that nobody asked for."""
    return self._process.returncode != 0 and not self._asked_to_stop

  def stop(self) -> None:
    """Ask the process to save its state and to end. Further calls do nothing."""
    if not self._asked_to_stop:
      self._process.terminate()
      self._asked_to_stop = True

  def prune(self, reason: str) -> None:
    """Ask the process to end, and note the reason. If the reason is '', do nothing."""
    if reason and not self._asked_to_stop:
      self._pruned = reason
      self.stop()

  def outcome(self) -> str:
    if self._process.returncode < 0 and not self._asked_to_stop:
      self._write_error(f'ended by signal {-self._process.returncode}')  # signal 9 often means a lack of memory
    if self._pruned and failure(self._workdir, self.run.name) is not None:
      self._write_error(self._pruned)
      return self._pruned
    reason = failure(self._workdir, self.run.name)
    if reason is None:
      return f'finished after {(time.monotonic() - self._begin) / 60:.1f} min'
    if self._asked_to_stop and self._process.returncode == -signal.SIGTERM:  # before the run handles this signal
      return 'stopped as it started; the same command starts it again'
    if self._process.returncode == 0:
      return 'stopped and saved; the same command continues it'
    return f'FAILED ({reason}); its output is in {_log(self._workdir, self.run.name)}'

  def _write_error(self, reason: str) -> None:
    with open(_log(self._workdir, self.run.name), 'a') as log:
      log.write(f'\nerror: {reason}\n')


def _unfinished(grid: Grid, workdir: pathlib.Path) -> Iterator[PendingRun]:
  for arm, seed in grid.runs():
    if not _finished(workdir / arm.run_name(seed)):
      yield PendingRun(arm.run_name(seed), (*arm.arguments, f'--config.seed={seed}'))


def _finished(run: pathlib.Path) -> bool:
  return (run / 'result.json').exists()


def _new_log(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Return the path for a run's log, NAME.log. Rename an older log to NAME.n.log with the smallest unused n."""
  log = _log(workdir, name)
  log.parent.mkdir(exist_ok=True)
  if log.exists():
    numbers = itertools.count(1)
    log.rename(next(path for n in numbers if not (path := log.with_name(f'{name}.{n}.log')).exists()))
  return log


def _log(workdir: pathlib.Path, name: str) -> pathlib.Path:
  return workdir / LOGS / f'{name}.log'
