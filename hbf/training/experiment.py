"""From a config to everything a run needs; all that can be wrong is found here, before anything is written."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.datasets import Dataset, load
from hbf.data.inputs import Input, channel_statistics, make_input
from hbf.data.mixing import read_mix
from hbf.data.order import TrainOrder
from hbf.data.sources import Source, hold_out
from hbf.data.transforms import check_size, read_transforms
from hbf.errors import UserError
from hbf.evaluation.evaluator import Evaluator
from hbf.models.build import build_model, count_parameters, flops_per_image
from hbf.models.classifier import ImageClassifier
from hbf.training import processes
from hbf.training.durations import Clock, Every
from hbf.training.initial import Initial, read_initial
from hbf.training.optimizer import make_optimizer, make_schedule
from hbf.training.sharding import (
  batch_sharding,
  batch_shares,
  check_batch_size,
  check_tensor,
  make_mesh,
  replicated,
  state_sharding,
)
from hbf.training.state import Objective


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a config and a data set's description say of a run, before an image is read.

  Attributes:
    config: of the run.
    dataset: where its images come from.
    splits: sources of train, validation (missing if none is held out) and test.
    model: the network.
    parameters: learned numbers of the model.
    clock: length of the run.
    due: by event (log, evaluate, checkpoint): at which steps.
    schedule: learning rate by step.
    optimizer: the gradient transformation.
    initial: parameters to start from; None: fresh ones, or those of a run that is resumed.
  """

  config: ConfigDict
  dataset: Dataset
  splits: Mapping[str, Source]
  model: ImageClassifier
  parameters: int
  clock: Clock
  due: Mapping[str, Every]
  schedule: optax.Schedule
  optimizer: optax.GradientTransformation
  initial: Initial | None


@dataclasses.dataclass(frozen=True)
class Experiment(Plan):
  """A run, ready to start; its config is resolved: nothing in it is left to be measured.

  Attributes:
    mesh: the devices.
    inputs: by split.
    order: which examples form which step.
    objective: what a step minimises.
    evaluator: exact figures of a split.
    steps_per_call: most steps that the devices are asked for at once.
    flops_per_image: of a forward pass.
  """

  mesh: Mesh
  inputs: Mapping[str, Input]
  order: TrainOrder
  objective: Objective
  evaluator: Evaluator
  steps_per_call: int
  flops_per_image: int


def make_plan(config: ConfigDict, resumed: bool = False, dataset: Dataset | None = None) -> Plan:
  """Checks all of a config that can be checked without images and devices.

  Args:
    config: of the run.
    resumed: whether the run goes on from a checkpoint, so that it doesn't need the file of `init_from`.
    dataset: to plan with; None: the config's.

  Raises:
    UserError: something in the config is wrong, or the data set isn't there.
  """
  _check_ranges(config)
  dataset = dataset or load_dataset(config)
  check_size(read_transforms(config.data.transforms), dataset.image_shape)
  if read_mix(config.data.mix) and config.train.batch_size == 1:
    raise UserError(
      'data.mix needs another image to mix one with: set train.batch_size to 2 or more, or data.mix to ()'
    )
  model = build_model(config.model, len(dataset.classes))
  parameters = count_parameters(model, dataset.image_shape)
  splits = make_splits(dataset, config.data.validation)
  examples = len(splits['train'])
  if examples < config.train.batch_size:
    raise UserError(f'train.batch_size {config.train.batch_size} is more than the {examples} examples of train')
  clock = Clock(examples, config.train.batch_size, config.train.epochs)
  due = {name: clock.every(f'{name}.every', config[name].every) for name in ('log', 'evaluate', 'checkpoint')}
  schedule = make_schedule(config.optimizer, clock)
  optimizer = make_optimizer(config.optimizer, schedule)
  initial = read_initial(config, model, dataset) if config.init_from and not resumed else None
  return Plan(config, dataset, splits, model, parameters, clock, due, schedule, optimizer, initial)


def _check_ranges(config: ConfigDict) -> None:
  for section, key in (('train', 'accumulate'), ('evaluate', 'batch_size'), ('checkpoint', 'keep')):
    if config[section][key] < 1:
      raise UserError(f'{section}.{key} must be 1 or more: it is {config[section][key]}')
  if not 0 < config.train.epochs < math.inf:
    raise UserError(f'train.epochs must be more than 0, and finite: it is {config.train.epochs}')
  for section, key in (('optimizer', 'layer_decay'), ('optimizer', 'minimum_rate'), ('train', 'label_smoothing')):
    if not 0 <= config[section][key] <= 1:
      raise UserError(f'{section}.{key} must be from 0 to 1: it is {config[section][key]}')
  if not 0 <= config.train.average < 1:
    raise UserError(
      f'train.average is the decay of a moving average, from 0 (none) to below 1: it is {config.train.average}'
    )


def prepare(config: ConfigDict, resumed: bool = False, devices: Sequence[jax.Device] | None = None) -> Experiment:
  """Builds and checks everything.

  Args:
    config: of the run.
    resumed: as for `make_plan`.
    devices: that it runs on; None: all.

  Raises:
    UserError: something in the config or the data is wrong.
  """
  with processes.agreed():  # before their devices work together
    mesh = make_mesh(jax.devices() if devices is None else devices, config.mesh)
    plan = make_plan(config, resumed)
    check_tensor(config.model, mesh)
    check_batch_size('train.batch_size', config.train.batch_size, mesh, config.train.accumulate)
    inputs = {name: open_split(config, mesh, source) for name, source in plan.splits.items()}
  config = with_statistics(config, inputs['train'])
  return Experiment(
    **{**vars(plan), 'config': config},
    mesh=mesh,
    inputs=inputs,
    order=TrainOrder(config.seed, len(inputs['train']), config.train.batch_size),
    objective=make_objective(config),
    evaluator=make_evaluator(config, plan.model, mesh),
    steps_per_call=steps_per_call(config.train.steps_per_call, inputs['train'].resident is not None, mesh),
    flops_per_image=flops_per_image(plan.model, plan.dataset.image_shape),
  )


def load_dataset(config: ConfigDict) -> Dataset:
  """The data set of a config."""
  data = config.data
  return load(
    name=data.name,
    dir=data.dir,
    root=data.root,
    image_size=data.image_size,
    download=data.download,
    test_split=data.test_split,
  )


def make_splits(dataset: Dataset, validation: float) -> dict[str, Source]:
  """Sources of train, validation (if a part of train is held out) and test."""
  if not 0 <= validation < 1:
    raise UserError(f'data.validation is the part of train held out, from 0 to below 1: it is {validation}')
  train, held_out = hold_out(dataset.splits['train'], validation)
  if not len(train):
    raise UserError(f'data.validation {validation} leaves no example to train on: hold out less')
  splits = {'train': train, 'validation': held_out, 'test': dataset.splits['test']}
  return {name: source for name, source in splits.items() if len(source)}


def open_split(config: ConfigDict, mesh: Mesh, source: Source) -> Input:
  """The input of a split, of the kind that the config asks for."""
  return make_input(
    config.data.input,
    source,
    batch_sharding(mesh),
    workers=config.data.workers,
    resident_bytes=config.data.resident_bytes,
  )


def with_statistics(config: ConfigDict, train: Input) -> ConfigDict:
  """The config with `data.mean` and `data.std` measured on train, unless they are given."""
  if bool(config.data.mean) != bool(config.data.std):
    raise UserError('give both data.mean and data.std, or neither to have them measured')
  resolved = config.copy_and_resolve_references()
  if not config.data.mean:
    resolved.data.mean, resolved.data.std = channel_statistics(train)
  return resolved


def steps_per_call(asked: int, resident: bool, mesh: Mesh) -> int:
  """Steps that share a call: as many as asked for; if 0, ten where a step is short and its batch only indices."""
  if asked < 0:
    raise UserError(f'train.steps_per_call must be 1 or more, or 0 for a choice by device: it is {asked}')
  return asked or (10 if resident and mesh.devices.flat[0].platform != 'cpu' else 1)


def make_objective(config: ConfigDict) -> Objective:
  """What a step minimises."""
  data, train = config.data, config.train
  return Objective(
    mean=tuple(data.mean),
    std=tuple(data.std),
    transforms=read_transforms(data.transforms),
    mix=read_mix(data.mix),
    label_smoothing=train.label_smoothing,
    accumulate=train.accumulate,
    seed=config.seed,
  )


def make_evaluator(config: ConfigDict, model: ImageClassifier, mesh: Mesh) -> Evaluator:
  """The evaluator; its batches are rounded up to what the devices can share."""
  size = -(-config.evaluate.batch_size // batch_shares(mesh)) * batch_shares(mesh)
  return Evaluator(model, tuple(config.data.mean), tuple(config.data.std), size, replicated(mesh))


def with_sharding(shapes: Any, mesh: Mesh) -> Any:
  """The shapes with the sharding that each array has on this mesh."""
  return jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
    shapes,
    state_sharding(mesh, shapes),
  )
