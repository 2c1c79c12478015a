"""The parameters from which a run starts, read from a file: --config.init_from=FILE."""

import dataclasses
import pathlib
from typing import Any

import flax.linen as nn
import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from hbf.data.datasets import Dataset
from hbf.errors import UserError
from hbf.interop import origins
from hbf.interop.network import Network
from hbf.interop.table import Params, misfits
from hbf.models.build import abstract_params
from hbf.models.classifier import ImageClassifier
from hbf.nn.registry import stage_names, takes_heads
from hbf.training.workdir import flatten

# Keys of `model` that do not change the function that the network computes from its parameters.
FREE = (
  'dropout',
  'dtype',
  'scan_layers',
  'remat',
  'drop_path',
  'stage1.sigma_scale',
  'stage1.mimetic',
  'stage2.sigma_scale',
  'stage2.centers_init',
  'stage2.coefficients_scale',
  'stage2.output_scale',
  'stage2.nested',
  'stage2.implementation',
)


@dataclasses.dataclass(frozen=True)
class Initial:
  """Parameters to start from.

  Attributes:
    params: all parameters of the run, float32, on the host. `head` is missing if the run has another number of
      classes than the file.
    source: a description of the origin of the parameters.
  """

  params: Params
  source: str


def read_initial(config: ConfigDict, model: nn.Module, dataset: Any) -> Initial:
  """Read the file `init_from`.

  The config must describe the network of the file. The number of classes may differ. The size of the images may
  differ too if the network accepts other sizes.

  Raises:
    UserError: the file can't be read, or has another network. The message lists the tensors that don't fit, and the
      flags that make the config fit the network.
  """
  path = config.init_from
  if not isinstance(model, ImageClassifier):
    raise UserError(f'init_from={path} holds a network for images: leave it empty for task {config.task}')
  network = origins.read(pathlib.Path(path).expanduser())
  rows, columns, channels = dataset.image_shape
  if channels != network.channels:
    raise UserError(f'{path} is for images of {network.channels} channels, {dataset.name} has {channels}')
  wanted, params = dict(abstract_params(model, dataset.image_shape)), dict(network.params)
  if network.resize is not None:
    positions = network.resize(params['positions'], rows // model.embed.patch, columns // model.embed.patch)
    params['positions'] = np.asarray(positions)
  new_head = network.classes != model.classes
  if new_head:
    del wanted['head'], params['head']
  faults, needed = misfits(_shapes(params), _shapes(wanted), most=6), _arguments(network, config, dataset)
  if faults or needed:
    listed = f' ({faults})' if faults else ''
    cure = f': it does with {needed}' if needed else ''
    raise UserError(f"{path} holds {network.origin}, which the run's config does not describe{listed}{cure}")
  head = f'a new head of {model.classes} classes' if new_head else 'its head'
  return Initial(params, f'{network.origin} of {path}, with {head}')


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
  return {path: param.shape for path, param in flatten_dict(params, sep='/').items()}


def _arguments(network: Network, config: ConfigDict, dataset: Dataset) -> str:
  """Return the flags of `hbf train` that make the config describe the network. '' if no flag is needed."""
  theirs, ours = flatten(network.config), flatten(config.model.to_dict())
  stages = stage_names(network.config['name'])
  other_stages = stage_names(config.model.name) != stages
  free = {'name', *FREE} if takes_heads(network.config['name']) else {'name', 'heads', *FREE}
  # If the stages differ, so do the defaults. Then all keys are needed.
  keys = [key for key in theirs if key not in free and (other_stages or ours.get(key) != theirs[key])]
  flags = [f'model.{key}={theirs[key]}' for key in keys]
  if side := _image_side(network, dataset):
    flags.append(f'data.image_size={side}')
  words = [f'--config.{flag}' for flag in flags]
  if other_stages:
    words = [f'model={network.config["name"]} after the colon of --config, and', *words]
  return ' '.join(words)


def _image_side(network: Network, dataset: Dataset) -> int | None:
  """Return the side in pixels of the square images that the network accepts. None if the data set's images fit.

  Also return None if the network's positions are not a square.
  """
  patch, (height, width, _) = network.config['patch'], dataset.image_shape
  whole = height % patch == width % patch == 0
  if network.resize is not None:
    return None if whole else -(-max(height, width) // patch) * patch
  if whole and (height // patch) * (width // patch) == network.patches:
    return None
  return network.grid * patch if network.grid**2 == network.patches else None
