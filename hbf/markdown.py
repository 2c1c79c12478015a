"""Tables in Markdown: the one form in which tables are printed, written and put on pages."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table of a header and rows of cells, without a line's end after the last row.

  Columns are filled up, so that a terminal shows them in line, and never cut: a number without its end is another.
  """
  lines = [tuple(header), *map(tuple, rows)]
  widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
  filled = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
  filled.insert(1, ['-' * width for width in widths])
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in filled)


def cell(value: object) -> str:
  """A value as tables show it: floats to three digits, thousands apart."""
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'
  return f'{value:,}' if isinstance(value, int) else str(value)
