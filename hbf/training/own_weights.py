"""Networks that this package trained, as weights to start from.

They are in run folders, in exported folders, and among the models that come with the package.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.interop.network import Network
from hbf.interop.positions import resize
from hbf.interop.table import Params, shapes_of
from hbf.interop.tensors import READERS
from hbf.models.build import abstract_params
from hbf.models.classifier import ImageClassifier
from hbf.training import export, pretrained
from hbf.training.restore import restore, stored_dataset, stored_texts
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


def read(source: str) -> Network | TextNetwork | None:
  """Return the network that `source` names, if this package trained it. None: `source` is a file of another project.

  Args:
    source: a run folder, whose latest checkpoint is read. Or one of its checkpoints, as RUN/checkpoints/STEP. Or the
      folder of an exported model. Or the name of a model that comes with the package.

  Raises:
    UserError: `source` is a folder of another kind, the exported model is edited, or something in the folder is
      damaged.
  """
  path = pathlib.Path(source).expanduser()
  if not path.exists() and source in pretrained.names():
    return _read_run(pretrained.unpack(source), 'latest', 'the pretrained model')
  if path.is_file() or path.suffix in READERS:
    return None
  if path.parent.name == 'checkpoints':
    return _read_run(path.parent.parent, path.name, f'step {path.name} of the run')
  if export.is_export(path):
    return _read_export(path)
  if not (path / 'config.json').exists():
    raise UserError(
      f'init_from={source} holds no weights: expected a run folder, a checkpoint of a run (RUN/checkpoints/STEP), an '
      f'exported model, a {", ".join(READERS)} file, or a pretrained model ({", ".join(pretrained.names())})'
    )
  return _read_run(path, 'latest', 'the run')


def _read_run(workdir: pathlib.Path, checkpoint: str, origin: str) -> Network | TextNetwork:
  config, one = load_config(workdir), jax.devices()[:1]
  if config.task != 'classification':
    texts = stored_texts(workdir)
    restored = restore(workdir, checkpoint, one, dataset=texts)
    params = _on_host(restored.params)
    return TextNetwork(origin, config.model.to_dict(), params, texts.tokenizer.to_json(), config.data.length)
  dataset = stored_dataset(workdir)
  restored = restore(workdir, checkpoint, one, dataset=dataset)
  return _of_images(origin, config.model, restored.model, restored.params, dataset.image_shape, dataset.class_names)


def _read_export(folder: pathlib.Path) -> Network:
  model, variables, about = export.load_model(folder)
  if not isinstance(model, ImageClassifier):
    raise UserError(f'{folder} holds an edited model: export the model without --edits, and start from that')
  config, shape, classes = export.model_config(about), tuple(about['image_shape']), tuple(about['classes'])
  return _of_images('the exported model', config, model, variables['params'], shape, classes)


def _of_images(
  origin: str, config: ConfigDict, model: Any, params: Any, shape: tuple[int, ...], classes: tuple[str, ...]
) -> Network:
  height, width, channels = shape
  rows, columns = height // model.embed.patch, width // model.embed.patch
  learned = 'positions' in params
  return Network(
    origin=origin,
    config=config.to_dict(),
    params=_on_host(params),
    channels=channels,
    classes=len(classes),
    patches=rows * columns,
    resize=resize if learned and rows == columns else None,
    any_size=not learned and _fits_any_size(model, shape),
    class_names=classes,
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
