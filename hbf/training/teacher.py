"""The teacher of a run: --config.train.teacher=WEIGHTS."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.datasets import Dataset
from hbf.data.pipeline.inputs import Resident
from hbf.data.text.texts import Texts
from hbf.errors import UserError, warn
from hbf.interop.table import shapes_of
from hbf.models.build import abstract_params, flops_per_example
from hbf.tasks.task import Task
from hbf.training import own_weights
from hbf.training.checksum import sha256
from hbf.training.distillation import Distillation, WithTeacher
from hbf.training.own_weights import Trained
from hbf.training.sharding import check_tensor, state_sharding, with_sharding
from hbf.training.workdir import TEACHER, read_json, write_json


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A trained network from whose answers a run learns.

  Attributes:
    source: the value of `train.teacher`.
    network: the network with its parameters.
    flops: the floating-point operations of the network's forward pass for one example.
    weight: the weight of the teacher's answers in the loss, above 0.
    temperature: the number that divides all logits before they are compared.
  """

  source: str
  network: Trained
  flops: int
  weight: float
  temperature: float

  def distillation(self, config: ConfigDict) -> Distillation:
    """Return the loss of distillation for a run. Its `config` must have the measured data.mean and data.std."""
    data, network = config.data, self.network
    loss = Distillation(network.model, self.weight, self.temperature)
    if not network.mean:
      return loss
    return dataclasses.replace(loss, ours=(tuple(data.mean), tuple(data.std)), theirs=(network.mean, network.std))

  def words(self) -> str:
    """Return a phrase with the weight and the temperature, for the console."""
    return f'with weight {self.weight:g} and temperature {self.temperature:g}'

  def beside(self, data: Resident, mesh: Mesh) -> WithTeacher:
    """Copy the teacher's parameters to the devices, sharded like those of a run. Return them together with `data`.

    Raises:
      UserError: the mesh can't split the network.
    """
    self.check_mesh(mesh)
    params = self.network.params
    return WithTeacher(data, jax.device_put(params, state_sharding(mesh, params)))

  def abstract(self, data: Resident, mesh: Mesh) -> WithTeacher:
    """Return what `beside` returns, but with shapes and shardings in place of arrays. `data` has the same form."""
    self.check_mesh(mesh)
    shapes: Any = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), self.network.params)
    return WithTeacher(data, with_sharding(shapes, mesh))

  def check_mesh(self, mesh: Mesh) -> None:
    """Raise UserError if the mesh axis `tensor` can't split the network."""
    try:
      check_tensor(self.network.config, mesh)
    except UserError as error:
      raise UserError(f'train.teacher={self.source}: {error}') from None

  def check(self, workdir: pathlib.Path) -> None:
    """Compare the checksum of the parameters with the one in teacher.json of a run folder, if it has the file.

    Raises:
      UserError: the run began with other parameters of the teacher.
    """
    stored = read_json(workdir / TEACHER, 'restore it from a copy', 'sha256')
    if stored is not None and stored['sha256'] != self._checksum:
      raise UserError(
        f'train.teacher={self.source} holds other weights than when the run in {workdir} began, such as those of a '
        'later step: name the same weights, for example as RUN/checkpoints/STEP, or choose another --workdir'
      )

  def claim(self, workdir: pathlib.Path) -> None:
    """Write the checksum of the parameters to teacher.json in a run folder. If it has the file, see `check`."""
    self.check(workdir)
    if not (workdir / TEACHER).exists():
      write_json(workdir / TEACHER, {'source': self.source, 'sha256': self._checksum})

  @functools.cached_property
  def _checksum(self) -> str:
    return sha256(self.network.params)


def read_teacher(config: ConfigDict, task: Task) -> Teacher | None:
  """Load the teacher that a config names, and return it. None: the run has no teacher, or the teacher's weight is 0.

  Raises:
    UserError: train.teacher_weight is above 0 without a teacher. Or the teacher can't be read. Or it does not fit the
      run: it has another task, other classes or another vocabulary, or takes examples of another size.
  """
  source, weight, temperature = (config.train[key] for key in ('teacher', 'teacher_weight', 'temperature'))
  if weight and not source:
    raise UserError(
      f'train.teacher_weight is {weight:g} without a teacher: set train.teacher to a trained network, or '
      'train.teacher_weight to 0'
    )
  if not weight:
    if source:
      warn(
        f'train.teacher={source} has no effect, because train.teacher_weight is 0: set the weight, for example to 0.5'
      )
    return None
  network = own_weights.find(source, 'train.teacher')
  if network is None:
    raise UserError(
      f'train.teacher={source} is a file: expected a run folder, a checkpoint of a run (RUN/checkpoints/STEP), an '
      'exported model or the name of a pretrained model'
    )
  if fault := _fault(network, config.task, task):
    raise UserError(f'train.teacher={source} {fault}: name a network that was trained on such data')
  return Teacher(source, network, flops_per_example(network.model, task.shape), weight, temperature)


def _fault(network: Trained, name: str, task: Task) -> str:
  """Return the reason why a network can't teach `task`, a task of the kind `name`. '' if it can."""
  theirs, ours = network.data, task.dataset
  if network.task != name:
    return f'was trained for task {network.task}, and the run has task {name}'
  if isinstance(theirs, Dataset):
    if theirs.image_shape != tuple(task.shape):
      return f'takes images of {_size(theirs.image_shape)}, and those of {ours.name} have {_size(task.shape)}'
    if not _same_classes(theirs.class_names, ours.class_names):
      return f'has other classes ({_some(theirs.class_names)}) than {ours.name} ({_some(ours.class_names)})'
    return ''
  assert isinstance(ours, Texts)
  if theirs.tokenizer.to_json() != ours.tokenizer.to_json():
    found = [f'{texts.tokenizer.kind}, {texts.tokenizer.vocabulary}' for texts in (theirs, ours)]
    return f'has another vocabulary ({found[0]}) than {ours.name} ({found[1]})'
  length = task.shape[0]
  fits = network.length >= length and shapes_of(abstract_params(network.model, task.shape)) == shapes_of(
    network.params
  )
  return '' if fits else f'takes windows of {network.length} tokens, and data.length is {length}'


def _same_classes(theirs: tuple[str, ...], ours: tuple[str, ...]) -> bool:
  """Return True if the names of the classes are equal, or if one side has the names 0, 1, … for as many classes."""
  numbers = tuple(map(str, range(len(ours))))
  return theirs == ours or (len(theirs) == len(ours) and numbers in (theirs, ours))


def _size(shape: tuple[int, ...]) -> str:
  return '×'.join(map(str, shape))


def _some(names: tuple[str, ...]) -> str:
  shown = ', '.join(names[:3])
  return f'{len(names)}: {shown}, …' if len(names) > 3 else f'{len(names)}: {shown}'
