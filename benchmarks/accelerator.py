"""First tests of a GPU or TPU, in ten minutes.

python -m benchmarks.accelerator
python -m benchmarks.accelerator --cases 192x1024,384x512,768x256 --minutes 20     # a device with less memory
python -m benchmarks.accelerator --parts resume --recipes small

The parts, in order: errors of every fast implementation against float64 on the host, forward and backward, in float32
and bfloat16; train steps of HyperBF, on a TPU also with its Pallas kernels, and ViT; images/s of the recipes in
training; the share of the training time that is spent on waiting for input; and the difference between an interrupted
run and an uninterrupted one. The JSON file is written after every part. A part is skipped if too little time is left.
A part that fails reports its error.
"""

import argparse
import dataclasses
import functools
import io
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict
from rich.console import Console

from benchmarks import correctness, step
from benchmarks import input as input_benchmark
from benchmarks.common import attempt, failure, filled, format_report, launch, measured_on, numbers, parser, save
from configs import digits
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError, choose
from hbf.models.build import DTYPES
from hbf.ops.fast.choice import PALLAS_PLATFORMS
from hbf.training.checkpoints import Checkpoints
from hbf.training.loop import train
from hbf.training.machine import keep_compiled_programs, keep_freed_memory
from hbf.training.restore import restore

Rows = list[dict[str, Any]]

# Models whose train steps are timed. On a GPU, those with Pallas are left out.
MODELS = ('hyperbf', 'hyperbf:pallas', 'vit')
STEP_DTYPE = 'bfloat16'
EPOCHS, EXAMPLES = 100, 50_000  # the memo trains on CIFAR for so long
INPUTS = ('device', 'stream')
RUNS = ('whole', 'again', 'interrupted')  # names of run folders


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of the benchmark: a table.

  Attributes:
    title: title of the table.
    programs: number of programs that are compiled for it. The time estimate uses it.
    measure: function that returns the rows.
  """

  title: str
  programs: int
  measure: Callable[[], Rows]


def main() -> None:
  """Print a table for every part."""
  flags = parser(__doc__)
  flags.add_argument('--minutes', type=float, default=10.0, help='time limit of all parts')
  flags.add_argument('--parts', default=','.join(PARTS))
  flags.add_argument('--tokens', default='256,257', type=numbers, help='tokens of the checked operators')
  flags.add_argument('--centers', default='500,8192', type=numbers, help='centers of the checked stage 2')
  flags.add_argument('--width', default=192, type=int, help='token width of the checked stage 2')
  flags.add_argument('--head-sizes', default='64,192', type=numbers, help='head sizes of the checked attention')
  flags.add_argument(
    '--cases', default='192x4096,384x2048,768x1024', type=pairs, help='WIDTHxBATCH, … of the train steps'
  )
  flags.add_argument('--recipes', default='memo,small', help='the last one also serves parts input and resume')
  flags.add_argument('--seconds', type=float, default=3.0, help='length of each timing in parts recipe and input')
  options = flags.parse_args()
  try:
    correctness.host()
    parts = [part for name in options.parts.split(',') for part in choose('part', name, PARTS)(options)]
  except UserError as error:
    sys.exit(str(error))
  logging.set_verbosity(logging.ERROR)  # hides warnings of Orbax about intended behavior
  keep_freed_memory()
  keep_compiled_programs()
  run(parts, 60 * options.minutes, options.out)


def pairs(text: str) -> list[tuple[int, int]]:
  """Parse pairs of numbers, such as 192x1024, of a flag."""
  return [(int(first), int(second)) for first, second in (part.split('x') for part in text.split(','))]


def run(parts: Sequence[Part], seconds: float, out: pathlib.Path | None) -> None:
  """Measure the parts for which `seconds` are enough. Print and write each part when it is done.

  A part is skipped if the time left is too short. Each of its programs is expected to take as long as the slowest
  program so far.
  """
  begin, slowest = time.perf_counter(), 0.0
  measured: dict[str, Any] = {**measured_on(), 'seconds': seconds, 'parts': []}
  for part in parts:
    left, needed = max(seconds - (time.perf_counter() - begin), 0.0), part.programs * slowest
    if left <= needed:
      found: dict[str, Any] = {'skipped': f'for lack of time: {left:.0f} s are left, about {needed:.0f} s needed'}
    else:
      found = timed(part)
      slowest = max(slowest, found['seconds'] / part.programs)
    measured['parts'].append({'title': part.title, **found})
    save('accelerator', measured, out)
    print(text({'device': measured['device'], 'title': part.title, **found}), flush=True)


def timed(part: Part) -> dict[str, Any]:
  """Return the rows of a part, or its error, and the seconds that it took."""
  begin = time.perf_counter()
  try:
    found: dict[str, Any] = {'rows': filled(part.measure())}
  except Exception as error:  # compilers and devices raise errors of any type, and the next part may work
    traceback.print_exc()
    found = {'error': failure(error)}
  return found | {'seconds': round(time.perf_counter() - begin, 1)}


def text(part: dict[str, Any]) -> str:
  """Return the text to print for a part."""
  if 'rows' in part:
    return f'{format_report(part)}\n'
  return f'{part["title"]}: ' + (f'skipped {part["skipped"]}' if 'skipped' in part else part['error']) + '\n'


def correctness_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Yield a part for each operator: the errors of its fast implementations.

  Pallas comes last, because a crash may leave the device unusable. On a GPU it is left out.
  """
  tokens, heads = options.tokens, options.head_sizes
  groups = {
    'attention': correctness.attention_cases(heads, tokens),
    'linear attention': correctness.linear_cases(heads[0], tokens[-1]),
    'stage 2 in blocks': correctness.stage2_cases('xla', options.width, tokens, options.centers),
  }
  if runs_pallas():
    groups['stage 2 by Pallas'] = correctness.stage2_cases('pallas', options.width, tokens, options.centers)
  for name, cases in groups.items():
    case_list = list(cases)
    title = f'Relative errors against float64: {name}'
    yield Part(title, len(DTYPES) * len(case_list), functools.partial(correctness.check, case_list))


def runs_pallas() -> bool:
  """Return True if the device can run the Pallas kernels."""
  return jax.default_backend() in PALLAS_PLATFORMS


def step_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Yield a part for each width: the times of train steps, and their speed relative to a matrix product."""
  models = [model for model in MODELS if runs_pallas() or not model.endswith(':pallas')]
  for width, batch in options.cases:
    choose('width', str(width), {str(known): known for known in step.HEADS['memo']})
    title = f'Train step, width {width}, {STEP_DTYPE}'
    yield Part(title, len(models), functools.partial(steps, models, width, batch, options.rounds))


def steps(models: Sequence[str], width: int, batch: int, rounds: int) -> Rows:
  """Return a row with the time of a train step for each model. If a model does not compile, its row has the error."""
  trainers, failed = {}, []
  for model, program in step.compile_all(models, width, batch, STEP_DTYPE).items():
    try:
      trainers[model] = program.result()
    except Exception as error:  # compilers raise errors of any type
      failed.append({'model': model, 'width': width, 'batch': batch, 'error': failure(error)})
  rows = step.measure(trainers, width, batch, STEP_DTYPE, rounds) if trainers else []
  for row in rows:
    row['kernel'] = correctness.kernel_of(trainers[row['model']].step.as_text())
  return rows + failed


def recipe_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Yield a part for each recipe: HyperBF's images/s in training, and the hours of 100 epochs of CIFAR."""
  for name in options.recipes.split(','):
    configs = [training(name, dtype) for dtype in DTYPES]
    yield Part(f'Recipe {name} of HyperBF', len(configs), functools.partial(recipe, configs, options.seconds))


def recipe(configs: Sequence[ConfigDict], seconds: float) -> Rows:
  """Return a row for each config with its images/s in training. The configs differ only in `model.dtype`."""
  source = input_benchmark.open_source('cifar10', '')

  def measure(config: ConfigDict) -> dict[str, Any]:
    (row,) = input_benchmark.measure(config, source, ('device',), seconds, rounds=1)
    speed = 1e3 * row['batch'] / row['step ms']
    hours = EPOCHS * EXAMPLES / speed / 3600
    return {key: row[key] for key in ('batch', 'step ms')} | {'images/s': speed, f'{EPOCHS} epochs, hours': hours}

  return [attempt({'dtype': config.model.dtype}, functools.partial(measure, config)) for config in configs]


def training(recipe: str, dtype: str) -> ConfigDict:
  """Return the config of HyperBF on CIFAR-10 with this recipe and this type of activations."""
  config = resolve(make_config(f'model=hyperbf,recipe={recipe}', {'name': 'cifar10'})).unlock()
  config.model.dtype = dtype
  return config


def input_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Yield one part: the share of the time that training waits for images, in device memory or from a stream."""
  name = options.recipes.split(',')[-1]
  title = f'Input of HyperBF, recipe {name}, {STEP_DTYPE}'
  yield Part(title, len(INPUTS), functools.partial(inputs, training(name, STEP_DTYPE), options.seconds))


def inputs(config: ConfigDict, seconds: float) -> Rows:
  """Return a row for input in device memory and one for a stream, each with the time that training waits for it."""
  source = input_benchmark.open_source('cifar10', '')

  def measure(kind: str) -> dict[str, Any]:
    (row,) = input_benchmark.measure(config, source, (kind,), seconds, rounds=1)
    return row

  return [attempt({'input': kind}, functools.partial(measure, kind)) for kind in INPUTS]


def resume_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Yield one part: the difference between an interrupted run and an uninterrupted one, on all devices."""
  name = options.recipes.split(',')[-1]
  configs = [resolve(digits.get_config(f'model=hyperbf,recipe={name}')) for _ in DTYPES]
  for config, dtype in zip(configs, DTYPES, strict=True):
    changes = {'train.epochs': 2.0, 'log.every': '5steps', 'evaluate.every': '1epoch', 'checkpoint.every': '1epoch'}
    config.update_from_flattened_dict({'model.dtype': dtype, **changes})
  title = f'HyperBF, recipe {name}, two epochs of digits: parameters against those of a whole run'
  yield Part(title, len(configs) * len(RUNS), functools.partial(resumed, configs))


def resumed(configs: Sequence[ConfigDict]) -> Rows:
  """Return the rows of `compare_runs` for each config."""
  with tempfile.TemporaryDirectory() as folder:
    return [row for config in configs for row in compare_runs(config, pathlib.Path(folder))]


def compare_runs(config: ConfigDict, folder: pathlib.Path) -> Rows:
  """Train the same config three times, once with an interruption. Return two rows of differences.

  The rows compare the parameters of a repeated run and of an interrupted run with those of the first run. The
  repeated run shows if the device is deterministic.
  """
  config.data.dir, dtype = str(folder), config.model.dtype
  whole, again, parts = (folder / f'{name}-{dtype}' for name in RUNS)
  for workdir in (whole, again):
    train(config, workdir, Console(file=io.StringIO()))
  if train(config, parts, Console(file=Interrupting())) is not None:
    raise RuntimeError('the run was not interrupted')
  stopped = Checkpoints(parts / 'checkpoints', read_only=True).latest
  train(config, parts, Console(file=io.StringIO()))
  expected, *found = (jax.device_get(jax.tree.leaves(restore(w, 'latest').params)) for w in (whole, again, parts))
  names = ('again', f'interrupted after step {stopped}')
  return [{'dtype': dtype, 'run': name, **difference(z, expected)} for name, z in zip(names, found, strict=True)]


class Interrupting(io.StringIO):
  """An output stream that interrupts a run at its first report, like Ctrl-C."""

  def write(self, text: str) -> int:
    """Write text. At the first report, raise SIGINT."""
    if text.startswith('step ') and 'step ' not in self.getvalue():
      signal.raise_signal(signal.SIGINT)
    return super().write(text)


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> dict[str, Any]:
  """Return the largest difference between two lists of arrays, and if they are equal bit for bit."""
  largest = float(np.max([np.abs(a - b).max() for a, b in zip(found, expected, strict=True)]))  # NaN counts
  return {'largest difference': largest, 'bit for bit': 'no' if largest else 'yes'}


PARTS = {
  'correctness': correctness_parts,
  'step': step_parts,
  'recipe': recipe_parts,
  'input': input_parts,
  'resume': resume_parts,
}

if __name__ == '__main__':
  launch(main)
