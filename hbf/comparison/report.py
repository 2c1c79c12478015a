"""What a comparison leaves in its folder: comparison.md, comparison.json and curves.png."""

import pathlib

from rich.console import Console

from hbf.comparison.curves import draw_curves
from hbf.comparison.grid import Grid
from hbf.comparison.table import as_json, markdown, read_rows
from hbf.training.workdir import replace_text


def write_report(grid: Grid, workdir: pathlib.Path, console: Console) -> bool:
  """Writes the report of the runs that are finished and prints its table.

  Returns:
    True if every run of the grid has a result.
  """
  rows = read_rows(grid, workdir)
  replace_text(workdir / 'comparison.md', markdown(rows))
  replace_text(workdir / 'comparison.json', as_json(rows))
  draw_curves(grid, workdir, workdir / 'curves.png')
  console.print(markdown(rows), highlight=False, markup=False, soft_wrap=True)
  return not any(row.failed for row in rows)
