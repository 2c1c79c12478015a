"""Train steps of HyperBF against ViT with equal parameters, and against the machine's matrix products.

python -m benchmarks.step                                         # widths 192 and 768, float32
python -m benchmarks.step --recipe laptop --cases 64x256,192x128 --models hyperbf,vit-gelu
python -m benchmarks.step --models hyperbf,vit,hyperbf+mlp --dtype bfloat16 --cases 768x1024
python -m benchmarks.step --models hyperbf:pallas,hyperbf

A model is a name of a config, and after it may follow -ACTIVATION of the MLP in a ViT, or :IMPLEMENTATION of stage 2.
The implementation pallas is for TPUs.
"""

import statistics
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import jax

from benchmarks.common import THREADS, alternate, launch, matmul, parser, ratios, report, spread
from benchmarks.models import Trainer, make_trainer
from hbf.models.build import DTYPES
from hbf.training.machine import keep_freed_memory

HEADS = {'memo': {64: 4, 192: 3, 384: 6, 768: 4}, 'laptop': {64: 8, 192: 8}}  # heads of stage 1 by recipe and width
DEPTH = 4
# Side of the square product that gives the machine's rate. On an accelerator it is large, because a small product
# ends before the next one is dispatched.
MATMUL_CPU, MATMUL = 2048, 16384


def main() -> None:
  """Print a row for every case and model."""
  flags = parser(__doc__)
  flags.add_argument('--models', default='hyperbf,vit', help='ratios are to the last')
  flags.add_argument('--recipe', default='memo', choices=HEADS, help='sets the options of the models')
  flags.add_argument('--cases', default='192x128,768x32', help='WIDTHxBATCH, …')
  flags.add_argument('--patch', type=int, default=4, choices=(2, 4, 8, 16), help='side of a patch')
  flags.add_argument('--dtype', default='float32', choices=DTYPES)
  options = flags.parse_args()
  cases, known = [[*map(int, case.split('x'))] for case in options.cases.split(',')], HEADS[options.recipe]
  if unknown := [width for width, _ in cases if width not in known]:
    flags.error(f'--cases: width {unknown[0]} with recipe {options.recipe}: use one of {", ".join(map(str, known))}')
  keep_freed_memory()
  rows = []
  for width, batch in cases:
    programs = compile_all(options.models.split(','), width, batch, options.dtype, options.recipe, options.patch)
    trainers = {name: program.result() for name, program in programs.items()}
    rows += measure(trainers, width, batch, options.dtype, options.rounds)
  sizes = f'{DEPTH} blocks, 32×32 images, patch {options.patch}, {options.dtype}'
  report('step', f'Train step, recipe {options.recipe}, {sizes}', rows, options.out)


def compile_all(
  models: Sequence[str], width: int, batch: int, dtype: str, recipe: str = 'memo', patch: int = 4
) -> dict[str, futures.Future[Trainer]]:
  """Return a future of each model's trainer.

  The programs compile at the same time, because a GPU's compiler takes minutes.
  """
  with futures.ThreadPoolExecutor(THREADS) as pool:
    return {model: pool.submit(make, model, width, batch, dtype, recipe, patch) for model in models}


def make(model: str, width: int, batch: int, dtype: str, recipe: str, patch: int) -> Trainer:
  """Return a model of this width in training. It may be 'vit-ACTIVATION' or 'hyperbf:IMPLEMENTATION'."""
  model, _, implementation = model.partition(':')
  name, _, activation = model.partition('-')
  stage2 = {'implementation': implementation, 'activation': activation}
  keys = {key: value for key, value in stage2.items() if value}
  hidden = 2 * width if width == 768 else 4 * width  # 768 as in recipe memo
  heads = HEADS[recipe][width]
  return make_trainer(name, width, DEPTH, heads, hidden, batch, recipe, patch=patch, dtype=dtype, stage2=keys)


def measure(trainers: Mapping[str, Trainer], width: int, batch: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
  """Return the rows of one width and batch. Models and a matrix product run in turn. Ratios are to the last model."""
  side = MATMUL_CPU if jax.default_backend() == 'cpu' else MATMUL
  product, product_flops = matmul(side, DTYPES[dtype])
  seconds = alternate({**trainers, 'matmul': product}, rounds)
  last = [*trainers][-1]
  rate = [product_flops / s for s in seconds['matmul']]
  rows = []
  for name, trainer in trainers.items():
    rows.append(
      {
        'model': name,
        'width': width,
        'batch': batch,
        'parameters': trainer.parameters,
        'step, ms': 1e3 * statistics.median(seconds[name]),
        'images/s': batch / statistics.median(seconds[name]),
        f'time / {last}': spread(ratios(seconds[name], seconds[last])),
        'of matmul rate': spread([trainer.flops / s / r for s, r in zip(seconds[name], rate, strict=True)]),
        'matmul, GFLOP/s': statistics.median(rate) / 1e9,
        'temporary MB': trainer.temporary_bytes / 1e6,
      }
    )
  return rows


if __name__ == '__main__':
  launch(main)
