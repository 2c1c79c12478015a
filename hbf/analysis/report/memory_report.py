"""Table and picture of associative memories, which complete damaged images, from `hbf.analysis.memory_study`.

An image counts as retrieved if the completed image is nearer to the original than to any other stored image. The
capacity is the greatest number of random patterns of which a memory retrieves 99%.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.comparison.figures import plt, write_png

Rows = Sequence[Mapping[str, Any]]


def _unique(rows: Rows, name: str) -> list[Any]:
  """Return the distinct values of a column, in order of first appearance."""
  return [*dict.fromkeys(row[name] for row in rows)]


def _values(rows: Rows, value: str, **wanted: Any) -> np.ndarray:
  return np.array([row[value] for row in rows if all(row[name] == key for name, key in wanted.items())])


def table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each kind of damage and each memory. All values are means over the seeds.

  An image is retrieved if its completion is nearer to it than to any other stored image. A row has the share of
  retrieved images for each number of stored images. For the greatest number of stored images, it also has the root
  mean square errors of the completed images.
  """
  rows = measured['completions']
  counts = _unique(rows, 'stored')
  header = (
    'damage',
    'memory',
    *(f'retrieved of {count:,}, %' for count in counts),
    f'rms error of {counts[-1]:,}',
    'rms error of images that are not stored',
  )
  lines = []
  for damage in _unique(rows, 'damage'):
    for memory in _unique(rows, 'memory'):
      where = {'damage': damage, 'memory': memory}
      retrieved = [f'{_values(rows, "retrieved", stored=count, **where).mean():.1f}' for count in counts]
      errors = [f'{_values(rows, name, stored=counts[-1], **where).mean():.3f}' for name in ('error', 'error_unseen')]
      lines.append((damage, memory, *retrieved, *errors))
  return markdown.table(header, lines)


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with a panel for each kind of damage, and a last panel for the capacity.

  Panels for damage show the share of retrieved images against the number of stored images. The last panel shows the
  greatest number of random patterns of which a memory retrieves 99%, against their number of dimensions.
  """
  rows, capacities = measured['completions'], measured['capacities']
  kinds, memories = _unique(rows, 'damage'), _unique(rows, 'memory')
  figure, axes = plt.subplots(1, len(kinds) + 1, figsize=(4 * (len(kinds) + 1), 4.2), layout='constrained')
  for axis, damage in zip(axes, kinds, strict=False):
    for number, memory in enumerate(memories):
      counts = _unique(rows, 'stored')
      means = [_values(rows, 'retrieved', stored=count, damage=damage, memory=memory).mean() for count in counts]
      axis.plot(counts, means, marker='osv^dx'[number], label=memory, **_line_style(number))
    axis.set(xscale='log', ylim=(-5, 105), xlabel='stored images', title=damage)
    axis.grid(alpha=0.3)
  axes[0].set_ylabel('retrieved, %')
  figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower left', ncols=3, fontsize=8)
  _draw_capacities(axes[-1], capacities)
  figure.legend(
    *axes[-1].get_legend_handles_labels(), loc='outside lower right', ncols=2, fontsize=8, handlelength=5, numpoints=2
  )
  write_png(figure, path)


def _line_style(number: int) -> dict[str, Any]:
  """Return the style of the line with index `number`.

  Later lines are drawn on top. They are thinner and have smaller markers, so the lines below stay visible.
  """
  return {'linewidth': 5 - 0.8 * number, 'markersize': 13 - 1.8 * number, 'markerfacecolor': 'none'}


def _draw_capacities(axis: Any, capacities: Rows) -> None:
  dimensions = _unique(capacities, 'dimensions')
  for number, memory in enumerate(_unique(capacities, 'memory')):
    for patterns in _unique(capacities, 'patterns'):
      found = [_values(capacities, 'capacity', dimensions=d, memory=memory, patterns=patterns) for d in dimensions]
      means = [2 ** np.log2(np.maximum(values, 1)).mean() for values in found]
      style = '-' if patterns == 'norm 1' else '--'
      axis.plot(
        dimensions,
        means,
        style,
        color=f'C{(0, 2)[number]}',
        marker='ov'[number],
        label=f'{memory}, {patterns}',
        **_line_style(3 * number),
      )
  axis.set(yscale='log', xlabel='dimensions of random patterns', title='capacity', ylabel='patterns')
  axis.grid(alpha=0.3)
