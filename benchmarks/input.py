"""Speed of the input alone, the time that training waits for it, and the speed of training from each kind of input.

python -m benchmarks.input                                   # random PNG images of the shapes of digits and CIFAR-10
python -m benchmarks.input --data cifar10 --dir ~/tensorflow_datasets     # prepared data
python -m benchmarks.input --data imagenet                   # random JPEG images of ImageNet's size, only the stream

The kinds of input, from device memory and from a stream, are measured in turn.
"""

import contextlib
import dataclasses
import importlib
import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import photographs
from benchmarks.common import checked, filled, launch, names, parser, ratios, report, spread
from benchmarks.models import make_training
from configs import imagenet
from hbf.config.resolve import resolve
from hbf.data.datasets import load
from hbf.data.images import codec
from hbf.data.images.sources import Source
from hbf.data.pipeline.inputs import gather, make_input
from hbf.data.pipeline.order import TrainOrder
from hbf.nn.registry import stage_names
from hbf.tasks.registry import make_task
from hbf.training.experiment import steps_per_call
from hbf.training.machine import keep_compiled_programs, keep_freed_memory
from hbf.training.sharding import batch_sharding, make_mesh
from hbf.training.state import repeat_step

SHAPES = {'digits': (8, 8, 1), 'cifar10': (32, 32, 3), 'cifar100': (32, 32, 3), 'tiny_imagenet': (64, 64, 3)}
EXAMPLES = 4096  # random examples
KINDS = ('device', 'stream')
FILL = 8  # stacks before a measurement, so that readers have started and buffers have settled
ENDLESS = 10**5  # stacks, more than any measurement takes


@dataclasses.dataclass(frozen=True)
class RandomImages:
  """Random images and labels, encoded in memory."""

  encoded: tuple[bytes, ...]
  channels: int

  def __len__(self) -> int:
    return len(self.encoded)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    file = io.BytesIO(self.encoded[index])
    return codec.decode(file, channels=self.channels, size=None, formats=codec.TFDS_FORMATS), index % 10


class Turn(NamedTuple):
  """The seconds that training took for some steps.

  Attributes:
    steps: number of steps.
    wall: elapsed time.
    waits: part of the elapsed time that was spent on waiting for input.
    cpu: CPU time of this process and its readers.
  """

  steps: int
  wall: float
  waits: float
  cpu: float


def main() -> None:
  """Print a row for every data set and kind of input."""
  flags = parser(__doc__)
  known = (*SHAPES, 'imagenet')
  flags.add_argument('--data', default='digits,cifar10', type=names('data', known), help=f'of {", ".join(known)}')
  flags.add_argument('--dir', default='', help='TFDS folder with the prepared data; empty: random images')
  flags.add_argument('--model', default='hyperbf', type=one_model)
  flags.add_argument('--seconds', type=float, default=20.0, help='length of each of the two timings of a row')
  options = flags.parse_args()
  keep_freed_memory()
  keep_compiled_programs()
  rows = []
  for name in options.data:
    if name == 'imagenet':
      rows.append(measure_imagenet(options.dir, options.seconds))
    else:
      config = resolve(importlib.import_module(f'configs.{name}').get_config(f'model={options.model}'))
      rows += measure(config, open_source(name, options.dir), KINDS, options.seconds, options.rounds)
  origin = 'prepared' if options.dir else 'random'
  title = f'Input alone (batches/s, images/s) and in a step of {options.model}, recipe small, {origin} images'
  report('input', title, filled(rows), options.out)


def one_model(text: str) -> str:
  """Parse the name of a model."""
  (name,) = checked(stage_names)(text)
  return name


def open_source(name: str, directory: str) -> Source:
  """Return the training split of a data set in a TFDS folder. For directory '', return random images of its shape."""
  if directory:
    return load(name=name, dir=directory, root='', image_size=None, download=False).splits['train']
  shape = SHAPES[name]
  pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *shape), np.uint8)
  return RandomImages(tuple(map(codec.encode_png, pixels)), shape[-1])


def measure(
  config: ConfigDict, source: Source, kinds: Sequence[str], seconds: float, rounds: int
) -> list[dict[str, Any]]:
  """Return a row for each kind of input of a data set. In each round, training uses one kind after another."""
  with contextlib.ExitStack() as stack:
    feeds = {kind: stack.enter_context(Feed(config, source, kind)) for kind in kinds}
    rows = [{'input': f'{config.data.name} {kind}', **feed.deliver(seconds)} for kind, feed in feeds.items()]
    for feed in feeds.values():
      feed.start()
    turns = [[feed.train(seconds / rounds) for feed in feeds.values()] for _ in range(rounds)]
  for row, mine in zip(rows, zip(*turns, strict=True), strict=True):
    steps, wall, waits, cpu = map(sum, zip(*mine, strict=True))
    row |= {'step ms': 1e3 * wall / steps, 'wait ms': 1e3 * waits / steps, 'wait %': 100 * waits / wall}
    row['CPU ms'] = 1e3 * cpu / steps
    speeds = ([turn.steps / turn.wall for turn in each] for each in (mine, [first for first, *_ in turns]))
    if len(kinds) > 1:
      row[f'images/s of {kinds[0]}'] = spread(ratios(*speeds))
  return rows


def measure_imagenet(directory: str, seconds: float) -> dict[str, Any]:
  """Return the row of ImageNet's stream, without training.

  Two processes read. The batch is as small as the part of one device if many devices share a batch.
  """
  config = resolve(imagenet.get_config())
  with tempfile.TemporaryDirectory() as made:
    if not directory:
      photographs.prepare(made)
    config.update_from_flattened_dict({'data.dir': directory or made, 'data.workers': 2, 'train.batch_size': 32})
    with Feed(config, make_task(config).dataset.splits['train'], 'stream') as feed:
      return {'input': 'imagenet stream', **feed.deliver(seconds)}


class Feed(contextlib.AbstractContextManager):
  """An input, and the training that takes batches from it."""

  def __init__(self, config: ConfigDict, source: Source, kind: str):
    self._config, self._shape = config, source[0][0].shape
    self._order = TrainOrder(config.seed, len(source), config.train.batch_size)
    mesh = make_mesh(jax.devices())
    self._data = make_input(kind, source, batch_sharding(mesh), config.data.workers, resident_bytes=0)
    self._size = steps_per_call(config.train.steps_per_call, self._data.resident is not None, mesh)
    self._stacks = self._data.stacks(self._order, 0, [self._size] * ENDLESS, self._size)

  def __exit__(self, *_: object) -> None:
    self._stacks.close()

  def deliver(self, seconds: float) -> dict[str, Any]:
    """Measure how fast images and labels reach the devices without training."""
    complete = jax.jit(jax.vmap(gather, in_axes=(None, 0)))
    for _ in range(FILL):
      jax.block_until_ready(complete(self._data.resident, next(self._stacks)))
    count, before, begin = 0, cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
      jax.block_until_ready(complete(self._data.resident, next(self._stacks)))
      count += self._size
    images = count * self._order.batch_size
    return {
      'batch': self._order.batch_size,
      'batches/s': round(count / elapsed),
      'images/s': round(images / elapsed),
      'images/s a core': round(images / (cpu_seconds() - before)),
    }

  def start(self) -> None:
    """Compile the steps and take some."""
    stack = next(self._stacks)
    _, init, train_step = make_training(self._config, self._shape)
    self._state = jax.jit(init)(self._data.resident, jax.tree.map(lambda z: z[0], stack))
    steps = jax.jit(repeat_step(train_step), donate_argnums=0)
    self._steps: Any = steps.lower(self._state, self._data.resident, stack, np.int32(self._size)).compile()
    for _ in range(FILL):  # also uses up what was read ahead during compilation
      self.train(0.0)

  def train(self, seconds: float) -> Turn:
    """Train for `seconds`, but for at least one call of the compiled steps."""
    calls, waits, done = 0, 0.0, None
    before, begin = cpu_seconds(), time.perf_counter()
    while not calls or time.perf_counter() - begin < seconds:
      asked, last = time.perf_counter(), done
      stack = next(self._stacks)
      waits += time.perf_counter() - asked
      self._state, done = self._steps(self._state, self._data.resident, stack, np.int32(self._size))
      jax.block_until_ready(last)
      calls += 1
    jax.block_until_ready(done)
    return Turn(calls * self._size, time.perf_counter() - begin, waits, cpu_seconds() - before)


def cpu_seconds() -> float:
  """Return the CPU seconds of this process and, on Linux, of its readers."""
  tick = os.sysconf('SC_CLK_TCK')
  total = time.process_time()
  for process in multiprocessing.active_children():
    with contextlib.suppress(OSError), open(f'/proc/{process.pid}/stat') as file:
      _, _, fields = file.read().rpartition(')')
      total += sum(map(int, fields.split()[11:13])) / tick
  return total


if __name__ == '__main__':
  launch(main)
