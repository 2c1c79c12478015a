"""List the models that come with the package, or make a run folder of one.

hbf pretrained
hbf pretrained laptop-cifar10-hyperbf --workdir=runs/mine
"""

import sys
from collections.abc import Sequence

from hbf.arguments import Parser
from hbf.errors import UserError, in_one_line


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf pretrained', 'List the models that come with the package, or make a run folder of one.')
  parser.add_argument('name', metavar='NAME', nargs='?', help='a model; without it all are listed')
  parser.add_path('--workdir', metavar='DIR', help='run folder to make; default: a folder in the cache')
  flags = parser.parse_args(arguments)
  from hbf.training import pretrained
  from hbf.training.machine import quiet

  if flags.name is None:
    if flags.workdir:
      raise UserError(f'--workdir={flags.workdir} needs a model: give the NAME of one, which `hbf pretrained` lists')
    for name in pretrained.names():
      print(f'{name}: {pretrained.describe(name)}')
    return 0
  with quiet():
    made = pretrained.unpack(flags.name, flags.workdir)
  print(made)
  return 0


if __name__ == '__main__':
  sys.exit(main())
