"""Load on `hbf serve`: requests a second and times of answers by number of clients, wrong answers, memory, overload.

pip install -r requirements-serve.txt
python -m benchmarks.serve                                    # the pretrained model laptop-cifar10-hyperbf
python -m benchmarks.serve --clients 64 --seconds 20

The load generator is Locust (https://locust.io). Each client sends an image over the loopback address, waits for the
answer, checks it and sends the next image at once. Expected answers come from `hbf predict`. The server of the last
row takes few images at a time, so that it has to refuse many. Generator and server share the machine.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import launch, numbers, parser, positive, report
from benchmarks.photographs import photograph
from hbf.data.images.codec import encode_png
from hbf.errors import UserError
from hbf.training import pretrained

MODEL = 'laptop-cifar10-hyperbf'
SMALL, LARGE = 150, 10  # PNG images of 32×32 pixels, and JPEG images of 500×375 pixels
FEW = 8  # images that the server takes at a time, in the row of overload
WARM = 5.0  # seconds of load before the memory counts
EVERY = 0.5  # seconds between two looks at the memory


class Served(NamedTuple):
  """A running server: its process and its address."""

  process: subprocess.Popen
  address: str


def main() -> None:
  """Print a row for each number of clients, and a row of overload."""
  flags = parser(__doc__)
  flags.add_argument('--workdir', default='', help=f'run folder; default: the pretrained model {MODEL}')
  flags.add_argument('--clients', default='1,8,64', type=numbers, help='numbers of clients')
  flags.add_argument('--seconds', type=positive, default=60, help='time of each row')
  options = flags.parse_args()
  if importlib.util.find_spec('locust') is None:
    raise UserError('this benchmark needs Locust: pip install -r requirements-serve.txt')
  clients = options.clients
  workdir = options.workdir or str(pretrained.unpack(MODEL))
  with tempfile.TemporaryDirectory() as made:
    folder = pathlib.Path(made)
    make_images(folder, workdir)
    with serve(workdir, '--queue=128') as served:
      rows = [measure(served, folder, number, options.seconds) for number in clients]
    with serve(workdir, f'--queue={FEW}') as served:
      rows.append(measure(served, folder, clients[-1], options.seconds, f', at most {FEW} images at a time'))
  report('serve', f'`hbf serve` under load, {options.seconds} s a row', rows, options.out)


def make_images(folder: pathlib.Path, workdir: str) -> None:
  """Write images and the answers of `hbf predict` to a folder."""
  random = np.random.default_rng(0)
  for number in range(SMALL):
    (folder / f'{number}.png').write_bytes(encode_png(random.integers(0, 256, (32, 32, 3), np.uint8)))
  for number in range(LARGE):
    (folder / f'{number}.jpg').write_bytes(photograph(number))
  command = [sys.executable, '-m', 'hbf', 'predict', f'--workdir={workdir}', '--json', str(folder)]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
  (folder / 'expected.json').write_text(done.stdout)


@contextlib.contextmanager
def serve(workdir: str, *flags: str) -> Iterator[Served]:
  """Run a server inside the context. At the end, stop it by SIGTERM. It must end with exit status 0."""
  command = [sys.executable, '-m', 'hbf', 'serve', f'--workdir={workdir}', '--port=0', *flags]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
    assert process.stdout is not None
    try:
      yield Served(process, process.stdout.readline().removeprefix('ready: ').strip())
    finally:
      process.send_signal(signal.SIGTERM)
    if process.wait(60):
      raise RuntimeError(f'the server ended with status {process.returncode}: expected 0')


def measure(served: Served, folder: pathlib.Path, clients: int, seconds: int, about: str = '') -> dict[str, Any]:
  """Return a row for this many clients: answers per second, times of answers, refusals, wrong answers and memory."""
  before, memory, over = counts(served), list[float](), threading.Event()
  watch = threading.Thread(target=watch_memory, args=(served.process.pid, memory, over))
  watch.start()
  try:
    stats = load(served, folder, clients, seconds)
  finally:
    over.set()
    watch.join()
  after = counts(served)
  kept = memory[round(WARM / EVERY) :] or memory
  answered, refused, failed = (stats.get(name, {}) for name in ('answered', 'refused', 'failed'))
  return {
    'clients': f'{clients}{about}',
    'answers/s': answered.get('num_requests', 0) / seconds,
    'p50, ms': percentile(answered, 0.5),
    'p99, ms': percentile(answered, 0.99),
    'answered': answered.get('num_requests', 0),
    'wrong': answered.get('num_failures', 0),
    'failed': failed.get('num_requests', 0),
    'refused (503)': refused.get('num_requests', 0),
    'p99 of refusals, ms': percentile(refused, 0.99),
    'lost': after.get('200', 0) - before.get('200', 0) - answered.get('num_requests', 0),
    'memory, MB': f'{min(kept):.0f}–{max(kept):.0f}',
    'memory, last/first': kept[-1] / kept[0],
  }


def load(served: Served, folder: pathlib.Path, clients: int, seconds: int) -> dict[str, dict[str, Any]]:
  """Let clients send requests for `seconds`. Return Locust's statistics by outcome: 'answered', 'refused', 'failed'.

  An answer is wrong if it is 'answered' and a failure. A request has 'failed' if it has another answer or none.
  """
  users = pathlib.Path(__file__).with_name('serve_users.py')
  command = [sys.executable, '-m', 'locust', '-f', str(users), '--headless', '--json', '--loglevel=ERROR']
  command += [f'--users={clients}', f'--spawn-rate={clients}', f'--run-time={seconds}', '--stop-timeout=30']
  environment = os.environ | {'HBF_IMAGES': str(folder)}
  done = subprocess.run([*command, f'--host={served.address}'], stdout=subprocess.PIPE, text=True, env=environment)
  if not done.stdout.strip():
    raise RuntimeError(f'Locust ended with status {done.returncode} and no statistics')
  return {stat['name']: stat for stat in json.loads(done.stdout)}


def counts(served: Served) -> Mapping[str, int]:
  """Return the numbers of requests that the server has answered or refused, by status."""
  with urllib.request.urlopen(f'{served.address}/health', timeout=60) as answer:
    return json.load(answer)['requests']


def watch_memory(process: int, memory: list[float], over: threading.Event) -> None:
  """Append the memory of a process in MB to `memory`, again and again, until `over` is set."""
  while not over.is_set():
    pages = int(pathlib.Path(f'/proc/{process}/statm').read_text().split()[1])
    memory.append(pages * os.sysconf('SC_PAGE_SIZE') / 1e6)
    time.sleep(EVERY)


def percentile(stat: Mapping[str, Any], share: float) -> float | str:
  """Return a percentile of the times of answers in ms, which Locust rounds to two digits. '' if there are none."""
  times: Sequence[tuple[float, int]] = sorted((float(ms), n) for ms, n in stat.get('response_times', {}).items())
  left = share * sum(n for _, n in times)
  for ms, n in times:
    left -= n
    if left <= 0:
      return ms
  return ''


if __name__ == '__main__':
  launch(main)
