"""A comparison in its folder: what is missing runs, and the report is written."""

import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from hbf.comparison.curves import draw_curves
from hbf.comparison.devices import Device
from hbf.comparison.grid import Comparison, Grid, check_runs, make_grid, with_own_epochs
from hbf.comparison.held_out import held_out
from hbf.comparison.runs import complete, run_all
from hbf.comparison.stored import refuse_packed
from hbf.comparison.table import as_json, markdown, read_rows
from hbf.training.workdir import check_place, held, replace_text


def compare(asked: Comparison, workdir: pathlib.Path, devices: Sequence[Device]) -> bool:
  """Runs what is asked for and missing, and reports all that the folder compares, asked for now or before.

  Returns:
    False if a run failed; True also if a signal stopped it.

  Raises:
    UserError: something is wrong with what is asked for, or it doesn't fit what is there.
  """
  check_place(workdir)
  refuse_packed(workdir)
  before = Grid.stored(workdir)
  grid = make_grid(asked, before)
  check_runs(Grid(grid.arms, before.union(grid).seeds), workdir)
  console = Console(stderr=True)
  for label in with_own_epochs(asked):
    console.print(f'{label} sets train.epochs itself: its training operations are not matched', soft_wrap=True)
  with held(workdir):
    union = Grid.stored(workdir).union(grid)  # once more, now that nobody else writes
    union.save(workdir)
    stopped = not run_all(grid, workdir, devices, console)
    write_report(union, workdir)
  return stopped or complete(grid, workdir)


def report(workdir: pathlib.Path, split: str) -> None:
  """Writes the report again, or for split validation prints what was held out, from the logs alone.

  Raises:
    UserError: the folder is no comparison.
  """
  grid = Grid.load(workdir)
  if split == 'validation':
    print(held_out(grid, workdir))
  else:
    write_report(grid, workdir)


def write_report(grid: Grid, workdir: pathlib.Path) -> None:
  """Writes comparison.md, comparison.json and curves.png of the runs that are finished, and prints the table."""
  rows = read_rows(grid, workdir)
  shown = markdown(rows)
  replace_text(workdir / 'comparison.md', shown)
  replace_text(workdir / 'comparison.json', as_json(rows))
  draw_curves(grid, workdir, workdir / 'curves.png')
  sys.stdout.write(shown)
