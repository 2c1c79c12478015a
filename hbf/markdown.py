"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table of a header and rows of cells, without a line's end after the last row."""
  lines = (header, ('---',) * len(header), *rows)
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
