"""The network of a run, restored from a checkpoint."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.datasets import Dataset
from hbf.data.images.targets import CLASSES, TASK
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import read_tokenizer
from hbf.errors import UserError
from hbf.models.build import abstract_params
from hbf.tasks.registry import make_task, on_images
from hbf.tasks.task import Task
from hbf.training.checkpoints import Checkpoints
from hbf.training.edits import Edits
from hbf.training.edits_file import edits_of
from hbf.training.schema import with_gone
from hbf.training.sharding import make_mesh, with_sharding
from hbf.training.side_file import check_checkpoint
from hbf.training.workdir import (
  DATA_CURE,
  check_data,
  check_kinds,
  check_shape,
  damaged,
  kind_of,
  load_config,
  read_data,
)
from hbf.training.writers import validation_scores


@dataclasses.dataclass(frozen=True)
class Restored:
  """The network of a run at a checkpoint.

  Attributes:
    config: the config of the run.
    mesh: the devices.
    task: the task of the run.
    step: the step of the checkpoint.
    model: the network.
    params: the parameters or their moving average, as arrays on the mesh.
  """

  config: ConfigDict
  mesh: Mesh
  task: Task
  step: int
  model: nn.Module
  params: Any


@dataclasses.dataclass(frozen=True)
class Found:
  """A checkpoint of a run whose parameters are not read yet. See `Restored` for the other attributes.

  Attributes:
    checkpoints: the checkpoints of the run.
  """

  config: ConfigDict
  mesh: Mesh
  task: Task
  step: int
  model: nn.Module
  checkpoints: Checkpoints

  def restore(self, average: bool) -> Restored:
    """Read the parameters, or their moving average. If processes share the mesh, all must call this together."""
    abstract = abstract_params(self.model, self.task.shape)
    former = with_gone(abstract)
    former = former and with_sharding(former, self.mesh)
    shapes = with_sharding(abstract, self.mesh)
    params = self.checkpoints.restore_params(self.step, shapes, former, average=average)
    return Restored(self.config, self.mesh, self.task, self.step, self.model, params)


def restore(
  workdir: pathlib.Path,
  checkpoint: str,
  devices: Sequence[jax.Device] | None = None,
  average: bool = False,
  dataset: Any = None,
  **moved: str,
) -> Restored:
  """Restore a checkpoint. See `hbf.training.evaluate.evaluate_workdir` for the arguments and the errors.

  If `dataset` is given, this function does not check that it is the data set of the run.
  """
  return find(workdir, checkpoint, devices, dataset, **moved).restore(average)


def find(
  workdir: pathlib.Path, checkpoint: str, devices: Sequence[jax.Device] | None, dataset: Any, **moved: str
) -> Found:
  """Find a checkpoint and the data of its run, without waiting for other processes; see `restore`."""
  config = load_config(workdir)
  config.data.update({key: value for key, value in moved.items() if value})
  checkpoints = open_read_only(workdir)
  step = checkpoints.find(checkpoint)
  mesh = _make_mesh(jax.devices() if devices is None else devices, config)
  task, model = make_network(config, dataset, mesh.devices.flat[0].platform)
  if dataset is None:
    check_data(workdir, task.identity())
  return Found(config, mesh, task, step, model, checkpoints)


def make_network(config: ConfigDict, dataset: Any, platform: str) -> tuple[Task, nn.Module]:
  """Return the task and the network of a run, for devices of a platform. This may change `config`.

  Args:
    config: the config of the run.
    dataset: the data set. None: the one that the config names.
    platform: the platform, such as 'cpu'.
  """
  task = make_task(config, dataset)
  if platform != 'tpu' and (config.model.stage2 or {}).get('implementation') == 'pallas':
    config.model.stage2.implementation = 'xla'  # the same sums; the Pallas kernels are for TPUs
  return task, task.make_model(config.model)


def with_edits(restored: Restored, workdir: pathlib.Path, average: bool, edits: Edits | bool = True) -> Restored:
  """Return the network with edits.

  Args:
    restored: the network without edits.
    workdir: the run folder.
    average: True if the network's parameters are the moving average.
    edits: True for the edits in the run folder, or an `Edits` object.

  Raises:
    UserError: the run has no edits, or they belong to another checkpoint.
  """
  if isinstance(edits, Edits):
    check_checkpoint('edits', edits, restored.step, average)
  else:
    edits = edits_of(workdir, restored.step, average)
  model, params = edits.applied(restored.model, restored.params)
  return dataclasses.replace(restored, model=model, params=params)


def _make_mesh(devices: Sequence[jax.Device], config: ConfigDict) -> Mesh:
  """Return the mesh of the run. If these devices can't form it, return a mesh that only splits batches."""
  try:
    return make_mesh(devices, config.mesh)
  except UserError:
    return make_mesh(devices)


def open_read_only(workdir: pathlib.Path) -> Checkpoints:
  """Open the checkpoints of a run. Nothing is written or deleted."""
  ranks = kind_of(workdir).scores[0]
  scores = validation_scores(workdir, ranks, load_config(workdir).checkpoint.rank)
  return Checkpoints(workdir / 'checkpoints', ranks=ranks, scores=scores, read_only=True)


def check_on_images(workdir: pathlib.Path) -> None:
  """Raise UserError unless the folder holds a run of a task on images."""
  if not on_images(task := load_config(workdir).task):
    raise UserError(
      f'{workdir} holds a run of task {task}: give a run of task classification, or of another task on images'
    )


def check_classifies(workdir: pathlib.Path, what: str) -> None:
  """Raise UserError unless the folder holds a run of task classification.

  Args:
    workdir: the folder.
    what: the command or flag that needs such a run, for the message.
  """
  if (task := load_config(workdir).task) != 'classification':
    raise UserError(
      f'{workdir} holds a run of task {task}, and {what} needs classes: give a run of task classification'
    )


def stored_data(workdir: pathlib.Path) -> Dataset | Texts:
  """Return the data set of a run without its examples; see `stored_dataset` and `stored_texts`."""
  return stored_dataset(workdir) if on_images(load_config(workdir).task) else stored_texts(workdir)


def stored_dataset(workdir: pathlib.Path) -> Dataset:
  """Return the data set of a run on images, without its images.

  Raises:
    UserError: the folder does not describe the data set.
  """
  data = read_data(workdir, 'name', 'classes', 'image_shape')
  if data is None:
    raise UserError(f'{workdir} has no data.json, which names the classes: it is of older code, train again')
  path, names = workdir / 'data.json', data.get('names', {})
  check_kinds(data, path, DATA_CURE, name=str, classes=list, image_shape=list)
  check_shape(data['image_shape'], path, DATA_CURE)
  check_kinds(names, path, DATA_CURE)
  if not all(isinstance(name, str) for name in (*data['classes'], *names.values())):
    raise damaged(path, 'a name of a class is not a text', DATA_CURE)
  if (targets := data.get('targets', CLASSES)) not in [*TASK]:
    raise damaged(path, f'targets is {targets!r}', DATA_CURE)
  return Dataset(data['name'], tuple(data['classes']), tuple(data['image_shape']), {}, names, targets)


def stored_texts(workdir: pathlib.Path) -> Texts:
  """Return the name and the tokenizer of the texts of a run, without the texts.

  Raises:
    UserError: the folder does not describe the vocabulary.
  """
  about = read_data(workdir, 'name', 'tokenizer')
  if about is None:
    raise UserError(f'{workdir} has no data.json, which holds the vocabulary: restore it from a copy')
  return Texts(about['name'], read_tokenizer(about['tokenizer']), {})
