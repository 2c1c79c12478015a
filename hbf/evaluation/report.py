"""Results as tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = {
  'accuracy': '%',
  'top5': '%',
  'ece': '%',
  'nll': ' nats',
  'train_seconds': ' s',
  'compile_seconds': ' s',
}


def print_result(result: Mapping[str, Any], title: str, console: Console) -> None:
  """Prints the scalars of a result, one a row, with their units."""
  table = Table(title=title, show_header=False)
  for key, value in result.items():
    if isinstance(value, Mapping | list | tuple) or value is None:
      continue
    text = f'{value:,.2f}' if isinstance(value, float) else f'{value:,}' if isinstance(value, int) else str(value)
    table.add_row(key, text + UNITS.get(key, ''))
  console.print(table)


def print_classes(summary: Mapping[str, Any], classes: Sequence[str], console: Console) -> None:
  """Prints accuracy by class with the class it is most often taken for."""
  table = Table('class', 'n', 'accuracy', 'most often taken for', title='classes')
  for i, (row, accuracy) in enumerate(zip(summary['confusion'], summary['per_class'], strict=True)):
    wrong = [0 if j == i else count for j, count in enumerate(row)]
    worst = max(range(len(row)), key=wrong.__getitem__)
    taken_for = f'{classes[worst]} ({wrong[worst]})' if wrong[worst] else ''
    table.add_row(classes[i], str(sum(row)), '' if accuracy is None else f'{accuracy:.1f}%', taken_for)
  console.print(table)
