"""Tables in Markdown and other texts, for consoles, files and pages."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Return a Markdown table of a header and rows of cells, without a line break after the last row.

  Cells are padded, so that columns are aligned on a terminal too. They are never cut, because a number without its
  last digits is another number. The character `|` is escaped and a line break becomes a space, because either would
  end a cell. Cells are made `printable`.
  """
  lines = [[' '.join(printable(cell).replace('|', r'\|').splitlines()) for cell in line] for line in (header, *rows)]
  widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
  filled = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
  filled.insert(1, ['-' * width for width in widths])
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in filled)


def printable(text: str) -> str:
  """Return a text in which the bytes of a command line or of a path that are not UTF-8 are escaped."""
  return text.encode(errors='backslashreplace').decode()


def cell(value: object) -> str:
  """Return a value as the text of a table cell.

  A float below 1000 has three significant digits, and a larger float has no decimals. Commas separate thousands.
  """
  if isinstance(value, float):
    return f'{value:,.0f}' if abs(value) >= 999.5 else f'{value:.3g}'
  return f'{value:,}' if isinstance(value, int) else str(value)
