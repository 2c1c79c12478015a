"""Run folders for parameters that were trained elsewhere."""

import contextlib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.interop import authors
from hbf.interop.authors.positions import interpolate
from hbf.interop.network import read_file
from hbf.models.classifier import ImageClassifier
from hbf.models.matching import units_of
from hbf.training.checkpoints import Checkpoints
from hbf.training.edits_file import warn_of_edits
from hbf.training.experiment import Experiment, prepare
from hbf.training.learned import warn_of_learned
from hbf.training.programs import with_extras
from hbf.training.restore import restore
from hbf.training.state import TrainState, fresh_state
from hbf.training.workdir import claim, locked


def write(workdir: pathlib.Path, experiment: Experiment, params: Mapping[str, Any]) -> None:
  """Make the run folder of a run with these parameters at step 0.

  Raises:
    UserError: the folder exists.
  """
  params = jax.tree.map(jnp.asarray, params)
  state = fresh_state(params, experiment.optimizer, experiment.objective)
  write_state(workdir, experiment, with_extras(state, experiment.config))


def write_state(workdir: pathlib.Path, experiment: Experiment, state: TrainState) -> None:
  """Make the run folder of a run that continues from a state. Training goes on after the step of the state.

  Raises:
    UserError: the folder exists.
  """
  if workdir.exists():
    raise UserError(f'{workdir} exists: choose another --workdir, or remove it')
  with locked(workdir):
    claim(workdir, experiment.config, experiment.task.identity())
    with contextlib.closing(Checkpoints(workdir / 'checkpoints')) as checkpoints:
      checkpoints.save(int(state.step), state)


def to_authors(path: pathlib.Path, workdir: pathlib.Path, checkpoint: str, average: bool, **moved: str) -> None:
  """Write the weights of a run to a file in the format of the public code of the memo's authors.

  Warn if the run has edits or learned classes, which the format does not have. For the arguments except `path`, the
  file, see `hbf.training.evaluate.evaluate_workdir`.

  Raises:
    UserError: the authors' code cannot compute the network's function, or the checkpoint cannot be read.
  """
  restored = restore(workdir, checkpoint, average=average, **moved)
  if not isinstance(restored.model, ImageClassifier):
    raise UserError(f'{workdir} holds no network for images, and the format is for images: give another run')
  height, width, _ = restored.task.shape
  if height != width:
    raise UserError(
      f"{workdir} has images of {width}×{height} pixels; expected squares, because the authors' code has a square of "
      'patches: give another run'
    )
  warn_of_edits(workdir, False, 'the format has no edits')
  warn_of_learned(workdir)
  authors.save(path, restored.model, {'params': restored.params})


def of_authors(path: pathlib.Path, workdir: pathlib.Path, config: ConfigDict, heads: int | None = None) -> str:
  """Make a run folder from a network that was trained by the public code of the memo's authors.

  Args:
    path: the file, see `hbf.interop.authors.load`.
    workdir: the new run folder, which must not exist.
    config: a config with the data set that the network was made for. The options of the network replace the
      config's `model` part.
    heads: the number of heads, see `hbf.interop.authors.load`.

  Returns:
    A line that describes the network.

  Raises:
    UserError: the file or the run folder can't be used, or the data set does not fit the network.
  """
  network = read_file(path, functools.partial(authors.read, heads=heads))
  if config.task != 'classification':
    raise UserError(
      f'{config.data.name} is for task {config.task}, and {path} has a classifier: give a data set of images with '
      'classes by --config'
    )
  config = ConfigDict(config)
  config.model, config.recipe, config.init_from = ConfigDict(network.config), 'authors', ''
  if not config.data.mean and network.channels == 3:
    config.data.mean, config.data.std = authors.STATISTICS.get(config.data.name, authors.IMAGENET)
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
