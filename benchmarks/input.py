"""Input: how fast it delivers batches by itself, and what share of its time training waits for it.

python -m benchmarks.input                                   # random PNG images of the shapes of digits and CIFAR-10
python -m benchmarks.input --data cifar10 --dir ~/tensorflow_datasets     # prepared data
"""

import contextlib
import dataclasses
import importlib
import io
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.common import parser, report
from benchmarks.models import make_training
from hbf.data import images
from hbf.data.datasets import load
from hbf.data.inputs import Batch, Input, gather, make_input
from hbf.data.order import TrainOrder
from hbf.data.sources import Source
from hbf.training.experiment import steps_per_call
from hbf.training.machine import keep_compiled_programs, keep_freed_memory
from hbf.training.sharding import batch_sharding, make_mesh
from hbf.training.state import TrainState, several

SHAPES = {'digits': (8, 8, 1), 'cifar10': (32, 32, 3), 'cifar100': (32, 32, 3), 'tiny_imagenet': (64, 64, 3)}
EXAMPLES = 4096  # random ones
FILL = 8  # stacks before a measurement: readers start, look-ahead fills or empties
ENDLESS = 10**5  # stacks


@dataclasses.dataclass(frozen=True)
class RandomImages:
  """Random images and labels, encoded in memory."""

  encoded: tuple[bytes, ...]
  channels: int

  def __len__(self) -> int:
    return len(self.encoded)

  def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
    file = io.BytesIO(self.encoded[index])
    return images.decode(file, channels=self.channels, size=None, formats=images.TFDS_FORMATS), index % 10


def main() -> None:
  """Prints a row for every data set and kind of input."""
  flags = parser(__doc__)
  flags.add_argument('--data', default='digits,cifar10', help=f'of {", ".join(SHAPES)}')
  flags.add_argument('--dir', default='', help='TFDS folder with the prepared data; none: random images')
  flags.add_argument('--model', default='hyperbf')
  flags.add_argument('--seconds', type=float, default=4.0, help='of each of the two measurements of a row')
  options = flags.parse_args()
  keep_freed_memory()
  keep_compiled_programs()
  rows = []
  for name in options.data.split(','):
    config = importlib.import_module(f'configs.{name}').get_config(f'model={options.model}')
    source = open_source(name, options.dir)
    rows += [measure(config, source, kind, options.seconds) for kind in ('device', 'stream')]
  origin = 'prepared' if options.dir else 'random'
  title = f'Input alone (batches/s, images/s) and in a step of {options.model}, recipe small, {origin} images'
  report('input', title, rows, options.out)


def open_source(name: str, directory: str) -> Source:
  """The training split, or random images of its shape."""
  if directory:
    return load(name=name, dir=directory, root='', image_size=None, download=False).splits['train']
  shape = SHAPES[name]
  pixels = np.random.default_rng(0).integers(0, 256, (EXAMPLES, *shape), np.uint8)
  return RandomImages(tuple(map(images.encode_png, pixels)), shape[-1])


def measure(config: ConfigDict, source: Source, kind: str, seconds: float) -> dict[str, Any]:
  """The row of a data set and a kind of input."""
  mesh = make_mesh(jax.devices())
  data = make_input(kind, source, batch_sharding(mesh), config.data.workers, resident_bytes=0)
  order = TrainOrder(config.seed, len(source), config.train.batch_size)
  size = steps_per_call(config.train.steps_per_call, data.resident is not None, mesh)
  with contextlib.closing(data.stacks(order, 0, [size] * ENDLESS, size)) as stacks:
    alone = size * deliver(data, stacks, seconds)
    waits, total = train(config, data, stacks, seconds)
  steps = size * len(waits)
  return {
    'input': f'{config.data.name} {kind}',
    'batch': order.batch_size,
    'batches/s': round(alone),
    'images/s': round(alone * order.batch_size),
    'step ms': 1e3 * total / steps,
    'wait ms': 1e3 * sum(waits) / steps,
    'wait %': 100 * sum(waits) / total,
  }


def deliver(data: Input, stacks: Iterator[Batch], seconds: float) -> float:
  """Stacks a second, with images and labels on the devices, that the input delivers while nobody trains."""
  complete = jax.jit(jax.vmap(gather, in_axes=(None, 0)))
  for _ in range(FILL):
    jax.block_until_ready(complete(data.resident, next(stacks)))
  count, begin = 0, time.perf_counter()
  while (elapsed := time.perf_counter() - begin) < seconds:
    jax.block_until_ready(complete(data.resident, next(stacks)))
    count += 1
  return count / elapsed


def train(config: ConfigDict, data: Input, stacks: Iterator[Batch], seconds: float) -> tuple[list[float], float]:
  """Seconds that each call of a training loop waited for its stack, and seconds of all these calls together."""
  waits: list[float] = []
  state, steps, size = start(config, data, next(stacks))

  def call(state: TrainState) -> tuple[TrainState, jax.Array]:
    asked = time.perf_counter()
    stack = next(stacks)
    waits.append(time.perf_counter() - asked)
    return steps(state, data.resident, stack, size)

  for _ in range(FILL):  # also what was read ahead while the steps were compiled
    state, done = call(state)
  jax.block_until_ready(done)
  waits.clear()
  begin = time.perf_counter()
  while time.perf_counter() - begin < seconds:
    before = done
    state, done = call(state)
    jax.block_until_ready(before)
  jax.block_until_ready(done)
  return waits, time.perf_counter() - begin


def start(config: ConfigDict, data: Input, stack: Batch) -> tuple[TrainState, Any, np.int32]:
  """A fresh state, the compiled steps, and the number of steps in a stack."""
  _, init, train_step = make_training(config)
  state = jax.jit(init)(data.resident, jax.tree.map(lambda z: z[0], stack))
  steps = jax.jit(several(train_step), donate_argnums=0)
  size = np.int32(len(stack['index']))
  return state, steps.lower(state, data.resident, stack, size).compile(), size


if __name__ == '__main__':
  main()
