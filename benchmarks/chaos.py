"""Is anything lost of runs that are killed, whose checkpoints are damaged, or whose disk is full?

python -m benchmarks.chaos                      # minutes on two cores
python -m benchmarks.chaos --kills=3 --seed=1

A small run on the digits that writes a checkpoint every four steps is killed (signal 9) at random moments and started
again by the same command until it ends; is stopped and its newest checkpoint damaged, in every way of
`benchmarks.damages`; and is given disks that it fills. Of a run of two processes both are killed, or one, which the
other must notice. In the end each must have the state, parameters, metrics and predictions of a run that nobody
disturbed, bit for bit. Whoever may not mount a small disk misses that part.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from benchmarks.common import measured_on, save, shown
from benchmarks.damages import DAMAGES, METADATA
from hbf.training.evaluate import restore
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
STOP = 0.9  # of its steps: where a run is stopped, to be damaged
KILLS_A_RUN = 10
# Shares of the kills: while a run starts, after its data are read, after it has begun to take steps.
KINDS = {'starting': 0.1, 'restoring': 0.1, 'training': 0.8}
SPAN = {'starting': 6.0, 'restoring': 3.0, 'training': 0.5}  # seconds within which they come
PROGRESS = 0.2  # of its steps: what a run takes before, at most
LIMIT = 300.0  # seconds after which a run hangs
CLOCKS = {'images_per_second', 'seconds', 'train_seconds', 'compile_seconds', 'peak_memory_bytes'}
UNFINISHED = '.orbax-checkpoint-tmp'


def one_process(flags: Sequence[str]) -> list[list[str]]:
  """As on a laptop."""
  return [[sys.executable, str(ROOT / 'train.py'), *flags]]


def two_processes(flags: Sequence[str]) -> list[list[str]]:
  """On one machine, each with what devices it has."""
  with socket.create_server(('localhost', 0)) as free:
    coordinator = f'localhost:{free.getsockname()[1]}'
  meet = (f'--coordinator={coordinator}', '--processes=2')
  return [[*command, *meet, f'--process={n}'] for n in range(2) for command in one_process(flags)]


class Layout(NamedTuple):
  """How runs are started, and what is done to them.

  Attributes:
    commands: of a run's processes, given the flags of train.py.
    epochs: of a run.
    kills: of all, the share of these runs.
    damages: names of those in `DAMAGES`.
    rooms: checkpoints that a disk has room for; the run keeps five.
  """

  commands: Callable[[Sequence[str]], list[list[str]]]
  epochs: int
  kills: float
  damages: Sequence[str]
  rooms: Sequence[float]


LAYOUTS = {
  'two processes': Layout(two_processes, 3, 0.2, [*DAMAGES][::7], ()),  # each start takes several times as long
  'one process': Layout(one_process, 10, 0.8, [*DAMAGES], (0.5, 2.5, 3.5)),
}


class Lost(Exception):
  """A run doesn't go on, or ended as another."""


class Start:
  """The processes of a run that is started or goes on; the context ends them."""

  def __init__(self, layout: Layout, workdir: pathlib.Path, folder: pathlib.Path):
    """Starts them; what they say, and compiled programs, go to a folder."""
    self._workdir, self._log = workdir, folder / 'said'
    # A cache of their own: those who are killed shall not write the user's.
    cache = {'JAX_COMPILATION_CACHE_DIR': str(folder / 'xla'), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    with open(self._log, 'w') as log:
      self._processes = [
        subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | cache)
        for command in layout.commands([*RUN, f'--config.train.epochs={layout.epochs}', f'--workdir={workdir}'])
      ]

  def said(self) -> str:
    """On the console, so far."""
    return self._log.read_text()

  def steps(self) -> list[int]:
    """Those that were reported there."""
    return [int(step) for step in re.findall(r'^step +(\d+)', self.said(), re.MULTILINE)]

  def targets(self) -> list[int | None]:
    """Whom a kill may strike: all processes, or one of several, whereupon the others end by themselves."""
    return [None, *range(len(self._processes))] if len(self._processes) > 1 else [None]

  def runs(self) -> bool:
    """Whether a process has not ended."""
    return any(process.poll() is None for process in self._processes)

  def wait(self, come: Callable[[], bool], seconds: float = LIMIT) -> None:
    """Waits until something has come, but not longer than so many seconds or the processes run."""
    end = time.monotonic() + seconds
    while not come() and self.runs() and time.monotonic() < end:
      time.sleep(0.01)

  def send(self, number: signal.Signals, process: int | None = None) -> None:
    """Sends a process, or all, a signal."""
    for each in self._processes if process is None else [self._processes[process]]:
      each.send_signal(number)

  def end(self, code: int = 0) -> str:
    """Waits for the end, which must have this exit status; returns what was said."""
    self.wait(lambda: False)
    codes = {process.poll() for process in self._processes}
    if codes != {code}:
      raise Lost(f'{self._workdir} ended with {codes}, not {code} (None: not within {LIMIT:.0f} s):\n{self.said()}')
    return self.said()

  def __enter__(self) -> 'Start':
    return self

  def __exit__(self, *_: object) -> None:
    for process in self._processes:
      process.kill()
      process.wait()


@dataclasses.dataclass(frozen=True)
class Chaos:
  """What is done to runs of one layout in a folder; each must end as `whole` did."""

  layout: Layout
  folder: pathlib.Path
  draw: random.Random

  @functools.cached_property
  def whole(self) -> dict[str, Any]:
    """The outcome of a run that nobody disturbs."""
    self._go_on(self.folder / 'whole')
    return outcome(self.folder / 'whole')

  @property
  def _steps(self) -> int:
    return self.whole['result']['steps']

  def kills(self, count: int) -> list[dict[str, Any]]:
    """Kills runs so often in all; returns a row for each kill."""
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
      workdir, most = self.folder / f'killed-{len(rows)}', min(len(rows) + KILLS_A_RUN, count)
      while len(rows) < most and (row := self._kill(workdir)):
        rows.append(_printed({'run': workdir.name} | row))
      self._go_on(workdir)
      self._check(workdir)
    return rows

  def _kill(self, workdir: pathlib.Path) -> dict[str, Any] | None:
    """Starts a run and kills it; None if it ended before."""
    before, launched = _unfinished(workdir), time.monotonic()
    kind, *_ = self.draw.choices(list(KINDS), list(KINDS.values()))
    moment, steps = self.draw.uniform(0, SPAN[kind]), self.draw.uniform(0, PROGRESS * self._steps)
    with self._start(workdir) as start:
      if kind != 'starting':
        start.wait(lambda: 'workdir' in start.said())
      if kind == 'training':
        steps += max(_complete(workdir), default=0)
        start.wait(lambda: any(step > steps for step in start.steps()))
      start.wait(lambda: False, moment)
      if not start.runs():
        start.end()
        return None
      after, struck = time.monotonic() - launched, self.draw.choice(start.targets())
      start.send(signal.SIGKILL, struck)
      start.wait(lambda: False)
      if start.runs():
        raise Lost(f'{workdir}: process {struck} is gone, and the others have not ended within {LIMIT:.0f} s')
    writing = ', '.join(name.removesuffix(UNFINISHED) for name, _ in _unfinished(workdir) - before)
    return {
      'struck': 'all' if struck is None else f'process {struck}',
      'while': kind,
      'seconds': round(after, 2),
      'newest': max(_complete(workdir), default=0),
      'being written': writing,
    }

  def damages(self) -> list[dict[str, Any]]:
    """Damages the newest checkpoint of a stopped run in every way; returns a row for each."""
    stopped = self._stopped
    newest, second = sorted(_complete(stopped))[:-3:-1]
    rows = []
    for number, name in enumerate(self.layout.damages):
      workdir = shutil.copytree(stopped, self.folder / f'damaged-{number}')
      DAMAGES[name](workdir / 'checkpoints' / str(newest))
      aside = workdir / 'checkpoints' / f'{newest}.damaged'
      lines = f'checkpoint {newest} cannot be read; set aside as {aside}\ngoes on after step {second}\n'
      if lines not in (said := self._go_on(workdir)) or 'Traceback' in said or not aside.exists():
        raise Lost(f'{workdir}, {name}: expected {lines!r}, and no traceback, in:\n{said}')
      self._check(workdir)
      rows.append(_printed({'damage': name, 'newest': newest, 'went on after': second}))
    return rows

  @functools.cached_property
  def _stopped(self) -> pathlib.Path:
    """A run that was stopped before its end."""
    workdir = self.folder / 'stopped'
    with self._start(workdir) as start:
      start.wait(lambda: any(step >= STOP * self._steps for step in start.steps()))
      start.send(signal.SIGTERM)
      start.end()
    return workdir

  def disks(self) -> list[dict[str, Any]]:
    """Has runs fill disks, and makes room; returns a row for each disk."""
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
    """A run whose disk is too small, and then isn't."""
    with self._start(workdir) as start:
      said = start.end(1)
    last = said.splitlines()[-1]
    if 'Traceback' in said or not last.startswith(f'error: {workdir} could not be written: no space left on device'):
      raise Lost(f'{workdir}: expected one clear line in:\n{said}')
    complete = _complete(workdir)
    make_room()
    said = self._go_on(workdir)
    if complete and f'\ngoes on after step {max(complete)}\n' not in said:
      raise Lost(f'{workdir}: does not go on after step {max(complete)}:\n{said}')
    self._check(workdir)
    return {'complete': sorted(complete), 'said': last.replace(str(workdir), workdir.name)}

  def _start(self, workdir: pathlib.Path) -> Start:
    return Start(self.layout, workdir, self.folder)

  def _go_on(self, workdir: pathlib.Path) -> str:
    """Starts a run, or goes on with it, until it ends; returns what it said."""
    with self._start(workdir) as start:
      return start.end()

  def _check(self, workdir: pathlib.Path) -> None:
    """Raises Lost unless a run ended as the one that nobody disturbed."""
    mine = outcome(workdir)
    if wrong := [what for what in self.whole if mine[what] != self.whole[what]]:
      raise Lost(f'{workdir}: not the {", ".join(wrong)} of the undisturbed run')


def outcome(workdir: pathlib.Path) -> dict[str, Any]:
  """What a run ended with, but for what a clock says."""
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
  """Steps of the checkpoints."""
  return {int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdecimal()}


def _unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
  """Checkpoints that are being written or never will be: name, and what tells two of a name apart."""
  return {(path.name, path.stat().st_ino) for path in (workdir / 'checkpoints').glob(f'*{UNFINISHED}')}


def _bytes_on_disk(folder: pathlib.Path) -> int:
  return sum(path.stat().st_blocks * 512 for path in folder.rglob('*'))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: int) -> Iterator[tuple[pathlib.Path, Callable[[], None]]]:
  """Mounts a disk of so many bytes, in memory, on a new folder; gives it, and a function that enlarges the disk.

  Raises:
    OSError: this machine, or user, can't.
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
  """Whether small disks can be had; says so if not."""
  try:
    with small_disk(folder / 'any', 2**16):
      return True
  except OSError as error:
    print(f'full disks are left out, as none can be mounted: {error}')
    return False


def measure(folder: pathlib.Path, kills: int, seed: int) -> dict[str, Any]:
  """Does everything to runs of every layout; returns rows of counts, and what happened one by one."""
  rows, events, device = [], {}, ''
  for name, layout in LAYOUTS.items():
    chaos = Chaos(layout, folder / name.replace(' ', '-'), random.Random(seed))
    chaos.folder.mkdir()
    device = chaos.whole['result']['device']
    full = chaos.disks() if layout.rooms and can_mount(chaos.folder) else []
    damaged, killed = chaos.damages(), chaos.kills(round(kills * layout.kills))
    writing = sum(bool(kill['being written']) for kill in killed)
    runs = len({kill['run'] for kill in killed})
    counts = {
      'killed': (len(killed), writing, runs, runs),
      'newest checkpoint damaged': (len(damaged), '', len(damaged), len(damaged)),
      'disk full': (len(full), '', len(full), len(full)),
    }
    # Whoever is lost ends all with an error.
    columns = ('times', 'while a checkpoint was written', 'runs', 'ended as if undisturbed')
    rows += [{'of': name, 'what': what} | dict(zip(columns, n, strict=True)) for what, n in counts.items() if n[0]]
    events[name] = {'kills': killed, 'damages': damaged, 'disks': full}
  title = 'Runs that write a checkpoint every 4 steps, disturbed and gone on with'
  return {'title': title, **measured_on(), 'device': device, 'seed': seed, 'rows': rows, 'events': events}


def main() -> None:
  """Prints and writes the counts; exit status 1 if anything is lost."""
  flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  flags.add_argument('--kills', type=int, default=30, help='in all; a fifth of them of two processes (30)')
  flags.add_argument('--layouts', nargs='+', choices=LAYOUTS, default=[*LAYOUTS], help='which; default all')
  flags.add_argument('--seed', type=int, default=0, help='of their moments (0)')
  flags.add_argument('--out', type=pathlib.Path, help='JSON file; default runs/benchmarks/chaos.json')
  options = flags.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # devices are for the runs
  logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
  begin, folder = time.monotonic(), pathlib.Path(tempfile.mkdtemp(prefix='chaos-'))
  try:
    measured = measure(folder, options.kills, options.seed)
  except Lost as error:
    sys.exit(f'error: {error}\nThe runs are in {folder}.')
  save('chaos', measured | {'seconds': round(time.monotonic() - begin)}, options.out)
  print('\n' + shown(measured))
  shutil.rmtree(folder)


if __name__ == '__main__':
  main()
