"""Correct a classifier's answers for images by one center each, without training; list the edits, or undo them.

hbf edit --workdir=runs/c10 --label=cat holiday.jpg
"""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from hbf import cli
from hbf.errors import UserError

if TYPE_CHECKING:
  from hbf.editing.edits import Edits

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
LABEL = flags.DEFINE_string('label', '', 'The class that the images should get.')
LIST = flags.DEFINE_boolean('list', False, "Print the run's edits.")
UNDO = flags.DEFINE_integer('undo', None, 'The number of an edit to take back, as --list prints it.')
REACH = flags.DEFINE_float(
  'reach', 0.5, 'σ of the center, as a part of the distance to the nearest image whose answer should stay.'
)
MARGIN = flags.DEFINE_float('margin', 16.0, "Lead of the label's logit over all others.")
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'latest, best (on the held-out part of train) or a step.')
AVERAGE = flags.DEFINE_boolean('average', False, 'Edit the moving average of the parameters (train.average).')
DATA_DIR = flags.DEFINE_string('data_dir', '', 'Where prepared TFDS data lie, if not where they were in training.')
DATA_ROOT = flags.DEFINE_string('data_root', '', 'The image folder, if not where it was in training.')


def main(argv: Sequence[str]) -> int:
  """Edit, undo or list, and print the run's edits."""
  images, workdir = argv[1:], pathlib.Path(WORKDIR.value).expanduser()
  if (bool(images), UNDO.value is not None, LIST.value).count(True) != 1:
    raise UserError('give images with their --label, or --list, or --undo=NUMBER')
  if images and not LABEL.value:
    raise UserError('--label is missing: name the class that the images should get')
  from hbf.editing.store import read_edits, to_rows, write_edits
  from hbf.markdown import table
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory
  from hbf.training.workdir import load_config, locked

  keep_freed_memory()
  keep_compiled_programs()
  load_config(workdir)  # raises if it is no run folder
  if LIST.value:
    edits = read_edits(workdir)
  else:
    with locked(workdir):
      edits = _edited(workdir, images) if images else _undone(workdir, UNDO.value)
      write_edits(workdir, edits)
  if edits:
    print(table(('edit', 'image', 'was', 'is', 'sigma'), to_rows(edits)))
  else:
    print(f'{workdir} has no edits')
  return 0


def _undone(workdir: pathlib.Path, number: int | None) -> 'Edits':
  """Return the edits of the run without one."""
  from hbf.editing.store import read_edits

  edits = read_edits(workdir)
  if edits is None or number is None:
    raise UserError(f'{workdir} has no edits: there is nothing to undo')
  return edits.without(number)


def _edited(workdir: pathlib.Path, paths: Sequence[str]) -> 'Edits':
  """Return the edits of the run and one for each image. Print how many other answers change."""
  import jax
  import numpy as np

  from hbf.editing.edit import Editor, guarded_images, no_edits
  from hbf.editing.guard import Reader
  from hbf.editing.store import check_checkpoint, read_edits
  from hbf.training.evaluate import restore
  from hbf.training.export import check_on_images, stored_dataset
  from hbf.training.predict import read_image

  check_on_images(workdir)
  dataset = stored_dataset(workdir)
  restored = restore(workdir, CHECKPOINT.value, jax.devices()[:1], AVERAGE.value, dataset)
  edits = read_edits(workdir)
  if edits is not None:
    check_checkpoint(workdir, edits, restored.step, AVERAGE.value)
  images = []
  for path in paths:
    image = read_image(path, dataset.image_shape)
    if isinstance(image, UserError):
      raise image
    images.append(image)
  among = guarded_images(workdir, restored.config, dir=DATA_DIR.value, root=DATA_ROOT.value)
  reader = Reader.of(restored.model, restored.params, restored.task)
  if edits is None:
    edits = no_edits(reader, restored.config, restored.step, AVERAGE.value, among)
  editor = Editor(reader, dataset.class_names, among, edits)
  before = editor.changed.sum()
  editor.edit(np.stack(images), [LABEL.value] * len(paths), paths, REACH.value, MARGIN.value)
  print(f'{editor.changed.sum() - before} of {len(among):,} training images get another answer\n')
  return editor.edits


if __name__ == '__main__':
  cli.run(main, arguments=True)
