"""The cost of augmentation: a train step with augmentation, against the same step without.

python -m benchmarks.augmentation                                        # recipe small, the most expensive transforms
python -m benchmarks.augmentation --config configs/cifar10.py:recipe=strong --transforms= --mix=  # the config's
"""

import ast
import statistics

from benchmarks.common import alternate, launch, parser, ratios, report, spread
from benchmarks.models import Trainer, compile_trainer
from hbf.config.command_line import read_config
from hbf.training.machine import keep_freed_memory

TRANSFORMS = "(('flip',), ('shift', 4), ('rand_augment', 2, 9), ('erase', 0.25))"
MIX = "(('mixup', 0.8, 0.5), ('cutmix', 1.0, 0.5))"


def main() -> None:
  """Print a row for each of the two steps, which run in turn."""
  flags = parser(__doc__)
  flags.add_argument('--config', default='configs/cifar10.py:recipe=small', help='FILE[:arguments]')
  flags.add_argument('--transforms', default=TRANSFORMS, help="data.transforms; empty: the config's")
  flags.add_argument('--mix', default=MIX, help="data.mix; empty: the config's")
  flags.add_argument('--image-size', type=int, default=32)
  options = flags.parse_args()
  keep_freed_memory()
  given = {'transforms': options.transforms, 'mix': options.mix}
  augmented = {key: ast.literal_eval(value) for key, value in given.items() if value}
  trainers = {
    'all': make(options.config, options.image_size, augmented),
    'none': make(options.config, options.image_size, {'transforms': (), 'mix': ()}),
  }
  seconds = alternate(trainers, options.rounds)
  rows = []
  for name, trainer in trainers.items():
    batch = len(trainer.batch['index'])
    rows.append(
      {
        'augmentation': name,
        'batch': batch,
        'step, ms': 1e3 * statistics.median(seconds[name]),
        'images/s': batch / statistics.median(seconds[name]),
        'time / none': spread(ratios(seconds[name], seconds['none'])),
        'compile, s': trainer.compile_seconds,
      }
    )
  side = options.image_size
  title = f'Train step of {options.config}, {side}×{side} images, with augmentation ({augmented})'
  report('augmentation', title, rows, options.out)


def make(config: str, image_size: int, data: dict[str, tuple]) -> Trainer:
  """Return a trainer for a config, such as configs/cifar10.py:recipe=strong, with new values of its `data` keys.

  Images have `image_size` rows and columns.
  """
  made = read_config([f'--config={config}'])
  made.data.update(data)
  return compile_trainer(made, (image_size, image_size, 3), made.train.batch_size)


if __name__ == '__main__':
  launch(main)
