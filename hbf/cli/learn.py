"""Add classes to a classifier from a few images each, without training; list the learned classes, or forget one.

hbf learn --workdir=runs/c10 --images=new/        # new/rose/1.jpg, new/rose/2.jpg, new/tulip/1.jpg, …
"""

import pathlib
from collections.abc import Sequence

from absl import flags

from hbf import cli
from hbf.errors import UserError

WORKDIR = cli.define_workdir()
IMAGES = cli.define_path(
  'images', 'Folder with a subfolder of images for each new class. The subfolder has the name of the class.'
)
LIST = flags.DEFINE_boolean('list', False, "Print the run's learned classes.")
FORGET = flags.DEFINE_string('forget', '', 'The name of a learned class to remove.')
CHECKPOINT, AVERAGE = cli.define_checkpoint('Use')
MOVED = cli.define_moved()


def main(argv: Sequence[str]) -> int:
  """Learn classes or forget one, as the flags say. Then print all learned classes, and return the exit status."""
  del argv
  if (bool(IMAGES.value), bool(FORGET.value), LIST.value).count(True) != 1:
    raise UserError('give new classes by --images=FOLDER, or --list, or --forget=CLASS')
  from rich.console import Console

  from hbf.markdown import table
  from hbf.training.learned import read_learned, to_rows
  from hbf.training.mirror import local_copy, mirrored

  if LIST.value:
    learned = read_learned(local_copy(WORKDIR.value))
  else:
    with mirrored(WORKDIR.value, Console(stderr=True), must_exist=True) as workdir:
      change(workdir)
      learned = read_learned(workdir)
  if learned:
    print(table(('learned class', 'images', 'first image'), to_rows(learned)))
  else:
    print(f'{WORKDIR.value} has no learned classes')
  return 0


def change(workdir: pathlib.Path) -> None:
  """Add the classes of --images to the run in `workdir`, or forget the class --forget."""
  from hbf.editing.learn import learn_folder
  from hbf.training.learned import forget
  from hbf.training.machine import keep_compiled_programs, keep_freed_memory

  keep_freed_memory()
  keep_compiled_programs()
  if IMAGES.value:
    learn_folder(workdir, IMAGES.value, CHECKPOINT.value, AVERAGE.value, **MOVED())
  else:
    forget(workdir, FORGET.value)


if __name__ == '__main__':
  cli.run(main)
