"""Networks that this package trained, as weights to start from and as teachers.

They are in run folders, in exported folders, and among the models that come with the package.
"""

import dataclasses
import pathlib
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from ml_collections import ConfigDict

from hbf.arguments import home_path
from hbf.data.datasets import Dataset
from hbf.data.text.texts import Texts
from hbf.errors import UserError
from hbf.interop.network import Network
from hbf.interop.positions import resize
from hbf.interop.table import Params, shapes_of
from hbf.interop.tensors import READERS
from hbf.models.build import abstract_params
from hbf.models.classifier import ImageClassifier
from hbf.training import export, pretrained
from hbf.training.restore import make_network, restore, stored_data
from hbf.training.workdir import load_config


@dataclasses.dataclass(frozen=True)
class TextNetwork:
  """A language model of this package.

  Attributes:
    origin: the kind of its source, such as 'the run'.
    config: the `model` part of a config that describes the network.
    params: the parameters, float32, on the host.
    tokenizer: the tokenizer, as JSON.
    length: the largest number of tokens of a text.
  """

  origin: str
  config: dict[str, Any]
  params: Params
  tokenizer: dict[str, Any]
  length: int


@dataclasses.dataclass(frozen=True)
class Trained:
  """A trained network of this package.

  Attributes:
    origin: the kind of its source, such as 'the run'.
    task: the task, such as 'next_token'.
    config: the `model` part of a config that describes the network.
    model: the network.
    params: the parameters, float32, on the host.
    data: the data set on which it was trained, without examples.
    mean: the mean of each channel of its images, with white as 1. () for texts.
    std: the standard deviation of each channel. () for texts.
    length: the largest number of tokens of a text. 0 for images.
  """

  origin: str
  task: str
  config: ConfigDict
  model: nn.Module
  params: Params
  data: Dataset | Texts
  mean: tuple[float, ...] = ()
  std: tuple[float, ...] = ()
  length: int = 0


def read(source: str) -> Network | TextNetwork | None:
  """Return the network that `source` names, as weights to start from. None: `source` is a file of another project.

  `source` is the value of `init_from`; see `find`.
  """
  found = find(source, 'init_from')
  if found is None:
    return None
  if isinstance(found.data, Texts):
    config = found.config.to_dict()
    return TextNetwork(found.origin, config, found.params, found.data.tokenizer.to_json(), found.length)
  return _of_images(found, found.data)


def find(source: str, key: str) -> Trained | None:
  """Return the network that `source` names, if this package trained it. None: `source` is a file of another project.

  Args:
    source: a run folder, which stands for its latest checkpoint. Or one of its checkpoints, as RUN/checkpoints/STEP.
      Or the folder of an exported model. Or the name of a model that comes with the package.
    key: the config key that has this value, for messages.

  Raises:
    UserError: `source` is a folder of another kind, the exported model is edited, or something in the folder is
      damaged.
  """
  path = pathlib.Path(home_path(source))
  if not path.exists() and source in pretrained.names():
    return _find_packaged(source)
  if path.is_file() or path.suffix in READERS:
    return None
  if export.is_export(path):
    return _find_export(path)
  if (path / 'config.json').exists():
    return _find_run(path, 'latest', 'the run')
  if path.parent.name != 'checkpoints':
    raise UserError(
      f'{key}={source} holds no weights: expected a run folder, a checkpoint of a run (RUN/checkpoints/STEP), an '
      f'exported model, a {", ".join(READERS)} file, or a pretrained model ({", ".join(pretrained.names())})'
    )
  return _find_run(path.parent.parent, path.name, f'step {path.name} of the run')


def _find_run(workdir: pathlib.Path, checkpoint: str, origin: str) -> Trained:
  one, data = jax.local_devices()[:1], stored_data(workdir)  # a process reaches only its own
  restored = restore(workdir, checkpoint, one, dataset=data)
  return _trained(origin, restored.config, restored.model, _on_host(restored.params), data)


def _find_packaged(name: str) -> Trained:
  # No run folder is made: several processes would have to write its checkpoint together.
  folder, params = pretrained.folder_of(name), pretrained.read_params(name)
  config, data = load_config(folder), stored_data(folder)
  _, model = make_network(config, data, jax.local_devices()[0].platform)
  return _trained('the pretrained model', config, model, params, data)


def _trained(origin: str, config: ConfigDict, model: nn.Module, params: Params, data: Dataset | Texts) -> Trained:
  found = Trained(origin, config.task, config.model, model, params, data)
  if isinstance(data, Dataset):
    return dataclasses.replace(found, mean=tuple(config.data.mean), std=tuple(config.data.std))
  return dataclasses.replace(found, length=config.data.length)


def _find_export(folder: pathlib.Path) -> Trained:
  model, variables, about = export.load_model(folder)
  if not isinstance(model, ImageClassifier):
    raise UserError(f'{folder} holds an edited model: export the model without --edits, and start from that')
  height, width, channels = about['image_shape']
  targets = export.image_task(about).targets
  return Trained(
    origin='the exported model',
    task=about['task'],
    config=export.model_config(about),
    model=model,
    params=_on_host(variables['params']),
    data=Dataset(about['dataset'], tuple(about['classes']), (height, width, channels), {}, targets=targets),
    mean=tuple(about['mean']),
    std=tuple(about['std']),
  )


def _of_images(found: Trained, dataset: Dataset) -> Network:
  model, (height, width, channels) = found.model, dataset.image_shape
  assert isinstance(model, ImageClassifier)
  rows, columns = height // model.embed.patch, width // model.embed.patch
  learned = 'positions' in found.params
  return Network(
    origin=found.origin,
    config=found.config.to_dict(),
    params=found.params,
    channels=channels,
    classes=len(dataset.classes),
    patches=rows * columns,
    resize=resize if learned and rows == columns else None,
    any_size=not learned and _fits_any_size(model, dataset.image_shape),
    class_names=dataset.class_names,
    targets=dataset.targets,
  )


def _fits_any_size(model: ImageClassifier, shape: tuple[int, ...]) -> bool:
  """Return True if the shapes of the parameters do not depend on the size of the images."""
  height, width, channels = shape
  try:
    larger = abstract_params(model, (2 * height, 2 * width, channels))
  except UserError:  # a stage is for one number of tokens
    return False
  return shapes_of(larger) == shapes_of(abstract_params(model, shape))


def _on_host(params: Any) -> Any:
  return jax.tree.map(np.asarray, params)
