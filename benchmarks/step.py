"""Train steps: HyperBF against ViT at matched parameters, and against the machine's own matrix products.

python -m benchmarks.step                                         # widths 192 and 768, float32
python -m benchmarks.step --models hyperbf,vit,hyperbf+mlp --dtype bfloat16 --cases 768x1024
"""

import statistics
from typing import Any

from benchmarks.common import alternate, matmul, parser, ratios, report, spread
from benchmarks.models import make_trainer
from hbf.models.build import DTYPES
from hbf.training.machine import keep_freed_memory

HEADS = {64: 4, 192: 3, 384: 6, 768: 4}  # of 64 dimensions, but for recipe memo's 768
DEPTH = 4
MATMUL = 2048  # side of the square product that stands for the machine's rate


def main() -> None:
  """Prints a row for every case and model."""
  flags = parser(__doc__)
  flags.add_argument('--models', default='hyperbf,vit', help='ratios are to the last')
  flags.add_argument('--cases', default='192x128,768x32', help='WIDTHxBATCH, …')
  flags.add_argument('--dtype', default='float32', choices=DTYPES)
  options = flags.parse_args()
  keep_freed_memory()
  rows = []
  for case in options.cases.split(','):
    width, batch = map(int, case.split('x'))
    rows += measure(options.models.split(','), width, batch, options.dtype, options.rounds)
  report('step', f'Train step, {DEPTH} blocks, 32×32 images, patch 4, {options.dtype}', rows, options.out)


def measure(models: list[str], width: int, batch: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
  """Rows of one width and batch: all models and a matrix product, in turn."""
  hidden = 2 * width if width == 768 else 4 * width  # recipe memo's, else the usual
  trainers = {name: make_trainer(name, width, DEPTH, HEADS[width], hidden, batch, dtype=dtype) for name in models}
  product, product_flops = matmul(MATMUL, DTYPES[dtype])
  seconds = alternate({**trainers, 'matmul': product}, rounds)
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
        f'time / {models[-1]}': spread(ratios(seconds[name], seconds[models[-1]])),
        'of matmul rate': spread([trainer.flops / s / r for s, r in zip(seconds[name], rate, strict=True)]),
        'matmul, GFLOP/s': statistics.median(rate) / 1e9,
        'temporary MB': trainer.temporary_bytes / 1e6,
      }
    )
  return rows


if __name__ == '__main__':
  main()
