"""Correct single answers of a trained model by centers, without training; list the edits, or undo them.

hbf edit --workdir=runs/c10 --label=cat holiday.jpg
hbf edit --workdir=runs/text --prompt='The duke of Gagiti is called ' --answer=Purun.
"""

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = cli.define_workdir()
LABEL = flags.DEFINE_string('label', '', 'The class that the images should get.')
PROMPT = flags.DEFINE_string('prompt', None, 'For a run on texts: the text to continue.')
ANSWER = flags.DEFINE_string('answer', None, 'The text that should follow the --prompt directly.')
LIST = flags.DEFINE_boolean('list', False, "Print the run's edits.")
UNDO = flags.DEFINE_integer('undo', None, 'The number of an edit to undo, as --list prints it.')
REACH = flags.DEFINE_float(
  'reach', 1.0, 'Radius of the ball, divided by the distance to the nearest example whose answer should stay.'
)
MARGIN = flags.DEFINE_float(
  'margin', None, "Lead of the new answer's logit over all others. Default: 16 for images, 4 for texts."
)
CHECKPOINT, AVERAGE = cli.define_checkpoint('Edit')
MOVED = cli.define_moved()


def main(argv: Sequence[str]) -> int:
  """Make edits or undo one, as the flags say. Then print all edits of the run, and return the exit status."""
  images = [os.path.expanduser(path) for path in argv[1:]]
  check(images)
  from rich.console import Console

  from hbf.markdown import table
  from hbf.training.edits_file import read_edits, to_rows
  from hbf.training.mirror import local_copy, mirrored

  if LIST.value:
    edits = read_edits(local_copy(WORKDIR.value))
  else:
    with mirrored(WORKDIR.value, Console(stderr=True), must_exist=True) as workdir:
      change(workdir, images)
      edits = read_edits(workdir)
  if edits:
    print(table(('edit', 'image or prompt', 'was', 'is', 'radius'), to_rows(edits)))
  else:
    print(f'{WORKDIR.value} has no edits')
  return 0


def change(workdir: pathlib.Path, images: Sequence[str]) -> None:
  """Correct the answers for `images` or for --prompt in a run folder, or undo the edit --undo."""
  from hbf.editing.edit import MARGIN as MARGIN_OF_IMAGES
  from hbf.editing.edit import edit_files
  from hbf.editing.text import MARGIN as MARGIN_OF_TEXTS
  from hbf.editing.text import edit_text
  from hbf.training.edits_file import undo
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  keep_freed_memory()
  keep_compiled_programs()
  average, moved = AVERAGE.value, MOVED()
  if images:
    margin = MARGIN_OF_IMAGES if MARGIN.value is None else MARGIN.value
    made = edit_files(workdir, images, LABEL.value, REACH.value, margin, CHECKPOINT.value, average, **moved)
    print(f'{made.changed} of {made.guarded:,} training images get another answer\n')
  elif PROMPT.value is not None:
    margin, answer = MARGIN_OF_TEXTS if MARGIN.value is None else MARGIN.value, ANSWER.value or ''
    made = edit_text(workdir, PROMPT.value, answer, REACH.value, margin, CHECKPOINT.value, average, **moved)
    print(f'{made.changed} of {made.guarded:,} places of the training text get another answer\n')
  elif UNDO.value is not None:
    undo(workdir, UNDO.value)


def check(images: Sequence[str]) -> None:
  """Raise UserError unless the flags and `images` ask for exactly one of four things.

  They are: to correct the answers for images, to correct an answer in a text, to undo an edit, and to list the edits.
  `images` has the arguments that are not flags, the paths of images.
  """
  texts = PROMPT.value is not None or ANSWER.value is not None
  if (bool(images) or bool(LABEL.value), texts, UNDO.value is not None, LIST.value).count(True) != 1:
    raise UserError('give images with their --label, or --prompt with --answer, or --list, or --undo=NUMBER')
  if texts and None in (PROMPT.value, ANSWER.value):
    raise UserError('--prompt and --answer belong together: give both')
  if images and not LABEL.value:
    raise UserError('--label is missing: name the class that the images should get')
  if LABEL.value and not images:
    raise UserError('no images given: name files after the flags')


if __name__ == '__main__':
  cli.run(main, arguments=True)
