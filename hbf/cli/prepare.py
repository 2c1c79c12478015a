"""Prepare a data set: `hbf prepare NAME [--archive=FILE] [--dir=DIR]`."""

import sys
from collections.abc import Sequence

from hbf.arguments import Parser, home_path
from hbf.errors import in_one_line


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf prepare', 'Prepare a data set.')
  parser.add_argument('name', metavar='NAME', help='a data set such as cifar10; an unknown name prints all names')
  parser.add_path('--archive', metavar='FILE', help='local archive; without it the official one is downloaded')
  parser.add_argument('--dir', metavar='DIR', default='~/tensorflow_datasets', help='default: %(default)s')
  flags = parser.parse_args(arguments)
  from hbf.data.images import prepared
  from hbf.data.images.prepare import prepare

  directory, archive = home_path(flags.dir), str(flags.archive) if flags.archive else None
  done = prepared.find(flags.name, directory)
  folder = done or prepare(flags.name, directory, archive)
  counts = prepared.count(prepared.open_builder(folder))
  sizes = ', '.join(f'{count:,} {split}' for split, count in counts.items())
  print(f'{flags.name} is already prepared' if done else f'prepared {flags.name}', f'in {folder}: {sizes}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
