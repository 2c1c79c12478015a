"""Table and picture of ways to start, grow and replace centers, from `hbf.analysis.starts_study`.

Each way is an arm. Two more arms, AdamW and Muon, are ordinary training. The other arms are compared to these two.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.comparison.figures import plt, write_png

Row = Mapping[str, Any]
MARKERS = 'os^vDPX*'  # of the arms
REFERENCES = ('AdamW', 'Muon')  # arms to which the others are compared


def table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each arm.

  The columns 'operations' and 'of these, changes' have means over the seeds. All other columns have a number for each
  seed.
  """
  rows, seeds = measured['rows'], sorted({row['seed'] for row in measured['rows']})
  header = (
    'arm',
    'test accuracy, %',
    'difference from Muon',
    'operations',
    'of these, changes',
    *(f'{unit} to the held-out accuracy of {name}' for name in REFERENCES for unit in ('operations', 'seconds')),
  )
  lines = []
  for arm in dict.fromkeys(row['arm'] for row in rows):
    found = [row for seed in seeds for row in rows if (row['arm'], row['seed']) == (arm, seed)]
    muon = [reference(rows, row, 'Muon') for row in found]
    differences = [f'{row["accuracy"] - of["accuracy"]:+.2f}' for row, of in zip(found, muon, strict=True) if of]
    lines.append(
      (
        arm,
        ', '.join(f'{row["accuracy"]:.2f}' for row in found),
        '' if arm == 'Muon' else ', '.join(differences).replace('-', '−'),
        _number(np.mean([row['operations'] for row in found])),
        _number(np.mean([row['changes']['operations'] for row in found])),
        *(
          ', '.join(_reached(row, reference(rows, row, name), unit) for row in found)
          for name in REFERENCES
          for unit in ('operations', 'seconds')
        ),
      )
    )
  return markdown.table(header, lines)


def reference(rows: Sequence[Row], row: Row, name: str) -> Row | None:
  """Return the row of the arm `name` with the same seed as `row`. None if there is none."""
  return next((other for other in rows if (other['arm'], other['seed']) == (name, row['seed'])), None)


def _reached(row: Row, of: Row | None, unit: str) -> str:
  found = None if of is None else reached(row['curve'], of['curve'][-1]['held_out'], unit)
  if found is None:
    return 'not reached' if of else ''
  return _number(found) if unit == 'operations' else f'{found:.0f}'


def reached(curve: Sequence[Mapping[str, float]], accuracy: float, unit: str) -> float | None:
  """Return the operations or seconds at which a curve first reaches an accuracy. None if it does not.

  Between two points of the curve, the accuracy is interpolated linearly.

  Args:
    curve: points with the keys held_out, operations and seconds.
    accuracy: an accuracy on held-out images in percent.
    unit: 'operations' or 'seconds'.
  """
  before = None
  for point in curve:
    if point['held_out'] >= accuracy:
      if before is None:
        return point[unit]
      part = (accuracy - before['held_out']) / (point['held_out'] - before['held_out'])
      return before[unit] + part * (point[unit] - before[unit])
    before = point
  return None


def _number(value: float) -> str:
  return f'{value:.2e}'.replace('e+', 'e') if value else '0'


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with two panels: the held-out accuracy by operations, and the test accuracy of each arm and seed."""
  rows = measured['rows']
  arms = [*dict.fromkeys(row['arm'] for row in rows)]
  figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout='constrained')
  for number, arm in enumerate(arms):
    found = [row for row in rows if row['arm'] == arm]
    for row in found:
      operations, held_out = ([point[key] for point in row['curve']] for key in ('operations', 'held_out'))
      first = row is found[0]
      marker, style = MARKERS[number % len(MARKERS)], '--' if number % 2 else '-'
      left.plot(operations, held_out, marker + style, color=f'C{number}', fillstyle='none', label=arm * first)
    right.scatter([row['accuracy'] for row in found], [number] * len(found), color=f'C{number}')
  left.set(xlabel='floating-point operations, changes included', ylabel='held-out accuracy, %')
  left.set_title('each line is one seed')
  left.legend(fontsize=8, loc='lower right')
  right.set(xlabel='test accuracy, %', title='each dot is one seed', yticks=range(len(arms)), yticklabels=arms)
  right.invert_yaxis()
  for axis in (left, right):
    axis.grid(alpha=0.3)
  write_png(figure, path)
