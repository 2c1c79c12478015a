"""The command for weights of the authors' code.

python -m hbf.interop.authors best.pth --workdir runs/theirs --config configs/cifar10.py     # then eval.py
python -m hbf.interop.authors ours.pth --workdir runs/ours --export                          # the other way
"""

import argparse
import functools
import pathlib
import runpy
import sys
from collections.abc import Sequence

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.interop import tensors as files
from hbf.interop.authors import IMAGENET, STATISTICS, read, save
from hbf.interop.authors.positions import interpolate
from hbf.interop.network import read_file
from hbf.models.classifier import ImageClassifier
from hbf.models.matching import units_of
from hbf.training.evaluate import restore
from hbf.training.experiment import prepare
from hbf.training.imported import write
from hbf.training.machine import keep_freed_memory


def import_workdir(path: pathlib.Path, workdir: pathlib.Path, config: ConfigDict, heads: int | None = None) -> str:
  """Makes a workdir that eval.py reads from a network of theirs.

  Args:
    path: as in `load`.
    workdir: must not exist.
    config: of a data set the network was made for; its model is replaced.
    heads: as in `load`.

  Returns:
    A line that says what was read.

  Raises:
    UserError: the file, the data set or the workdir can't be used.
  """
  network = read_file(path, functools.partial(read, heads=heads))
  config = ConfigDict(config)
  config.model, config.recipe, config.init_from = ConfigDict(network.config), 'authors', ''
  if not config.data.mean and network.channels == 3:
    config.data.mean, config.data.std = STATISTICS.get(config.data.name, IMAGENET)
  experiment = prepare(config.lock())
  rows, columns, channels = experiment.task.dataset.image_shape
  classes, model = len(experiment.task.dataset.classes), config.model
  if (channels, classes) != (network.channels, network.classes):
    raise UserError(
      f'{path} is for images of {network.channels} channels and {network.classes} classes, '
      f'{config.data.name} has {channels} and {classes}: give its data set with --config'
    )
  positions = interpolate(network.params['positions'], rows // model.patch, columns // model.patch)
  write(workdir, experiment, network.params | {'positions': np.asarray(positions)})
  units = ''.join(f', {option} {count}' for option, count in units_of(model).items())
  unused = f'; unused: {", ".join(network.unused)}' if network.unused else ''
  return (
    f'{network.origin}: width {model.width}, {model.depth} blocks, {model.heads} heads{units}, patch {model.patch}, '
    f'{network.grid}×{network.grid} positions{unused}'
  )


def read_config(argument: str) -> ConfigDict:
  """The config of FILE[:arguments].

  Raises:
    UserError: there is no such file.
  """
  path, _, arguments = argument.partition(':')
  if not pathlib.Path(path).is_file():
    raise UserError(f'{path} is not there: give a config file such as configs/cifar10.py')
  return runpy.run_path(path)['get_config'](arguments)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m hbf.interop.authors',
    description="Reads a state_dict of the authors' public code into a workdir for eval.py, or writes one.",
  )
  parser.add_argument('file', type=pathlib.Path, metavar='FILE', help=', '.join(files.READERS))
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='made here; with --export: read')
  parser.add_argument('--config', default='configs/cifar10.py', help='of the data set; default: %(default)s')
  parser.add_argument('--heads', type=int, help="of ViT's attention; default: 4")
  parser.add_argument('--data_dir', default='', help='where prepared TFDS data lie, if not where the config says')
  parser.add_argument('--data_root', default='', help='the image folder')
  parser.add_argument('--export', action='store_true', help="write the workdir's network to FILE")
  parser.add_argument('--checkpoint', default='latest', help='to export: latest, best or a step')
  parser.add_argument('--average', action='store_true', help='to export: the moving average of its parameters')
  flags = parser.parse_args(arguments)
  keep_freed_memory()
  logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
  moved = {key: value for key, value in (('dir', flags.data_dir), ('root', flags.data_root)) if value}
  try:
    print(_export(flags, moved) if flags.export else _import(flags, moved))
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0


def _import(flags: argparse.Namespace, moved: dict[str, str]) -> str:
  config = read_config(flags.config)
  config.data.update(moved)
  found = import_workdir(flags.file, flags.workdir, config, flags.heads)
  return f'{found}\nmade {flags.workdir}: python eval.py --workdir={flags.workdir}'


def _export(flags: argparse.Namespace, moved: dict[str, str]) -> str:
  restored = restore(flags.workdir, flags.checkpoint, average=flags.average, **moved)
  if not isinstance(restored.model, ImageClassifier):
    raise UserError(f'{flags.workdir} holds no network for images: the files of the authors are of such')
  save(flags.file, restored.model, {'params': restored.params})
  return f'wrote {flags.file}'


if __name__ == '__main__':
  sys.exit(main())
