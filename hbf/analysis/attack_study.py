"""Measurement of attacks: the accuracy after APGD and the Square Attack, for several bounds on a pixel's change.

python -m hbf.analysis.attack_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.attack_study --report       # draws the table and the picture again, from stored numbers

A bound is a number of levels: a pixel has a value from 0 to 255, and an attack changes it by at most so many levels.
The result of an attack is stored when the attack ends. A second call makes only the attacks that are not stored.

docs/research/outliers.md explains the results.
"""

import argparse
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from hbf.analysis.attacks import Attacked, apgd, square
from hbf.analysis.image_run import ImageRun
from hbf.analysis.report.attack_report import draw, table
from hbf.analysis.study import Record, Study, check_folder_names, data_of
from hbf.data.augment.batches import normalize
from hbf.errors import in_one_line

# Each attack, and the greatest change of a pixel in levels of 255. 8 levels show whether APGD can fool the network on
# every image. If it cannot, gradients may be masked (Carlini et al. 2019).
ATTACKS = (('APGD', 1), ('APGD', 2), ('APGD', 8), ('Square', 1), ('Square', 2))


class Effort(NamedTuple):
  """Size of an attack.

  Attributes:
    images: number of images to attack.
    steps: greatest number of steps for an image. In a step of the Square Attack, the network runs once.
  """

  images: int
  steps: int


EFFORTS = {'APGD': Effort(1_000, 100), 'Square': Effort(1_000, 1_000)}


def logits_of(run: ImageRun) -> Callable[[jax.Array], jax.Array]:
  """Return the run's network as a function of images with pixels from 0 to 1."""
  params, scale = run.params, (run.task.mean, run.task.std)

  def logits(images: jax.Array) -> jax.Array:
    return jnp.asarray(run.model.apply({'params': params}, normalize(255 * images, *scale), train=False))

  return logits


def measure(
  run: ImageRun,
  stored: Sequence[Mapping[str, Any]],
  save: Callable[[dict[str, Any]], None],
  efforts: Mapping[str, Effort],
) -> None:
  """Attack the network of a run with all attacks whose results are not stored.

  Args:
    run: the run.
    stored: the rows of attacks that were measured before.
    save: a function that stores a row, the result of an attack. In a row, `levels` is the greatest change of a pixel,
      on a scale from 0 to 255. `right` is the number of images with a right answer before the attack. `fooled` has a
      character for each image: 1 if the answer is wrong after the attack, else 0. `queries` is the number of changed
      images on which the network ran. `median_queries` is the median number of queries for an image that the attack
      fooled.
    efforts: the numbers of images and steps, by the name of the attack.
  """
  images, labels = run.read('test', max(effort.images for effort in efforts.values()))
  pixels, logits = images.astype(np.float32) / 255, logits_of(run)
  right = run.logits(images).argmax(axis=-1) == labels
  for name, levels in ATTACKS:
    first, steps = slice(efforts[name].images), efforts[name].steps
    size = {'images': len(pixels[first]), 'right': int(right[first].sum())}
    key = run.about() | size | {'attack': name, 'levels': levels, 'steps': steps}
    if any(key.items() <= row.items() for row in stored):
      continue
    start = time.monotonic()
    attack = apgd if name == 'APGD' else square
    found = attack(logits, pixels[first], labels[first], levels / 255, steps)
    save(key | _numbers(found) | {'seconds': round(time.monotonic() - start, 1)})


def _numbers(found: Attacked) -> dict[str, Any]:
  fooled = ''.join('01'[wrong] for wrong in found.fooled.astype(int))
  tried = found.fooled & (found.queries > 0)  # images with a right answer at first
  median = float(np.median(found.queries[tried])) if tried.any() else None
  return {'fooled': fooled, 'queries': int(found.queries.sum()), 'median_queries': median}


def _save(record: Record, measured: dict[str, Any], row: dict[str, Any]) -> None:
  measured['rows'].append(row)
  record.save(measured)
  left = 100 * row['fooled'].count('0') / row['images']
  logging.info('%s, %s, %d/255: %.1f%% right, %s s', row['run'], row['attack'], row['levels'], left, row['seconds'])


def images_and_steps(text: str) -> Effort:
  """Return the numbers of images and steps in a flag's value, such as '1000,100'.

  Raises:
    ValueError: the value is not two numbers.
    argparse.ArgumentTypeError: a number is too small.
  """
  images, steps = map(int, text.split(','))
  if images < 2 or steps < 1:
    raise argparse.ArgumentTypeError(f'{text} is too small: expected 2 images, for intervals, and 1 step')
  return Effort(images, steps)


def _measure_all(folders: Sequence[pathlib.Path], efforts: Mapping[str, Effort], record: Record) -> None:
  """Attack the networks of all runs with the attacks whose results are not stored."""
  check_folder_names(folders)
  data = data_of(folders, record)
  runs = [ImageRun.of(folder) for folder in folders]
  measured = record.stored or {'data': data, 'rows': []}
  for run in runs:
    measure(run, measured['rows'], functools.partial(_save, record, measured), efforts)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('attacks', draw, table, folder='runs/outliers')
  parser = study.parser('hbf.analysis.attack_study', __doc__, 'a run folder; may be repeated')
  form: dict[str, Any] = {'type': images_and_steps, 'metavar': 'IMAGES,STEPS'}
  about = 'test images and most steps of %s; default: %d,%d'
  parser.add_argument('--apgd', default=EFFORTS['APGD'], help=about % ('APGD', *EFFORTS['APGD']), **form)
  parser.add_argument('--square', default=EFFORTS['Square'], help=about % ('Square', *EFFORTS['Square']), **form)
  flags = parser.parse_args(arguments)
  efforts = {'APGD': flags.apgd, 'Square': flags.square}
  return study.run(flags, functools.partial(_measure_all, flags.run, efforts))


if __name__ == '__main__':
  sys.exit(main())
