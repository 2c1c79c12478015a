"""Train steps that compute a batch in parts (`train.accumulate`), against steps that compute it as a whole.

taskset -c 0 python -m benchmarks.batch_parts                     # one core: ViT and model positional, recipe laptop
taskset -c 0 python -m benchmarks.batch_parts --patch 2 --parts 1,8,16,32,64
taskset -c 0 python -m benchmarks.batch_parts --configs cifar10:model=vit,recipe=memo --batch 32 --parts 1,2,8
"""

import statistics
from typing import Any

from benchmarks.common import alternate, launch, numbers, parser, positive, ratios, report, spread
from benchmarks.models import CIFAR, compile_trainer
from hbf.config.datasets import get_config
from hbf.config.resolve import resolve
from hbf.training.machine import keep_freed_memory


def main() -> None:
  """Print a row for every config and number of parts."""
  flags = parser(__doc__)
  flags.add_argument(
    '--configs',
    nargs='+',
    default=['cifar10:model=vit,recipe=laptop', 'cifar10:model=positional,recipe=laptop'],
    help='NAME[:arguments]',
  )
  flags.add_argument('--patch', type=int, default=4, choices=(2, 4, 8, 16), help='side of a patch')
  flags.add_argument('--batch', type=positive, default=256, help='images in a step')
  flags.add_argument('--parts', type=numbers, default='1,4,8,16,32', help='ratios are to the first')
  options = flags.parse_args()
  if wrong := [parts for parts in options.parts if options.batch % parts]:
    flags.error(f'--parts: {wrong[0]} does not divide the batch of {options.batch} images')
  keep_freed_memory()
  rows = [row for name in options.configs for row in measure(name, options)]
  report('batch-parts', f'Train step in parts, 32×32 images, patch {options.patch}', rows, options.out)


def measure(name: str, options: Any) -> list[dict[str, Any]]:
  """Return the rows of a config. Its steps run in turn, and ratios are to the first number of parts."""
  trainers = {}
  for parts in options.parts:
    config = get_config(name).unlock()
    config.model.patch, config.train.accumulate = options.patch, parts
    trainers[parts] = compile_trainer(resolve(config), CIFAR, options.batch)
  seconds = alternate(trainers, options.rounds)
  whole = seconds[options.parts[0]]
  return [
    {
      'config': name,
      'parts': parts,
      'images in a part': options.batch // parts,
      'images/s': options.batch / statistics.median(seconds[parts]),
      'time / first': spread(ratios(seconds[parts], whole)),
      'temporary MB': trainer.temporary_bytes / 1e6,
    }
    for parts, trainer in trainers.items()
  ]


if __name__ == '__main__':
  launch(main)
