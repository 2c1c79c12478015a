"""Robustness of runs that are killed, whose checkpoints are damaged, or whose disk is full.

python -m benchmarks.chaos                      # minutes on two cores
python -m benchmarks.chaos --kills=3 --seed=1

A small run on the digits writes a checkpoint every four steps. It is disturbed in four ways. It is killed (signal 9)
at random moments and started again by the same command until it ends. It is stopped, and its newest checkpoint is
damaged in every way of `benchmarks.damages`. Its disk is filled. In a run of two processes, a kill strikes both or
only one, and then the other process must end by itself. Each run must end with the state, parameters, metrics and
predictions of an undisturbed run, bit for bit. The part with full disks is skipped if the user may not mount a small
disk.

An elastic run of two processes loses one of them, with or without its supervisor. The other must go on alone and end.
One process adds numbers in another order than two, so parameters may differ by up to 1e-5.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from benchmarks.common import format_report, launch, measured_on, save
from benchmarks.damages import DAMAGES, METADATA
from hbf.training.processes import free_port
from hbf.training.restore import restore
from hbf.training.workdir import read_predictions
from hbf.training.writers import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
RUN = (
  '--config=configs/digits.py',
  '--config.model.width=16',
  '--config.model.depth=1',
  '--config.model.heads=2',
  '--config.model.stage2.centers=8',
  '--config.model.dropout=0.1',
  '--config.train.average=0.9',
  '--config.train.steps_per_call=2',
  '--config.log.every=5steps',
  '--config.evaluate.every=40steps',
  '--config.checkpoint.every=4steps',
  '--config.checkpoint.keep=4',
)
STOP = 0.9  # share of the steps after which a run is stopped, before its checkpoint is damaged
KILLS_PER_RUN = 10
# Shares of the kills: while a run starts, after it has read its data, after its first steps.
KINDS = {'starting': 0.1, 'restoring': 0.1, 'training': 0.8}
SPAN = {'starting': 6.0, 'restoring': 3.0, 'training': 0.5}  # a kill comes within so many seconds
PROGRESS = 0.2  # most steps before a kill, as a share of all
SAME = 1e-5  # most difference of the parameters of an elastic run, whose number of devices changes
LIMIT = 900.0  # seconds after which a run counts as hanging
CLOCKS = {'images_per_second', 'seconds', 'train_seconds', 'compile_seconds', 'peak_memory_bytes'}
UNFINISHED = '.orbax-checkpoint-tmp'


def one_process(flags: Sequence[str]) -> list[list[str]]:
  """Return the command of a run of one process."""
  return [[sys.executable, str(ROOT / 'train.py'), *flags]]


def two_processes(flags: Sequence[str]) -> list[list[str]]:
  """Return the commands of a run of two processes on one machine."""
  meet = (f'--coordinator=localhost:{free_port()}', '--processes=2')
  return [[*command, *meet, f'--process={n}'] for n in range(2) for command in one_process(flags)]


def elastic(flags: Sequence[str]) -> list[list[str]]:
  """Return the commands of an elastic run of two processes on one machine."""
  return two_processes([*flags, '--elastic'])


class Layout(NamedTuple):
  """A way to start the processes of a run, and the disturbances of such runs.

  Attributes:
    commands: function from flags of `hbf train` to the commands of a run's processes.
    epochs: epochs of a run.
    kills: share of all kills that strike these runs.
    damages: names of damages in `DAMAGES`.
    rooms: sizes of small disks, divided by the size of a checkpoint. A run keeps five checkpoints.
    losses: number of runs, divided by the number of all kills, that lose a process and must go on by themselves.
  """

  commands: Callable[[Sequence[str]], list[list[str]]]
  epochs: int
  kills: float
  damages: Sequence[str]
  rooms: Sequence[float]
  losses: float = 0


LAYOUTS = {
  'two processes': Layout(two_processes, 3, 0.2, [*DAMAGES][::7], ()),  # fewer, because starts take longer
  'elastic': Layout(elastic, 3, 0, (), (), 0.1),
  'one process': Layout(one_process, 10, 0.8, [*DAMAGES], (0.5, 2.5, 3.5)),
}


class Lost(Exception):
  """A run does not continue, or it ends with another result."""


class RunProcesses:
  """The processes of a run that starts or continues. Leaving the context kills them."""

  def __init__(self, layout: Layout, workdir: pathlib.Path, folder: pathlib.Path):
    """Start the processes. Their output and compiled programs go to a folder."""
    self._workdir, self._log = workdir, folder / 'output'
    # A separate cache: killed processes must not damage the user's.
    cache = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'xla'), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    with open(self._log, 'w') as log:
      self._processes = [
        subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | cache)
        for command in layout.commands([*RUN, f'--config.train.epochs={layout.epochs}', f'--workdir={workdir}'])
      ]

  def output(self) -> str:
    """Return the console output so far."""
    return self._log.read_text()

  def steps(self) -> list[int]:
    """Return the steps that the output reports."""
    return [int(step) for step in re.findall(r'^step +(\d+)', self.output(), re.MULTILINE)]

  def targets(self) -> list[int | None]:
    """Return the possible targets of a kill: all processes (None), or the index of one. The others must then end."""
    return [None, *range(len(self._processes))] if len(self._processes) > 1 else [None]

  def runs(self) -> bool:
    """Return True if a process has not ended."""
    return any(process.poll() is None for process in self._processes)

  def wait(self, come: Callable[[], bool], seconds: float = LIMIT) -> None:
    """Wait until `come` returns True, but not longer than `seconds`, and only while a process runs."""
    end = time.monotonic() + seconds
    while not come() and self.runs() and time.monotonic() < end:
      time.sleep(0.01)

  def send(self, number: signal.Signals, process: int | None = None) -> None:
    """Send a signal to one process, or to all."""
    for each in self._processes if process is None else [self._processes[process]]:
      each.send_signal(number)

  def lose(self, process: int, supervisor: bool) -> bool:
    """Kill a process of an elastic run, or with `supervisor` its supervisor, and forget it.

    Return False, and kill nothing, if the process has ended.
    """
    lost = self._processes[process]
    children: list[str] = []
    with contextlib.suppress(OSError):  # it has ended
      children = pathlib.Path(f'/proc/{lost.pid}/task/{lost.pid}/children').read_text().split()
    if not children:
      return False
    del self._processes[process]
    os.kill(lost.pid if supervisor else int(children[0]), signal.SIGKILL)
    lost.wait()
    return True

  def end(self, code: int = 0) -> str:
    """Wait until all processes have ended. Return the output.

    Raises:
      Lost: a process has another exit status than `code`, or has not ended in time.
    """
    self.wait(lambda: False)
    codes = {process.poll() for process in self._processes}
    if codes != {code}:
      raise Lost(f'{self._workdir} ended with {codes}, not {code} (None: after {LIMIT:.0f} s):\n{self.output()}')
    return self.output()

  def __enter__(self) -> 'RunProcesses':
    return self

  def __exit__(self, *_: object) -> None:
    for process in self._processes:
      process.kill()
      process.wait()


@dataclasses.dataclass(frozen=True)
class Chaos:
  """Disturbances of runs of one layout in a folder. Each run must end with the outcome `whole`."""

  layout: Layout
  folder: pathlib.Path
  draw: random.Random

  @functools.cached_property
  def whole(self) -> dict[str, Any]:
    """Outcome of an undisturbed run."""
    self._finish(self.folder / 'whole')
    return outcome(self.folder / 'whole')

  @property
  def _steps(self) -> int:
    return self.whole['result']['steps']

  def kills(self, count: int) -> list[dict[str, Any]]:
    """Kill runs `count` times in all. Return a row for each kill."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
      workdir, most = self.folder / f'killed-{len(rows)}', min(len(rows) + KILLS_PER_RUN, count)
      while len(rows) < most and (row := self._kill(workdir)):
        rows.append(_printed({'run': workdir.name} | row))
      self._finish(workdir)
      self._check(workdir)
    return rows

  def _kill(self, workdir: pathlib.Path) -> dict[str, Any] | None:
    """Start a run and kill it. Return the row of the kill, or None if the run ended before it."""
    before, launched = _unfinished(workdir), time.monotonic()
    kind, *_ = self.draw.choices(list(KINDS), list(KINDS.values()))
    moment, steps = self.draw.uniform(0, SPAN[kind]), self.draw.uniform(0, PROGRESS * self._steps)
    with self._start(workdir) as processes:
      if kind != 'starting':
        processes.wait(lambda: 'workdir' in processes.output())
      if kind == 'training':
        steps += max(_complete(workdir), default=0)
        processes.wait(lambda: any(step > steps for step in processes.steps()))
      processes.wait(lambda: False, moment)
      if not processes.runs():
        processes.end()
        return None
      after, struck = time.monotonic() - launched, self.draw.choice(processes.targets())
      processes.send(signal.SIGKILL, struck)
      processes.wait(lambda: False)
      if processes.runs():
        raise Lost(f'{workdir}: process {struck} was killed, but the others did not end within {LIMIT:.0f} s')
    writing = ', '.join(name.removesuffix(UNFINISHED) for name, _ in _unfinished(workdir) - before)
    return {
      'struck': 'all' if struck is None else f'process {struck}',
      'while': kind,
      'seconds': round(after, 2),
      'newest': max(_complete(workdir), default=0),
      'being written': writing,
    }

  def losses(self, count: int) -> list[dict[str, Any]]:
    """Let `count` elastic runs of two processes lose one. Return a row for each."""
    rows: list[dict[str, Any]] = []
    numbers = itertools.count()
    while len(rows) < count:
      if row := self._lose(self.folder / f'lost-{next(numbers)}'):
        rows.append(_printed(row))
    return rows

  def _lose(self, workdir: pathlib.Path) -> dict[str, Any] | None:
    """Kill one process of an elastic run, which must go on to its end.

    Return the row of the kill, or None if the run ended before it, or before the other process was alone.
    """
    process, supervisor = self.draw.randrange(2), self.draw.random() < 0.5
    kind = self.draw.choice(['restoring', 'training'])
    moment, steps = self.draw.uniform(0, SPAN[kind]), self.draw.uniform(0, 0.8 * self._steps)
    with self._start(workdir) as processes:
      processes.wait(lambda: 'workdir' in processes.output())
      if kind == 'training':
        processes.wait(lambda: any(step > steps for step in processes.steps()))
      processes.wait(lambda: False, moment)
      begin, reports = time.monotonic(), len(processes.steps())
      if not processes.lose(process, supervisor):
        processes.end()
        return None
      processes.wait(lambda: 'processes left: 1 of 2' in processes.output())
      agreed = time.monotonic() - begin
      processes.wait(lambda: len(processes.steps()) > reports)
      seconds = time.monotonic() - begin
      output = processes.end()
    if 'processes left: 1 of 2' not in output:
      return None
    found = re.search(r'^goes on after step (\d+)', output, re.MULTILINE)
    return {
      'run': workdir.name,
      'struck': f'process {process}' + (' with its supervisor' if supervisor else ''),
      'while': kind,
      'went on after': int(found[1]) if found else 0,
      'seconds until the agreement': round(agreed, 1),
      'seconds until the next report': round(seconds, 1),
      'greatest difference of parameters': self._difference(workdir),
    }

  def _difference(self, workdir: pathlib.Path) -> float:
    """Return the greatest difference of parameters from the undisturbed run.

    Raises:
      Lost: it is more than SAME, or the run has reported other steps.
    """
    steps, whole = ([line['step'] for line in read_metrics(path)] for path in (workdir, self.folder / 'whole'))
    mine, others = (
      jax.tree.leaves(restore(path, str(self._steps)).params) for path in (workdir, self.folder / 'whole')
    )
    difference = float(np.max([np.abs(a - b).max() for a, b in zip(mine, others, strict=True)]))
    if steps != whole or not difference <= SAME:  # NaN is a difference
      raise Lost(f'{workdir}: parameters differ from the undisturbed run by {difference:.2g}, or the reports differ')
    return float(f'{difference:.1g}')

  def damages(self) -> list[dict[str, Any]]:
    """Damage the newest checkpoint of a stopped run in every way. Return a row for each way."""
    stopped = self._stopped
    newest, second = sorted(_complete(stopped))[:-3:-1]
    rows = []
    for number, name in enumerate(self.layout.damages):
      workdir = shutil.copytree(stopped, self.folder / f'damaged-{number}')
      DAMAGES[name](workdir / 'checkpoints' / str(newest))
      aside = workdir / 'checkpoints' / f'{newest}.damaged'
      lines = f'checkpoint {newest} cannot be read; set aside as {aside}\ngoes on after step {second}\n'
      if lines not in (output := self._finish(workdir)) or 'Traceback' in output or not aside.exists():
        raise Lost(f'{workdir}, {name}: expected {lines!r}, and no traceback, in:\n{output}')
      self._check(workdir)
      rows.append(_printed({'damage': name, 'newest': newest, 'went on after': second}))
    return rows

  @functools.cached_property
  def _stopped(self) -> pathlib.Path:
    """The folder of a run that was stopped before its end."""
    workdir = self.folder / 'stopped'
    with self._start(workdir) as processes:
      processes.wait(lambda: any(step >= STOP * self._steps for step in processes.steps()))
      processes.send(signal.SIGTERM)
      processes.end()
    return workdir

  def disks(self) -> list[dict[str, Any]]:
    """Let runs fill disks, and then make room. Return a row for each disk."""
    rows = []
    size = max(_bytes_on_disk(path) for path in (self.folder / 'whole' / 'checkpoints').iterdir())
    for room in self.layout.rooms:
      with small_disk(self.folder / f'disk-{room}', int(room * size)) as (disk, enlarge):
        rows.append(_printed({'disk': f'{room} checkpoints'} | self._fill(disk / 'run', enlarge)))
    with small_disk(self.folder / 'disk-full', 20 * size) as (disk, _):
      shutil.copytree(self._stopped, disk / 'run')
      with contextlib.suppress(OSError), open(disk / 'others', 'wb', buffering=0) as file:
        while file.write(bytes(512)):
          pass
      rows.append(_printed({'disk': 'full when a run goes on'} | self._fill(disk / 'run', (disk / 'others').unlink)))
    return rows

  def _fill(self, workdir: pathlib.Path, make_room: Callable[[], Any]) -> dict[str, Any]:
    """Start a run on a disk that is too small, make room, and continue the run. Return columns of its row."""
    with self._start(workdir) as processes:
      output = processes.end(1)
    last = output.splitlines()[-1]
    if 'Traceback' in output or not last.startswith(
      f'error: {workdir} could not be written: no space left on device'
    ):
      raise Lost(f'{workdir}: expected one clear line in:\n{output}')
    complete = _complete(workdir)
    make_room()
    output = self._finish(workdir)
    if complete and f'\ngoes on after step {max(complete)}\n' not in output:
      raise Lost(f'{workdir}: does not continue after step {max(complete)}:\n{output}')
    self._check(workdir)
    return {'complete': sorted(complete), 'said': last.replace(str(workdir), workdir.name)}

  def _start(self, workdir: pathlib.Path) -> RunProcesses:
    return RunProcesses(self.layout, workdir, self.folder)

  def _finish(self, workdir: pathlib.Path) -> str:
    """Start or continue a run until it ends. Return its output."""
    with self._start(workdir) as processes:
      return processes.end()

  def _check(self, workdir: pathlib.Path) -> None:
    """Raise Lost unless a run ended like the undisturbed one."""
    mine = outcome(workdir)
    if wrong := [what for what in self.whole if mine[what] != self.whole[what]]:
      raise Lost(f'{workdir}: {", ".join(wrong)} differ from the undisturbed run')


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
  """Return the results of a run without its timings."""
  result = json.loads((workdir / 'result.json').read_text())
  about = json.loads((workdir / 'checkpoints' / str(result['steps']) / METADATA).read_text())
  params, average = (restore(workdir, 'latest', average=which).params for which in (False, True))
  return {
    'metrics': [_timeless(line) for line in read_metrics(workdir)],
    'parameters': [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)],
    'average': [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(average)],
    'optimizer': about['custom_metadata']['checksums']['training'],
    'predictions': {name: array.tobytes() for name, array in (read_predictions(workdir) or {}).items()},
    'result': _timeless(result),
  }


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in values.items() if key not in CLOCKS}


def _printed(row: dict[str, Any]) -> dict[str, Any]:
  print(', '.join(f'{key} {value}' for key, value in row.items()), flush=True)
  return row


def _complete(workdir: pathlib.Path) -> set[int]:
  """Return the steps of the complete checkpoints."""
  return {int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal()}


def _unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
  """Return the name and inode of each unfinished checkpoint. The inode distinguishes checkpoints of the same name."""
  return {(path.name, path.stat().st_ino) for path in (workdir / 'checkpoints').glob(f'*{UNFINISHED}')}


def _bytes_on_disk(folder: pathlib.Path) -> int:
  return sum(path.stat().st_blocks * 512 for path in folder.rglob('*'))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: int) -> Iterator[tuple[pathlib.Path, Callable[[], None]]]:
  """Mount an in-memory disk of `size` bytes on a new folder.

  Yields:
    The folder, and a function that enlarges the disk.

  Raises:
    OSError: this machine or user cannot mount.
  """

  def mount(options: str) -> None:
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      raise OSError(done.stderr.strip())

  folder.mkdir()
  mount(f'size={size}')
  try:
    yield folder, lambda: mount(f'remount,size={100 * size}')
  finally:
    subprocess.run(['umount', str(folder)], check=True)


def can_mount(folder: pathlib.Path) -> bool:
  """Return True if small disks can be mounted. Otherwise print why not."""
  try:
    with small_disk(folder / 'any', 2**16):
      return True
  except OSError as error:
    print(f'full disks are skipped, because no disk can be mounted: {error}')
    return False


def measure(folder: pathlib.Path, kills: int, seed: int, layouts: Sequence[str]) -> dict[str, Any]:
  """Disturb runs of these layouts. Return rows of counts, and a list of all events."""
  rows, events, device = [], {}, ''
  for name in layouts:
    layout = LAYOUTS[name]
    chaos = Chaos(layout, folder / name.replace(' ', '-'), random.Random(seed))
    chaos.folder.mkdir()
    device = chaos.whole['result']['device']
    full = chaos.disks() if layout.rooms and can_mount(chaos.folder) else []
    damaged = chaos.damages() if layout.damages else []
    killed = chaos.kills(round(kills * layout.kills))
    lost = chaos.losses(round(kills * layout.losses))
    writing = sum(bool(kill['being written']) for kill in killed)
    runs = len({kill['run'] for kill in killed})
    counts = {
      'killed': (len(killed), writing, runs, runs),
      'newest checkpoint damaged': (len(damaged), '', len(damaged), len(damaged)),
      'disk full': (len(full), '', len(full), len(full)),
      'a process lost': (len(lost), '', len(lost), len(lost)),
    }
    # A lost run would have raised an error, so all runs ended as if undisturbed.
    columns = ('times', 'while a checkpoint was written', 'runs', 'ended as if undisturbed')
    rows += [{'of': name, 'what': what} | dict(zip(columns, n, strict=True)) for what, n in counts.items() if n[0]]
    events[name] = {'kills': killed, 'damages': damaged, 'disks': full, 'losses': lost}
  title = 'Disturbed and continued runs, which write a checkpoint every 4 steps'
  return {'title': title, **measured_on(), 'device': device, 'seed': seed, 'rows': rows, 'events': events}


def main() -> None:
  """Print and write the counts. The exit status is 1 if anything is lost."""
  flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  flags.add_argument('--kills', type=int, default=30, help='number of kills; a fifth for two processes (30)')
  flags.add_argument('--layouts', nargs='+', choices=LAYOUTS, default=[*LAYOUTS], help='layouts to test; default all')
  flags.add_argument('--seed', type=int, default=0, help='seed of the random moments (0)')
  flags.add_argument('--out', type=pathlib.Path, help='JSON file; default runs/benchmarks/chaos.json')
  options = flags.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # leave the accelerators to the runs
  logging.set_verbosity(logging.ERROR)  # hides warnings of Orbax about intended behavior
  begin, folder = time.monotonic(), pathlib.Path(tempfile.mkdtemp(prefix='chaos-'))
  try:
    measured = measure(folder, options.kills, options.seed, options.layouts)
  except Lost as error:
    sys.exit(f'error: {error}\nThe runs are in {folder}.')
  save('chaos', measured | {'seconds': round(time.monotonic() - begin)}, options.out)
  print('\n' + format_report(measured))
  shutil.rmtree(folder)


if __name__ == '__main__':
  launch(main)
