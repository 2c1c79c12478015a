"""Joining of comparisons: their runs go into one folder, such as those of two machines.

python -m hbf.comparison.join runs/here runs/there runs/both

The joined folder has copies of all runs, with their checkpoints. `hbf compare --workdir=runs/both --report` then
writes one table, and `hbf compare` can add runs. The other arms are compared with the first arm of the first folder.
"""

import functools
import pathlib
import shutil
import sys
from collections.abc import Sequence

from hbf.arguments import Parser
from hbf.comparison.grid import Grid, check_runs
from hbf.comparison.pack import new_folder
from hbf.comparison.stored import RunFolders, refuse_busy, refuse_packed
from hbf.errors import UserError, in_one_line


def join(folders: Sequence[pathlib.Path], target: pathlib.Path) -> list[str]:
  """Copy the runs of several comparisons to one folder.

  Args:
    folders: the folders of the comparisons. They are not changed.
    target: folder to make. After an error it does not exist.

  Returns:
    The names of the copied runs.

  Raises:
    UserError: a folder is not a comparison, is packed or is in use. Two folders have the same run, or arms of the
      same name with other options. Or the target exists, or cannot be written.
  """
  for folder in folders:
    refuse_packed(folder)
  # An arm keeps the options of the first folder that has it.
  grid = functools.reduce(lambda joined, other: joined.union(other).union(joined), map(Grid.load, folders))
  owners: dict[str, pathlib.Path] = {}
  for folder in folders:
    check_runs(grid, folder, 'join comparisons whose arms of the same name have the same options')
    for name in RunFolders(folder).names():
      if name in owners:
        raise UserError(f'{owners[name]} and {folder} both have the run {name}: remove one of the two')
      owners[name] = folder
  refuse_busy((*folders, *(folder / name for name, folder in owners.items())))
  with new_folder(target) as draft:
    for name, folder in owners.items():
      shutil.copytree(folder / name, draft / name, ignore=shutil.ignore_patterns('.lock'))
    grid.save(draft)
  return list(owners)


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf.comparison.join', 'Copy the runs of several comparisons to one folder.')
  parser.add_path('runs', nargs='+', help='the --workdir of each comparison')
  parser.add_path('target', help='folder to make, such as runs/both')
  flags = parser.parse_args(arguments)
  names = join(flags.runs, flags.target)
  print(f'{flags.target} has {len(names)} runs: {", ".join(names)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
