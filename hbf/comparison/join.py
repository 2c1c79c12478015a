"""Joining of comparisons: their runs go into one folder, such as those of two machines.

python -m hbf.comparison.join runs/here runs/there runs/both

The joined folder has copies of all runs. `hbf compare --workdir=runs/both --report` then
writes one table, and `hbf compare` can add runs. The other arms are compared with the first arm of the first folder.
A comparison may be packed (`hbf.comparison.pack`). Its finished runs are then copied without checkpoints, and all
other runs with them.
"""

import functools
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence

from hbf.arguments import Parser
from hbf.comparison.grid import Grid, refuse_other_config
from hbf.comparison.pack import new_folder, unpack
from hbf.comparison.runs import LOGS
from hbf.comparison.stored import PACKED, KnownData, RunFolders, check_runs, check_same_data, refuse_busy
from hbf.errors import UserError, in_one_line


def join(folders: Sequence[pathlib.Path], target: pathlib.Path) -> tuple[list[str], list[str]]:
  """Copy the runs of several comparisons to one folder.

  Args:
    folders: the folders of the comparisons, packed or not. They are not changed.
    target: folder to make. After an error it does not exist.

  Returns:
    The names of the copied runs, and of the packed runs that are left out, because they have no result.

  Raises:
    UserError: a folder is not a comparison, is damaged or is in use. Two folders have the same run, arms of the same
      name with other options, arms of one group with other recipes, or other data. Or the target exists, or cannot
      be written.
  """
  # An arm keeps the options of the first folder that has it.
  grid = functools.reduce(lambda joined, other: joined.union(other).union(joined), map(Grid.load, folders))
  for arm in grid.arms:
    config = next(argument for argument in arm.arguments if argument.startswith('--config='))
    first = next(other for other in grid.arms if other.group == arm.group)
    refuse_other_config(config.removeprefix('--config='), Grid((first,)), 'join comparisons of one config')
  with new_folder(target) as draft, tempfile.TemporaryDirectory(dir=draft) as scratch:
    owners: dict[str, pathlib.Path] = {}
    known: dict[str, KnownData] = {}
    sources, left_out = {}, []
    for number, folder in enumerate(folders):
      check_runs(grid, folder, 'join comparisons whose arms of the same name have the same options')
      known = check_same_data(grid, folder, known, 'join comparisons on the same data')
      sources[folder] = folder
      if (folder / PACKED).exists():
        sources[folder] = pathlib.Path(scratch, str(number))
        left_out += unpack(folder, sources[folder])
      for name in RunFolders(sources[folder]).names():
        if name in owners:
          raise UserError(f'{owners[name]} and {folder} both have the run {name}: remove one of the two')
        owners[name] = folder
    refuse_busy((*folders, *(folder / name for name, folder in owners.items())))
    for folder in sources.values():
      if (folder / LOGS).is_dir():  # they say why runs have no result
        shutil.copytree(folder / LOGS, draft / LOGS, dirs_exist_ok=True)
    for name, folder in owners.items():
      shutil.copytree(sources[folder] / name, draft / name, ignore=shutil.ignore_patterns('.lock'))
    grid.save(draft)
  return list(owners), left_out


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf.comparison.join', 'Copy the runs of several comparisons to one folder.')
  parser.add_path('runs', nargs='+', help='the --workdir of each comparison, or its packed form')
  parser.add_path('target', help='folder to make, such as runs/both')
  flags = parser.parse_args(arguments)
  names, left_out = join(flags.runs, flags.target)
  if left_out:
    print(f'left out, because without a result: {", ".join(left_out)}', file=sys.stderr)
  print(f'{flags.target} has {len(names)} runs: {", ".join(names)}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
