"""The parameters from which a run starts: --config.init_from=WEIGHTS."""

import dataclasses
import pathlib
import shlex

import flax.linen as nn
import numpy as np
from ml_collections import ConfigDict

from hbf.arguments import home_path
from hbf.data.datasets import Dataset
from hbf.errors import UserError
from hbf.interop import origins
from hbf.interop.network import Network
from hbf.interop.table import Params, misfits, shapes_of
from hbf.models.build import abstract_params
from hbf.models.classifier import ImageClassifier
from hbf.models.language import LanguageModel
from hbf.nn.registry import stage_names, takes_heads
from hbf.tasks.task import Task
from hbf.training import own_weights
from hbf.training.own_weights import TextNetwork
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
    params: parameters of the run, float32, on the host. Parameters that depend on the classes or the vocabulary are
      missing if the run has other classes or another vocabulary. The run then draws them at random.
    source: a description of the origin of the parameters.
  """

  params: Params
  source: str


def read_initial(config: ConfigDict, model: nn.Module, task: Task) -> Initial:
  """Read the weights that `init_from` names. This package or another project has trained them.

  The config must describe the network of the weights. The classes or the vocabulary may differ. The size of images
  may differ too if the network accepts other sizes.

  Raises:
    UserError: the weights can't be read, or belong to another network than the config's. The message lists the
      tensors that don't fit, and the flags with which the config describes the network.
  """
  path = config.init_from
  found = own_weights.read(path) or origins.read(pathlib.Path(home_path(path)))
  wanted = dict(abstract_params(model, task.shape))
  if isinstance(found, Network) and isinstance(model, ImageClassifier):
    params, fresh, kept = _fitted_to_images(found, model, task, path)
  elif isinstance(found, TextNetwork) and isinstance(model, LanguageModel):
    params, fresh, kept = _fitted_to_texts(found, model, task)
  else:
    theirs, ours = ('images', 'texts') if isinstance(found, Network) else ('texts', 'images')
    raise UserError(
      f'init_from={path} holds a network for {theirs}, and task {config.task} is on {ours}: name a network for '
      f'{ours}, or leave it empty'
    )
  for name in fresh:
    wanted.pop(name, None)
    params.pop(name, None)
  faults = misfits(shapes_of(params), shapes_of(wanted), most=6)
  needed = _arguments(found, config, task)
  if faults or needed:
    listed = f' ({faults})' if faults else ''
    cure = f': it does with {needed}' if needed else ''
    raise UserError(f"{path} holds {found.origin}, which the run's config does not describe{listed}{cure}")
  return Initial(params, f'{found.origin} of {path}, with {kept}')


def _fitted_to_images(
  network: Network, model: ImageClassifier, task: Task, path: str
) -> tuple[Params, tuple[str, ...], str]:
  """Return a network's parameters, with learned positions that are resized to the images of a task.

  Also return the names of the parameters that the run must draw at random. The third result is a phrase for the
  console, which says if the run keeps the network's head.

  Args:
    network: the network that was read.
    model: the network of the run.
    task: the task of the run.
    path: the value of `init_from`, for messages.

  Raises:
    UserError: the images have another number of channels.
  """
  rows, columns, channels = task.shape
  if channels != network.channels:
    raise UserError(f'{path} is for images of {network.channels} channels, {task.dataset.name} has {channels}')
  params = dict(network.params)
  if network.resize is not None:
    positions = network.resize(params['positions'], rows // model.embed.patch, columns // model.embed.patch)
    params['positions'] = np.asarray(positions)
  alike = network.classes == model.classes and network.targets == task.dataset.targets
  if alike and network.class_names in ((), tuple(task.dataset.class_names)):
    return params, (), 'its head'
  return params, ('head',), f'a new head of {model.classes} {task.dataset.targets}'


def _fitted_to_texts(network: TextNetwork, model: LanguageModel, task: Task) -> tuple[Params, tuple[str, ...], str]:
  """Return a network's parameters, and the names of those that the run must draw at random.

  If the run has another vocabulary, it must draw the embedding and the head. The third result is a phrase for the
  console, which says if the run keeps the vocabulary.

  Args:
    network: the network that was read.
    model: the network of the run.
    task: the task of the run.
  """
  tokenizer, params = task.dataset.tokenizer, dict(network.params)
  # A model of masked tokens has one token more than its tokenizer, the mask.
  as_many = len(params['embedding']['embedding']) == model.vocabulary
  if as_many and tokenizer.to_json() == network.tokenizer:
    return params, (), 'its vocabulary'
  return params, ('embedding', 'head'), f'new vectors of {model.vocabulary} tokens'


def _arguments(found: Network | TextNetwork, config: ConfigDict, task: Task) -> str:
  """Return the flags of `hbf train` with which `config` would describe the network `found`. '' if none are needed."""
  name = found.config['name']
  theirs, ours = flatten(found.config), flatten(config.model.to_dict())
  stages = stage_names(name)
  other_stages = stage_names(config.model.name) != stages
  free = {'name', *FREE} if takes_heads(name) else {'name', 'heads', *FREE}
  # If the stages differ, so do the defaults. Then all keys are needed.
  keys = [key for key in theirs if key not in free and (other_stages or ours.get(key) != theirs[key])]
  flags = [f'model.{key}={theirs[key]}' for key in keys]
  if isinstance(found, Network):
    if side := _image_side(found, task.dataset):
      flags.append(f'data.image_size={side}')
  elif 'positions' in found.params and found.length != config.data.length:
    flags.append(f'data.length={found.length}')
  words = [shlex.quote(f'--config.{flag}') for flag in flags]
  if other_stages:
    words = [f'model={name} after the colon of --config, and', *words]
  return ' '.join(words)


def _image_side(network: Network, dataset: Dataset) -> int | None:
  """Return the side, in pixels, of the square images that the network needs.

  Return None if the images of the data set already fit, or if the network's patches do not form a square.
  """
  patch, (height, width, _) = network.config['patch'], dataset.image_shape
  whole = height % patch == width % patch == 0
  if network.resize is not None or network.any_size:
    return None if whole else -(-max(height, width) // patch) * patch
  if whole and (height // patch) * (width // patch) == network.patches:
    return None
  return network.grid * patch if network.grid**2 == network.patches else None
