"""Table and picture of the numbers that `hbf.analysis.dead_units` measures."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.comparison.figures import plt, write_png
from hbf.evaluation.scores import ACCURACY

SCORES = (
  ('mean', 'mean response'),
  ('spread', 'spread of a response over the tokens'),
  ('learning', "rms gradient of the centers' coordinates"),
)
SHARES = (('dead', 'dead, %'), ('constant', 'constant, %'))  # shares of the centers; the picture omits them


def table(measured: dict[str, Any]) -> str:
  """Return a Markdown table with a row for each setting of stage 2.

  A score has one value for each block. A cell shows the smallest and the greatest of these values, at initialization
  and, after an arrow, at the end of training.
  """
  header = ('stage 2', *(label for _, label in (*SCORES, *SHARES)), f'test {ACCURACY.label}')
  rows = []
  for row in measured['rows']:
    scores = [f'{_range(row["init"][name])} → {_range(row["trained"][name])}' for name, _ in (*SCORES, *SHARES)]
    rows.append((row['setting'], *scores, f'{row["accuracy"]:.1f}'))
  return markdown.table(header, rows)


def _range(values: Sequence[float]) -> str:
  shown = [f'{value:.3g}' if value >= 99.5 else f'{value:.2g}' for value in (min(values), max(values))]
  return shown[0] if shown[0] == shown[1] else ' … '.join(shown)


def draw(measured: dict[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with a panel for each score. A dot is a block, hollow at initialization and filled after training."""
  rows = measured['rows']
  figure, axes = plt.subplots(1, len(SCORES), figsize=(13, 4), sharey=True, layout='constrained')
  for axis, (name, label) in zip(axes, SCORES, strict=True):
    sizes = [abs(value) for row in rows for when in ('init', 'trained') for value in row[when][name] if value]
    floor = 10 ** np.floor(np.log10(min(sizes)))
    # The axis is linear near 0, so that an exact 0 has a place at the left.
    axis.set_xscale('symlog', linthresh=floor, linscale=0.5)
    for y, row in enumerate(rows):
      for when, face, dy in (('init', 'none', 0.12), ('trained', 'C0', -0.12)):
        values = row[when][name]
        axis.scatter(
          np.abs(values), [y + dy] * len(values), facecolors=face, edgecolors='C0', label=when if not y else None
        )
    axis.set(xlabel=label, yticks=range(len(rows)), yticklabels=[row['setting'] for row in rows])
    axis.set_xlim(left=-floor / 5)
    axis.grid(alpha=0.3)
  axes[0].invert_yaxis()
  axes[0].legend(loc='lower center')
  write_png(figure, path, dpi=120)
