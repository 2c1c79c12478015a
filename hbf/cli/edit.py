"""Correct a classifier's answers for images by one center each, without training; list the edits, or undo them.

hbf edit --workdir=runs/c10 --label=cat holiday.jpg
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
LABEL = flags.DEFINE_string('label', '', 'The class that the images should get.')
LIST = flags.DEFINE_boolean('list', False, "Print the run's edits.")
UNDO = flags.DEFINE_integer('undo', None, 'The number of an edit to take back, as --list prints it.')
REACH = flags.DEFINE_float(
  'reach', 1.0, 'Radius of the ball, as a part of the distance to the nearest image whose answer should stay.'
)
MARGIN = flags.DEFINE_float('margin', 16.0, "Lead of the label's logit over the largest other logit.")
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'latest, best (on the held-out part of train) or a step.')
AVERAGE = flags.DEFINE_boolean('average', False, 'Edit the moving average of the parameters (train.average).')
DATA_DIR = flags.DEFINE_string('data_dir', '', 'Folder of the prepared TFDS data, if they have moved since training.')
DATA_ROOT = flags.DEFINE_string('data_root', '', 'The image folder, if it has moved since training.')


def main(argv: Sequence[str]) -> int:
  """Edit, undo or list edits, and print the run's edits."""
  images, workdir = argv[1:], pathlib.Path(WORKDIR.value).expanduser()
  if (bool(images), UNDO.value is not None, LIST.value).count(True) != 1:
    raise UserError('give images with their --label, or --list, or --undo=NUMBER')
  if images and not LABEL.value:
    raise UserError('--label is missing: name the class that the images should get')
  from hbf.editing.edit import edit_files
  from hbf.markdown import table
  from hbf.training.edits_file import read_edits, to_rows, undo
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  keep_freed_memory()
  keep_compiled_programs()
  if images:
    moved = {'dir': DATA_DIR.value, 'root': DATA_ROOT.value}
    made = edit_files(
      workdir, images, LABEL.value, REACH.value, MARGIN.value, CHECKPOINT.value, AVERAGE.value, **moved
    )
    print(f'{made.changed} of {made.guarded:,} training images get another answer\n')
  elif UNDO.value is not None:
    undo(workdir, UNDO.value)
  edits = read_edits(workdir)
  if edits:
    print(table(('edit', 'image', 'was', 'is', 'radius'), to_rows(edits)))
  else:
    print(f'{workdir} has no edits')
  return 0


if __name__ == '__main__':
  cli.run(main, arguments=True)
