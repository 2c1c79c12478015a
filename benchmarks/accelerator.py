"""All that one wants to know first of a GPU or TPU, in ten minutes.

python -m benchmarks.accelerator
python -m benchmarks.accelerator --cases 192x1024,384x512,768x256 --minutes 20     # a device with less memory
python -m benchmarks.accelerator --parts resume --recipes small

In this order: errors of every fast form against float64 on the host, forward and backward, in float32 and bfloat16;
train steps of HyperBF, with both forms of stage 2, and ViT; the recipes' images/s as train.py reaches them; what of
that time is spent waiting for input; and how far an interrupted run ends from one that wasn't. The JSON file is
written after every part; a part for which too little time is left is skipped, and one that fails says why.
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
from benchmarks.common import attempt, failure, filled, measured_on, parser, save, shown
from configs import digits
from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError, choose
from hbf.models.build import DTYPES
from hbf.training.checkpoints import Checkpoints
from hbf.training.evaluate import restore
from hbf.training.loop import train
from hbf.training.machine import keep_compiled_programs, keep_freed_memory

Rows = list[dict[str, Any]]

MODELS = ('hyperbf', 'hyperbf:pallas', 'vit')  # of the train steps
STEP_DTYPE = 'bfloat16'
EPOCHS, EXAMPLES = 100, 50_000  # of recipe memo on CIFAR
INPUTS = ('device', 'stream')
RUNS = ('whole', 'again', 'interrupted')  # names of workdirs


@dataclasses.dataclass(frozen=True)
class Part:
  """A table.

  Attributes:
    title: of the table.
    programs: that are compiled for it, by which its time is estimated.
    measure: its rows.
  """

  title: str
  programs: int
  measure: Callable[[], Rows]


def main() -> None:
  """Prints a table for every part."""
  flags = parser(__doc__)
  flags.add_argument('--minutes', type=float, default=10.0, help='in which all has to be done')
  flags.add_argument('--parts', default=','.join(PARTS))
  flags.add_argument('--tokens', default='256,257', type=numbers, help='of the operators that are checked')
  flags.add_argument('--centers', default='500,8192', type=numbers, help='of stage 2 that is checked')
  flags.add_argument('--width', default=192, type=int, help='of the tokens of stage 2 that is checked')
  flags.add_argument('--head-sizes', default='64,192', type=numbers, help='of the attention that is checked')
  flags.add_argument(
    '--cases', default='192x4096,384x2048,768x1024', type=pairs, help='WIDTHxBATCH, … of train steps'
  )
  flags.add_argument('--recipes', default='memo,small', help='the last one is also fed and interrupted')
  flags.add_argument('--seconds', type=float, default=3.0, help='of each measurement of recipes and input')
  options = flags.parse_args()
  try:
    correctness.host()
    parts = [part for name in options.parts.split(',') for part in choose('part', name, PARTS)(options)]
  except UserError as error:
    sys.exit(str(error))
  logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
  keep_freed_memory()
  keep_compiled_programs()
  run(parts, 60 * options.minutes, options.out)


def numbers(text: str) -> list[int]:
  """Of a flag."""
  return [int(part) for part in text.split(',')]


def pairs(text: str) -> list[tuple[int, int]]:
  """Of numbers with an x between them, of a flag."""
  return [(int(first), int(second)) for first, second in (part.split('x') for part in text.split(','))]


def run(parts: Sequence[Part], seconds: float, out: pathlib.Path | None) -> None:
  """Measures what there is time for, and prints and writes it part by part.

  A program is expected to take as long as those of the slowest part before it.
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
  """The part's rows, or why there are none, and the seconds that took."""
  begin = time.perf_counter()
  try:
    found: dict[str, Any] = {'rows': filled(part.measure())}
  except Exception as error:  # compilers and devices raise whatever they like, and the next part may work
    traceback.print_exc()
    found = {'error': failure(error)}
  return found | {'seconds': round(time.perf_counter() - begin, 1)}


def text(part: dict[str, Any]) -> str:
  """What is printed of a part."""
  if 'rows' in part:
    return f'{shown(part)}\n'
  return f'{part["title"]}: ' + (f'skipped {part["skipped"]}' if 'skipped' in part else part['error']) + '\n'


def correctness_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Errors of every fast form. The Pallas kernel comes last: one that crashes may leave the device unusable."""
  tokens, heads = options.tokens, options.head_sizes
  groups = {
    'attention': correctness.attention_cases(heads, tokens),
    'linear attention': correctness.linear_cases(heads[0], tokens[-1]),
    'stage 2 in blocks': correctness.stage2_cases('xla', options.width, tokens, options.centers),
    'stage 2 by Pallas': correctness.stage2_cases('pallas', options.width, tokens, options.centers),
  }
  for name, cases in groups.items():
    known = list(cases)
    title = f'Relative errors against float64: {name}'
    yield Part(title, len(DTYPES) * len(known), functools.partial(correctness.check, known))


def step_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Time and share of the matrix rate of train steps, width by width."""
  for width, batch in options.cases:
    choose('width', str(width), {str(known): known for known in step.HEADS})
    title = f'Train step, width {width}, {STEP_DTYPE}'
    yield Part(title, len(MODELS), functools.partial(steps, width, batch, options.rounds))


def steps(width: int, batch: int, rounds: int) -> Rows:
  """Rows of all models that compile, and why the others don't."""
  trainers, failed = {}, []
  for model in MODELS:
    try:
      trainers[model] = step.make(model, width, batch, STEP_DTYPE)
    except Exception as error:  # compilers raise whatever they like
      failed.append({'model': model, 'width': width, 'batch': batch, 'error': failure(error)})
  rows = step.measure(trainers, width, batch, STEP_DTYPE, rounds) if trainers else []
  for row in rows:
    row['kernel'] = correctness.kernel_of(trainers[row['model']].step.as_text())
  return rows + failed


def recipe_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Images a second of HyperBF as train.py trains it, and what that means for a whole training."""
  for name in options.recipes.split(','):
    configs = [training(name, dtype) for dtype in DTYPES]
    yield Part(f'Recipe {name} of HyperBF', len(configs), functools.partial(recipe, configs, options.seconds))


def recipe(configs: Sequence[ConfigDict], seconds: float) -> Rows:
  """Rows of both types."""
  source = input_benchmark.open_source('cifar10', '')

  def measure(config: ConfigDict) -> dict[str, Any]:
    (row,) = input_benchmark.measure(config, source, ('device',), seconds, rounds=1)
    speed = 1e3 * row['batch'] / row['step ms']
    hours = EPOCHS * EXAMPLES / speed / 3600
    return {key: row[key] for key in ('batch', 'step ms')} | {'images/s': speed, f'{EPOCHS} epochs, hours': hours}

  return [attempt({'dtype': config.model.dtype}, functools.partial(measure, config)) for config in configs]


def training(recipe: str, dtype: str) -> ConfigDict:
  """The config of HyperBF on CIFAR-10."""
  config = resolve(make_config(f'model=hyperbf,recipe={recipe}', {'name': 'cifar10'})).unlock()
  config.model.dtype = dtype
  return config


def input_parts(options: argparse.Namespace) -> Iterator[Part]:
  """What share of the time training waits for images in device memory, and for a stream of them."""
  name = options.recipes.split(',')[-1]
  title = f'Input of HyperBF, recipe {name}, {STEP_DTYPE}'
  yield Part(title, len(INPUTS), functools.partial(inputs, training(name, STEP_DTYPE), options.seconds))


def inputs(config: ConfigDict, seconds: float) -> Rows:
  """Rows of both kinds of input."""
  source = input_benchmark.open_source('cifar10', '')

  def measure(kind: str) -> dict[str, Any]:
    (row,) = input_benchmark.measure(config, source, (kind,), seconds, rounds=1)
    return row

  return [attempt({'input': kind}, functools.partial(measure, kind)) for kind in INPUTS]


def resume_parts(options: argparse.Namespace) -> Iterator[Part]:
  """Whether a run that is interrupted and goes on ends as one that isn't, on all devices."""
  name = options.recipes.split(',')[-1]
  configs = [resolve(digits.get_config(f'model=hyperbf,recipe={name}')) for _ in DTYPES]
  for config, dtype in zip(configs, DTYPES, strict=True):
    changes = {'train.epochs': 2.0, 'log.every': '5steps', 'evaluate.every': '1epoch', 'checkpoint.every': '1epoch'}
    config.update_from_flattened_dict({'model.dtype': dtype, **changes})
  title = f'HyperBF, recipe {name}, two epochs of digits: parameters against those of a whole run'
  yield Part(title, len(configs) * len(RUNS), functools.partial(resumed, configs))


def resumed(configs: Sequence[ConfigDict]) -> Rows:
  """Rows of both types."""
  with tempfile.TemporaryDirectory() as folder:
    return [row for config in configs for row in compare_runs(config, pathlib.Path(folder))]


def compare_runs(config: ConfigDict, folder: pathlib.Path) -> Rows:
  """Rows of a run like the first, which shows how far the device repeats itself, and of one that is interrupted."""
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
  """Where a run prints; at its first report it is interrupted, as by Ctrl-C."""

  def write(self, text: str) -> int:
    """Takes what is printed."""
    if text.startswith('step ') and 'step ' not in self.getvalue():
      signal.raise_signal(signal.SIGINT)
    return super().write(text)


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> dict[str, Any]:
  """Between two lists of arrays."""
  largest = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
  return {'largest difference': largest, 'bit for bit': 'no' if largest else 'yes'}


PARTS = {
  'correctness': correctness_parts,
  'step': step_parts,
  'recipe': recipe_parts,
  'input': input_parts,
  'resume': resume_parts,
}

if __name__ == '__main__':
  main()
