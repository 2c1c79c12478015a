"""Weights of the authors' public code (github.com/sunrainyg/Unified_architecture, main.py: Hyper_ViT and ViT).

python -m hbf.interop.authors best.pth --workdir runs/theirs --config configs/cifar10.py     # then eval.py
python -m hbf.interop.authors ours.pth --workdir runs/ours --export                          # the other way

Every version is read whose second stage is made of radial units: with and without M_RBF, with and without the bias
of fc, with and without a learned scale. The version of 2023-10-16 had an MLP there. A state_dict doesn't tell that
from 2023-09-26 to 10-08 M_RBF wasn't used, which changes nothing, as it then stayed the identity; nor that before
2023-09-20 the code took the normed class token itself for logits and left the head untrained.
"""

import argparse
import dataclasses
import pathlib
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.interop import tensors as files
from hbf.interop.layout import Layout, read_layout
from hbf.interop.positions import AnySizeClassifier, interpolate
from hbf.interop.weights import Params, model_config, to_params, to_tensors
from hbf.models.build import build_model
from hbf.models.classifier import ImageClassifier
from hbf.training.machine import keep_freed_memory

# Mean and standard deviation of the channels by which the authors normalise their images.
_CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS = {'cifar10': _CIFAR, 'cifar100': _CIFAR}


def load(path: str | pathlib.Path, heads: int | None = None) -> tuple[AnySizeClassifier, dict[str, Params]]:
  """A network of theirs as one of ours.

  Args:
    path: a .pth, .npz or .safetensors file of its state_dict; nothing in it is run.
    heads: of ViT's attention, see `hbf.interop.layout.read_layout`.

  Returns:
    module and variables: `module.apply(variables, images, train=False)` gives logits [batch, classes] of float32
    images [batch, height, width, 3] that are normalised as the network's were (`STATISTICS` for CIFAR).

  Raises:
    UserError: the file can't be read, or isn't a state_dict of that code; the message lists what is wrong with it.
  """
  layout, params = read(pathlib.Path(path), heads)
  if layout.unused:
    warnings.warn(f'unused tensors of {path}: {", ".join(layout.unused)}', stacklevel=2)
  model = build_model(ConfigDict(model_config(layout)), layout.classes)
  options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
  return AnySizeClassifier(**options, grid=layout.grid), {'params': jax.tree.map(jnp.asarray, params)}


def read(path: pathlib.Path, heads: int | None = None) -> tuple[Layout, Params]:
  """What the file says of the network, and our parameters; arguments and errors as those of `load`."""
  found = files.read(path)
  # What was trained on several devices has this before every name.
  if all(name.startswith('module.') for name in found):
    found = {name.removeprefix('module.'): tensor for name, tensor in found.items()}
  try:
    layout = read_layout(found, heads)
  except UserError as error:
    raise UserError(f'{path}: {error}') from error
  params = to_params({name: np.asarray(tensor, np.float64) for name, tensor in found.items()}, layout)
  return layout, jax.tree.map(lambda z: np.asarray(z, np.float32), params)


def save(
  path: str | pathlib.Path,
  module: ImageClassifier,
  variables: Mapping[str, Any],
  *,
  metric: bool = True,
  bias: bool = True,
) -> None:
  """Writes one of our networks as a state_dict of theirs.

  Their code computes the same as ours if models are those of `check_form`, such as models that `load` gives.

  Args:
    path: a .pth, .npz or .safetensors file.
    module: of models hyperbf or vit.
    variables: {'params': …}.
    metric: whether the Hyper_ViT that is to read it has an M_RBF.
    bias: whether its fc has a bias.

  Raises:
    UserError: their code can't compute what the network does, or the file can't be written.
  """
  params = jax.tree.map(lambda z: np.asarray(z, np.float64), dict(variables['params']))
  tensors = to_tensors(params, module)
  for wanted, ending, default in ((metric, '.mlp.M_RBF', np.eye), (bias, '.mlp.fc.bias', np.zeros)):
    for name in [name for name in tensors if name.endswith(ending) and not wanted]:
      if np.any(tensors[name] != default(len(tensors[name]))):
        raise UserError(f'{name} does something: it can not be left out')
      del tensors[name]
  files.write(pathlib.Path(path), tensors)


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
  from hbf.interop.workdir import write
  from hbf.training.experiment import load_dataset, prepare

  layout, params = read(path, heads)
  dataset = load_dataset(config)
  rows, columns, channels = dataset.image_shape
  if (channels, len(dataset.classes)) != (layout.channels, layout.classes):
    raise UserError(
      f'{path} is for images of {layout.channels} channels and {layout.classes} classes, '
      f'{config.data.name} has {channels} and {len(dataset.classes)}: give its data set with --config'
    )
  params['positions'] = np.asarray(interpolate(params['positions'], rows // layout.patch, columns // layout.patch))
  config = ConfigDict(config)
  config.model, config.recipe = ConfigDict(model_config(layout)), 'authors'
  if not config.data.mean and channels == 3:
    config.data.mean, config.data.std = STATISTICS.get(config.data.name, _IMAGENET)
  write(workdir, prepare(config.lock()), params)
  unused = f'; unused: {", ".join(layout.unused)}' if layout.unused else ''
  return (
    f'{layout.model}: width {layout.width}, {layout.depth} blocks, {layout.heads} heads, {layout.hidden} centres or '
    f'hidden units, patch {layout.patch}, {layout.grid}×{layout.grid} positions{unused}'
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
  from hbf.training.evaluate import restore

  restored = restore(flags.workdir, flags.checkpoint, **moved)
  save(flags.file, restored.model, {'params': restored.params})
  return f'wrote {flags.file}'


if __name__ == '__main__':
  sys.exit(main())
