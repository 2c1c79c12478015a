"""Measurement of attacks: the accuracy after APGD and the Square Attack, for several bounds on a pixel's change.

python -m hbf.analysis.attack_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.attack_study --report       # draws the table and the picture again, from stored numbers

A bound is a number of levels: a pixel has a value from 0 to 255, and an attack changes it by at most so many levels.
The result of an attack is stored when the attack ends. A second call makes only the attacks that are not stored.

docs/research/outliers.md explains the results.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from hbf.analysis.attacks import Attacked, apgd, square
from hbf.analysis.image_run import ImageRun
from hbf.analysis.report.attack_report import draw, table
from hbf.analysis.study import Record, Study, check_folder_names, data_of
from hbf.data.augment.batches import normalize
from hbf.errors import UserError, in_one_line

# Each attack, and the greatest change of a pixel in levels of 255. 8 levels show whether APGD can fool the network on
# every image. If it cannot, gradients may be masked (Carlini et al. 2019).
ATTACKS = (('APGD', 1), ('APGD', 2), ('APGD', 8), ('Square', 1), ('Square', 2))


IMAGES = 1_000  # number of images that every attack changes
# Greatest number of steps for an image. In a step of the Square Attack, the network runs once.
STEPS = {'APGD': 100, 'Square': 1_000}


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
  images: int,
  steps: Mapping[str, int],
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
    images: number of test images. All attacks change the same images.
    steps: the greatest number of steps for an image, by the name of the attack.

  Raises:
    UserError: the stored rows have another number of images or of steps.
  """
  chosen, labels = run.read('test', images)
  _check_sizes(stored, len(chosen), steps)
  pixels, logits = chosen.astype(np.float32) / 255, logits_of(run)
  right = run.logits(chosen).argmax(axis=-1) == labels
  for name, levels in ATTACKS:
    size = {'images': len(pixels), 'right': int(right.sum())}
    key = run.about() | size | {'attack': name, 'levels': levels, 'steps': steps[name]}
    if any(key.items() <= row.items() for row in stored):
      continue
    start = time.monotonic()
    attack = apgd if name == 'APGD' else square
    found = attack(logits, pixels, labels, levels / 255, steps[name])
    save(key | _numbers(found) | {'seconds': round(time.monotonic() - start, 1)})


def _check_sizes(stored: Sequence[Mapping[str, Any]], images: int, steps: Mapping[str, int]) -> None:
  """Raise UserError if stored rows have other sizes. One table compares only attacks of one size."""
  for row in stored:
    name, size = row['attack'], (row['images'], row['steps'])
    if size != (images, steps[name]):
      raise UserError(
        f'the stored numbers of {name} are for {size[0]:,} images with {size[1]:,} steps, not for {images:,} images '
        f'with {steps[name]:,} steps: give another --out, or the same sizes'
      )


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


def _measure_all(folders: Sequence[pathlib.Path], images: int, steps: Mapping[str, int], record: Record) -> None:
  """Attack the networks of all runs with the attacks whose results are not stored."""
  check_folder_names(folders)
  data = data_of(folders, record)
  runs = [ImageRun.of(folder) for folder in folders]
  measured = record.stored or data | {'rows': []}
  for run in runs:
    measure(run, measured['rows'], functools.partial(_save, record, measured), images, steps)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('attacks', draw, table, folder='runs/outliers')
  parser = study.parser('hbf.analysis.attack_study', __doc__, 'a run folder; may be repeated')
  parser.add_count('--images', 2, IMAGES, 'most test images to attack. Intervals are over images')
  parser.add_count('--apgd_steps', 1, STEPS['APGD'], 'most steps of APGD for an image')
  parser.add_count('--square_steps', 1, STEPS['Square'], 'most steps of Square for an image')
  flags = parser.parse_args(arguments)
  steps = {'APGD': flags.apgd_steps, 'Square': flags.square_steps}
  return study.run(flags, functools.partial(_measure_all, flags.run, flags.images, steps))


if __name__ == '__main__':
  sys.exit(main())
