"""Growth of time and memory: of stage 1 with the tokens, of stage 2 with its units, of a step with its sizes.

python -m benchmarks.growth
python -m benchmarks.growth --parts stage1 --lengths 64,4096 --width 768

Stages run forward and backward on the same total number of tokens for every length. The last columns are exponents p
between a size and the one before: p = 1 if twice the size takes twice as much.
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.common import Thunk, alternate, checked, compiled, launch, names, numbers, parser, positive, report
from benchmarks.models import make_trainer
from hbf.nn.registry import make_stages, stage_names, stage_options
from hbf.training.machine import keep_freed_memory

SIZES = {'lengths': '64,256,1024,4096', 'units': '256,1024,8192', 'batches': '8,32', 'depths': '1,2,4'}


class Case(NamedTuple):
  """A measurement of one size in a series, such as one stage 1 at several numbers of tokens.

  Attributes:
    series: name of the series.
    varied: name of the size that differs within the series.
    size: value of this size.
    thunk: call to measure.
    temporary_bytes: temporary memory of the call.
  """

  series: str
  varied: str
  size: int
  thunk: Thunk
  temporary_bytes: int


def main() -> None:
  """Print a row for every part, model and size."""
  flags = parser(__doc__)
  flags.set_defaults(rounds=3)
  flags.add_argument('--parts', default=','.join(PARTS), type=names('part', PARTS))
  flags.add_argument(
    '--models', default='hyperbf,vit', type=checked(stage_names), help='models, also for their stages'
  )
  for name, sizes in SIZES.items():
    flags.add_argument(f'--{name}', default=sizes, type=numbers)
  flags.add_argument('--tokens', type=positive, default=4096, help='total tokens of stage 1; stage 2 takes a quarter')
  flags.add_argument('--width', type=positive, default=192, help='width of the tokens')
  flags.add_argument('--heads', type=positive, default=3)
  options = flags.parse_args()
  uneven = [str(length) for length in options.lengths if options.tokens % length]
  if 'stage1' in options.parts and uneven:
    flags.error(
      f'--tokens {options.tokens} is not a multiple of --lengths {", ".join(uneven)}, so times do not compare'
    )
  keep_freed_memory()
  rows = []
  for part in options.parts:
    rows += measure(list(PARTS[part](options)), options.rounds)
  report('growth', f'Growth, width {options.width}, {options.heads} heads, float32', rows, options.out)


def stage1(options: argparse.Namespace) -> Iterator[Case]:
  """Yield a case for each stage 1 and each number of tokens in an image."""
  for name in dict.fromkeys(stage_names(model)[0] for model in options.models):
    for length in options.lengths:
      module = make_stage1(name, options.heads, options.width)
      call = stage(module, (options.tokens // length, length, options.width))
      yield Case(f'stage 1, {name}', 'tokens', length, *call)


def make_stage1(name: str, heads: int, width: int) -> nn.Module:
  """Return a stage 1 with its default options for tokens of this width."""
  model = f'{name}+none'
  return make_stages(model, heads, *stage_options(model, 4 * width))[0]()


def stage2(options: argparse.Namespace) -> Iterator[Case]:
  """Yield a case for each stage 2 and each number of centers or hidden units."""
  for name in dict.fromkeys(stage_names(model)[1] for model in options.models):
    for units in options.units:
      model = f'identity+{name}'
      make = make_stages(model, 0, *stage_options(model, units))[1]
      if make is None:
        continue
      call = stage(make(), (1, options.tokens // 4, options.width))
      yield Case(f'stage 2, {name}', 'units', units, *call)


def steps(options: argparse.Namespace) -> Iterator[Case]:
  """Yield cases of whole train steps: each batch size at the greatest depth, and each depth at the least batch."""
  width, batch, depth = options.width, min(options.batches), max(options.depths)
  for model in options.models:
    sizes = [('batch', b, depth) for b in options.batches] + [('depth', batch, d) for d in options.depths]
    trainers = {(b, d): make_trainer(model, width, d, options.heads, 4 * width, b) for _, b, d in sizes}
    for varied, b, d in sizes:
      trainer = trainers[b, d]
      yield Case(f'train step, {model}', varied, b if varied == 'batch' else d, trainer, trainer.temporary_bytes)


def stage(module: nn.Module, shape: tuple[int, int, int]) -> tuple[Thunk, int]:
  """Return a thunk that runs a stage forward and backward on random tokens [B, N, D], and its temporary memory."""
  tokens = jax.random.normal(jax.random.key(0), shape)
  params = jax.jit(module.init)(jax.random.key(1), tokens[:1])

  def loss(params: Any, tokens: jax.Array) -> jax.Array:
    out: Any = module.apply(params, tokens)
    return jnp.sum(jnp.square(out))

  return compiled(jax.grad(loss, (0, 1)), params, tokens)


PARTS = {'stage1': stage1, 'stage2': stage2, 'step': steps}


def measure(cases: list[Case], rounds: int) -> list[dict[str, Any]]:
  """Return the rows of one part. All its cases run in turn."""
  seconds = alternate({f'{case.series} {case.varied} {case.size}': case.thunk for case in cases}, rounds)
  rows: list[dict[str, Any]] = []
  before: tuple[Case, float] | None = None
  for case, times in zip(cases, seconds.values(), strict=True):
    time = statistics.median(times)
    row = {'part': case.series, 'of': case.varied, 'size': case.size, 'ms': 1e3 * time}
    row |= {'temporary MB': case.temporary_bytes / 1e6, 'time ~': '', 'memory ~': ''}
    if before and before[0][:2] == case[:2]:
      factor = math.log(case.size / before[0].size)
      row['time ~'] = f'{math.log(time / before[1]) / factor:.2f}'
      if before[0].temporary_bytes and case.temporary_bytes:  # stage identity needs no memory
        row['memory ~'] = f'{math.log(case.temporary_bytes / before[0].temporary_bytes) / factor:.2f}'
    rows.append(row)
    before = case, time
  return rows


if __name__ == '__main__':
  launch(main)
