"""Measurement of the accuracy on corrupted test images, for each corruption and strength.

python -m hbf.analysis.corruption_study --run=runs/claim/cifar10-hyperbf-0 --run=runs/claim/cifar10-vit-swiglu-0 …
python -m hbf.analysis.corruption_study --report   # draws the table and the picture again, from stored numbers

Give one run for each model and seed. The accuracies for a corruption are stored when they are measured. A second call
measures only those that are not stored.

docs/research/corruptions.md explains the results.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from hbf.analysis.image_run import MOST_TESTED, ImageRun, LabeledImages
from hbf.analysis.report.corruption_report import NONE, draw, table
from hbf.analysis.study import Record, Study, check_folder_names, data_of
from hbf.data.augment.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from hbf.errors import UserError, in_one_line


def shared_images(runs: Sequence[ImageRun], most: int) -> LabeledImages:
  """Return at most `most` test images of the first run, evenly spaced in their order.

  Raises:
    UserError: another run has other test images, or an image cannot be read.
  """
  first, *others = runs
  found = first.read('test', most)
  for run in others:
    if not all(map(np.array_equal, found, run.read('test', most))):
      raise UserError(
        f'{run.workdir} and {first.workdir} have different test images; expected the same images, because their '
        'answers are compared: give runs of one data set'
      )
  return found


def measure(
  runs: Sequence[ImageRun],
  examples: LabeledImages,
  stored: Sequence[Mapping[str, Any]],
  save: Callable[[dict[str, Any]], None],
) -> None:
  """Measure the accuracies that are not stored, for each run: without corruption, then with each corruption.

  All runs get the same corrupted images.

  Args:
    runs: the runs.
    examples: the test images, the same for all runs.
    stored: the rows that were measured before.
    save: a function that stores a row. A row has the run and the corruption. `accuracy` has a value in percent for
      each strength. `right` has a digit for each image: the number of strengths with a right answer. Without
      corruption there is one strength.
  """
  for name in (NONE, *CORRUPTIONS):
    left = [run for run in runs if not any(_key(run, name).items() <= row.items() for row in stored)]
    if not left:
      continue
    strengths = STRENGTHS if name in CORRUPTIONS else (0,)
    changed = [corrupt(examples.images, name, strength) if strength else examples.images for strength in strengths]
    for run in left:
      right = np.stack([run.logits(images).argmax(axis=1) == examples.labels for images in changed])
      save(_row(run, name, right))


def _key(run: ImageRun, corruption: str) -> dict[str, Any]:
  """Return the entries of a row that tell which checkpoint was measured under which corruption."""
  return run.about() | {'corruption': corruption}


def _row(run: ImageRun, corruption: str, right: np.ndarray) -> dict[str, Any]:
  """Return the row of a run and a corruption. `right` is True for right answers, bool [strengths, images]."""
  return _key(run, corruption) | {
    'accuracy': [round(100 * float(share), 4) for share in right.mean(axis=1)],
    'right': ''.join(map(str, right.sum(axis=0))),
  }


def _save(record: Record, measured: dict[str, Any], row: dict[str, Any]) -> None:
  measured['rows'].append(row)
  record.save(measured)
  logging.info('%s, %s: %.1f%% right', row['run'], row['corruption'], np.mean(row['accuracy']))


def _measure_all(folders: Sequence[pathlib.Path], most: int, record: Record) -> None:
  """Measure the runs in `folders` on at most `most` test images, and store the rows."""
  check_folder_names(folders)
  runs = [ImageRun.of(folder) for folder in folders]
  examples = shared_images(runs, most)
  data, images = data_of(folders, record), len(examples.labels)
  measured = record.stored or data | {'images': images, 'rows': []}
  if measured['images'] != images:
    raise UserError(
      f'{record.path} has numbers of {measured["images"]:,} images; expected {images:,}: give another --out, or move '
      'the file away'
    )
  measure(runs, examples, measured['rows'], functools.partial(_save, record, measured))


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('corruptions', draw, table, ('data', 'images', 'rows'))
  parser = study.parser('hbf.analysis.corruption_study', __doc__, 'a run folder; may be repeated')
  parser.add_count('--images', 2, MOST_TESTED, 'most test images. Intervals are over images')
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.run, flags.images))


if __name__ == '__main__':
  sys.exit(main())
