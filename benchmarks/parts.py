"""The parts of a train step: the time of each, beside an estimate from the rates of this device.

python -m benchmarks.parts                                            # HyperBF, recipe laptop, one core
python -m benchmarks.parts --config cifar10:model=vit,recipe=memo --width 768 --batch 32

The step is the one that training compiles. JAX's profiler gives the time of each of its operations. An operation
belongs to the part of the network whose code made it, and a fusion of several operations to the part of the last.
The estimate is the greater of two times: the matrix products of the part at the rate of a square product, and the
bytes that it moves at the rate of a copy. The first of the two is in a column of its own. Bytes that stay in a cache
make the real time shorter.
"""

import collections
import os
import pathlib
import re
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from benchmarks.bound import rates, references
from benchmarks.common import alternate, launch, parser, report
from benchmarks.models import Trainer, compile_trainer, make_training, random_batch
from hbf.config.datasets import get_config
from hbf.config.resolve import resolve
from hbf.hardware.hlo import instruction_traffic
from hbf.models.flops import PRODUCTS, count_equation
from hbf.training.machine import keep_freed_memory

# The first pattern that a scope contains gives its part.
PARTS = {
  'stage 1': r'\bstage1\b',
  'stage 2': r'\bstage2\b',
  'norms and residuals': r'/block\d+\b|/blocks\b|/trunk/norm\b|/trunk/merge',
  'stem': r'/embed/',
  'head and loss': r'jvp\(',
  'optimizer': r'/optimizer\b|/average\b',
  'input and augmentation': r'/input\b',
}
REST = 'rest'
TRACES = 7  # traces of one step each: their median leaves out a moment in which other programs had the cores


def part_of(scope: str) -> str:
  """Return the part of the step that made an operation, by the scope that JAX gives to it."""
  return next((part for part, pattern in PARTS.items() if re.search(pattern, scope)), REST)


def is_backward(scope: str) -> bool:
  """Return True if an operation belongs to the backward pass."""
  return 'transpose(' in scope


def products(trainer_step: Any, *args: Any) -> collections.Counter[str]:
  """Count the operations of the matrix products of each part, in one call of a function with arrays or shapes."""
  counts = collections.Counter[str]()
  for equation in jax.make_jaxpr(trainer_step)(*args).jaxpr.eqns:
    counts[part_of(f'/{equation.source_info.name_stack}')] += count_equation(equation, PRODUCTS)
  return counts


def operation_times(trainer: Trainer) -> dict[str, float]:
  """Return the milliseconds of each operation in a step by its name: medians of several traces."""
  traces = [_trace(trainer) for _ in range(TRACES)]
  return {name: statistics.median(times.get(name, 0.0) for times in traces) for name in set().union(*traces)}


def _trace(trainer: Trainer) -> dict[str, float]:
  """Return the milliseconds of each operation in one step by its name."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # a call of a function costs more than many operations
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      jax.block_until_ready(trainer())
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    times = collections.defaultdict[str, float](float)
    for name, nanoseconds in _operations(jax.profiler.ProfileData.from_file(str(path))):
      times[name] += nanoseconds / 1e6
  return dict(times)


def _operations(data: Any) -> Iterator[tuple[str, float]]:
  """Yield the name of each traced operation, and its nanoseconds."""
  for plane in data.planes:
    for line in plane.lines:
      for event in line.events:
        name = dict(event.stats).get('hlo_op')
        if name:
          yield name, event.duration_ns


def rows(
  times: Mapping[str, float],
  moved: Mapping[str, tuple[str, int]],
  counts: Mapping[str, float],
  rate: float,
  bandwidth: float,
) -> list[dict[str, Any]]:
  """Return a row for each part, and one for all of them.

  Args:
    times: milliseconds of each operation.
    moved: scope and bytes of each operation, as `instruction_traffic` returns them. Other operations only call these.
    counts: operations of the matrix products of each part.
    rate: operations a second of a square matrix product.
    bandwidth: bytes a second of a copy.
  """
  spent, sizes = collections.defaultdict[tuple[str, bool], float](float), collections.Counter[str]()
  for name, (scope, size) in moved.items():
    part = part_of(scope)
    spent[part, is_backward(scope)] += times.get(name, 0.0)
    sizes[part] += size
  estimates = {part: 1e3 * max(counts.get(part, 0) / rate, sizes[part] / bandwidth) for part in (*PARTS, REST)}

  def row(name: str, parts: Iterable[str]) -> dict[str, Any]:
    forward, backward = (sum(spent[part, late] for part in parts) for late in (False, True))
    estimate = sum(estimates[part] for part in parts)
    return {
      'part': name,
      'forward, ms': forward,
      'backward, ms': backward,
      'share, %': 100 * (forward + backward) / sum(spent.values()),
      'products, ms': 1e3 * sum(counts.get(part, 0) for part in parts) / rate,
      'GB moved': sum(sizes[part] for part in parts) / 1e9,
      'estimate, ms': estimate,
      'time / estimate': (forward + backward) / estimate if estimate else '',
    }

  return [*(row(part, [part]) for part in estimates), row('all', [*estimates])]


def main() -> None:
  """Print a row for every part."""
  flags = parser(__doc__)
  flags.add_argument('--config', default='cifar10:model=hyperbf,recipe=laptop', help='NAME[:arguments]')
  flags.add_argument('--image_size', type=int, default=32, help="the images' height and width in pixels")
  flags.add_argument('--width', type=int, help="D of the tokens instead of the config's")
  flags.add_argument('--batch', type=int, help="images in a step instead of the config's")
  options = flags.parse_args()
  config = get_config(options.config)
  if config.task != 'classification':
    flags.error(f'--config {options.config} is for {config.task}, and this benchmark is for classification')
  if hasattr(os, 'sched_setaffinity'):  # on one core, the times of the operations add up to the time of the step
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  keep_freed_memory()  # as training does
  config.model.width = options.width or config.model.width
  config = resolve(config)
  batch = options.batch or config.train.batch_size
  shape = (options.image_size, options.image_size, 3)
  trainer = compile_trainer(config, shape, batch)
  _, init, step = make_training(config, shape)
  examples = random_batch(batch, shape)
  counts = products(step, jax.eval_shape(lambda: init(None, examples)), None, examples)
  known = references()
  seconds = alternate({'step': trainer, **{name: call for name, (call, _) in known.items()}}, options.rounds)
  rate, bandwidth = rates(seconds, known)
  found = rows(operation_times(trainer), instruction_traffic(trainer.step.as_text()), counts, rate, bandwidth)
  speed = f'{rate / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.1f} GB/s'
  step_ms = 1e3 * statistics.median(seconds['step'])
  sizes = f'width {config.model.width}, {batch} images of {options.image_size}×{options.image_size} pixels'
  title = f'Train step of {options.config}, {sizes}, {step_ms:,.0f} ms; the device reaches {speed}'
  report('parts', title, found, options.out)


if __name__ == '__main__':
  launch(main)
