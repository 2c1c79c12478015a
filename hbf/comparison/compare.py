"""A comparison in a folder: execute its missing runs, and write the report."""

import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from hbf.comparison.curves import draw_curves
from hbf.comparison.devices import Device
from hbf.comparison.grid import (
  Comparison,
  Grid,
  arms_with_other_units,
  arms_with_own_epochs,
  label_of,
  make_grid,
)
from hbf.comparison.held_out import held_out_table
from hbf.comparison.presets import PRESETS
from hbf.comparison.runs import all_finished, run_all
from hbf.comparison.stored import check_requested_data, check_runs, check_same_data, refuse_packed
from hbf.comparison.table import as_json, markdown, read_rows
from hbf.training.workdir import check_place, held, replace_text


def compare(request: Comparison, workdir: pathlib.Path, devices: Sequence[Device]) -> bool:
  """Run the requested runs that are missing, and report all runs of the folder.

  Args:
    request: the configs, arms and seeds.
    workdir: folder of the comparison.
    devices: devices for the runs, one run at a time for each entry.

  Returns:
    False if a requested run failed. Otherwise True, also if a signal stopped the comparison.

  Raises:
    UserError: the request is not valid, the folder is packed, a run in the folder has the name of a requested run but
      another config, or the runs in the folder have other data.
  """
  check_place(workdir)
  refuse_packed(workdir)
  before = Grid.stored(workdir)
  grid = make_grid(request, before)
  seen = Grid(grid.arms, before.union(grid).seeds)
  check_runs(seen, workdir)
  check_requested_data(grid, check_same_data(before.union(seen), workdir))
  console = Console(stderr=True)
  for label in arms_with_own_epochs(request):
    console.print(f'{label} sets train.epochs itself: its training operations are not matched', soft_wrap=True)
  of_presets = {arm for preset in PRESETS.values() for arm in preset.arms}
  for arm, change in arms_with_other_units(request, grid).items():
    if arm not in of_presets:
      console.print(f'{label_of(arm)}: {change}, to match parameters; --nomatch keeps it', soft_wrap=True)
  with held(workdir):
    union = Grid.stored(workdir).union(grid)  # read again, because the folder is locked only now
    union.save(workdir)
    stopped = not run_all(grid, workdir, devices, console)
    write_report(union, workdir)
  return stopped or all_finished(grid, workdir)


def report(workdir: pathlib.Path, split: str) -> None:
  """Write the report again from the logs, or print the scores on held-out examples.

  Args:
    workdir: folder of the comparison.
    split: 'validation' to print the scores on held-out examples. With any other value, the report on test examples is
      written.

  Raises:
    UserError: the folder is not a comparison.
  """
  grid = Grid.load(workdir)
  if split == 'validation':
    print(held_out_table(grid, workdir))
  else:
    write_report(grid, workdir)


def write_report(grid: Grid, workdir: pathlib.Path) -> None:
  """Write comparison.md, comparison.json and curves.png from the logs of the runs, and print comparison.md."""
  rows = read_rows(grid, workdir)
  text = markdown(rows)
  replace_text(workdir / 'comparison.md', text)
  replace_text(workdir / 'comparison.json', as_json(rows))
  draw_curves(grid, workdir, workdir / 'curves.png')
  sys.stdout.write(text)
