"""Read weights of the authors' public code into a run folder, or write a run's weights in their format.

hbf convert best.pth --workdir runs/theirs --config cifar10                # then hbf eval
hbf convert ours.pth --workdir runs/ours --export                          # the other way
"""

import argparse
import sys
from collections.abc import Sequence

from hbf.arguments import Parser
from hbf.errors import UserError, in_one_line


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  parser = Parser('hbf convert', "Read a state_dict of the authors' public code into a run folder, or write one.")
  parser.add_path('file', metavar='FILE', help='file of weights: .pth, .pt, .safetensors or .npz')
  parser.add_run('folder of the run: a new one to make, or with --export the one to read')
  parser.add_argument('--config', help='name of the data set, or a file; default: cifar10')
  parser.add_argument(
    '--heads', type=int, help='heads of a ViT; default: width/d if its matrix M is d×d, and 4 if d is 192'
  )
  parser.add_argument('--export', action='store_true', help="write the workdir's network to FILE")
  parser.add_argument(
    '--average', action='store_true', help='with --export: write the moving average of the parameters'
  )
  flags = parser.parse_args(arguments)
  _refuse_idle(flags)
  from absl import logging

  from hbf.training.machine import keep_freed_memory

  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # Orbax warns of intended behavior
  moved = {key: value for key, value in (('dir', flags.data_dir), ('root', flags.data_root)) if value}
  print(_export(flags, moved) if flags.export else _import(flags, moved))
  return 0


def _refuse_idle(flags: argparse.Namespace) -> None:
  """Raise UserError if a flag is given that does nothing with, or without, --export."""
  reads = {'config': flags.config, 'heads': flags.heads}
  writes = {'average': flags.average, 'checkpoint': flags.checkpoint != 'latest'}
  if wrong := [name for name, given in (reads if flags.export else writes).items() if given]:
    rule = 'does not go with --export: leave one of them out' if flags.export else 'needs --export: add it'
    raise UserError(f'--{wrong[0]} {rule}')


def _import(flags: argparse.Namespace, moved: dict[str, str]) -> str:
  """Make a run folder from a file with the authors' weights. Return a message for the user.

  `moved` has the values of --data_dir and --data_root, if given, under the keys 'dir' and 'root'.
  """
  from hbf.config.command_line import read_config
  from hbf.training.convert import of_authors

  config = read_config(
    [f'--config={flags.config or "cifar10"}', *(f'--config.data.{key}={value}' for key, value in moved.items())]
  )
  found = of_authors(flags.file, flags.workdir, config, flags.heads)
  return f'{found}\nmade {flags.workdir}: hbf eval --workdir={flags.workdir}'


def _export(flags: argparse.Namespace, moved: dict[str, str]) -> str:
  """Write a run's weights to a file in the authors' format. Return a message for the user. `moved`: see `_import`."""
  from hbf.training.convert import to_authors

  to_authors(flags.file, flags.workdir, flags.checkpoint, flags.average, **moved)
  return f'wrote {flags.file}'


if __name__ == '__main__':
  sys.exit(main())
