"""Everything that a run needs, made from a config. A mistake in the config is found before the run writes a file."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.config.resolve import check, naming_keys, resolve
from hbf.data.augment.copies import Copies
from hbf.data.pipeline.host import Order
from hbf.data.pipeline.inputs import Input, Resident
from hbf.errors import UserError
from hbf.models.build import abstract_params, count_parameters, flops_per_example
from hbf.tasks.evaluator import Evaluator
from hbf.tasks.registry import make_task
from hbf.tasks.task import Task, TaskData
from hbf.training import processes
from hbf.training.average import check_average
from hbf.training.batch_parts import batch_parts
from hbf.training.checksum import sha256
from hbf.training.distillation import WithTeacher
from hbf.training.durations import Clock, Every
from hbf.training.initial import Initial, read_initial
from hbf.training.loggers import check_loggers
from hbf.training.noise import check_noise_scale
from hbf.training.optimizer import make_optimizer, make_schedule
from hbf.training.profiling import TracedSteps, traced_steps
from hbf.training.rules import rules_of
from hbf.training.sharding import (
  batch_sharding,
  batch_shares,
  check_batch_size,
  check_implementation,
  check_tensor,
  make_mesh,
)
from hbf.training.state import Objective
from hbf.training.teacher import Teacher, read_teacher


@dataclasses.dataclass(frozen=True)
class Plan:
  """The parts of a run that do not depend on the examples, only on the config and the description of the data set.

  Attributes:
    config: the config of the run.
    task: the task. In a plan it lacks values that are measured on the training data, such as the channels' means.
    splits: the sources by split: train, validation (missing if nothing is held out) and test.
    model: the network.
    parameters: the number of learned parameters.
    clock: the length of the run.
    due: the steps at which each of the events 'log', 'evaluate' and 'checkpoint' is due.
    traced: the steps that the profiler traces. None: no steps.
    schedule: a function from the step to the learning rate.
    optimizer: the gradient transformation.
    initial: the parameters that `init_from` names. None: the run draws random ones, or is resumed.
    teacher: the network whose answers the run learns too (`train.teacher`). None: there is no teacher.
  """

  config: ConfigDict
  task: Task
  splits: Mapping[str, Any]
  model: nn.Module
  parameters: int
  clock: Clock
  due: Mapping[str, Every]
  traced: TracedSteps | None
  schedule: optax.Schedule
  optimizer: optax.GradientTransformation
  initial: Initial | None
  teacher: Teacher | None

  @property
  def teacher_flops(self) -> int:
    """Return the floating-point operations of the teacher's forward pass for one example. 0 without a teacher."""
    return self.teacher.flops if self.teacher else 0


@dataclasses.dataclass(frozen=True)
class Experiment(Plan):
  """A run that is ready to start. Its config has all values, also those that are measured on the data.

  Attributes:
    mesh: the devices.
    inputs: the opened sources by split, which make batches (`hbf.data.pipeline.inputs`).
    resident: the arrays in device memory that every step needs beside its batch: the training data, if they fit, and
      the parameters of the teacher, if there is one.
    order: the order of the training examples.
    first_order: the order of the batch from which parameters are initialized.
    objective: the function that a step minimizes.
    evaluator: a function that measures the scores of parameters on a split.
    copies_evaluator: like `evaluator`, but the network's outputs for several changed copies of an image are averaged
      (`evaluate.copies`). None if the run uses no copies.
    steps_per_call: the largest number of steps in one call of the compiled program.
    flops_per_unit: the floating-point operations of a forward pass for one image, or for one token of a text.
  """

  mesh: Mesh
  inputs: Mapping[str, Input]
  resident: Resident | WithTeacher
  order: Order
  first_order: Order
  objective: Objective
  evaluator: Evaluator
  copies_evaluator: Evaluator | None
  steps_per_call: int
  flops_per_unit: int


def make_plan(config: ConfigDict, resumed: bool = False, dataset: Any = None) -> Plan:
  """Return the parts of a run for a config, after all checks that need neither examples nor devices.

  Args:
    config: the config of the run.
    resumed: True if the run continues from a checkpoint. Then `init_from` is not used.
    dataset: the data set. None: the one that the config names.

  Raises:
    UserError: something in the config is wrong, or the data set is missing.
  """
  config = resolve(config)
  check(config)
  task = make_task(config, dataset)
  with naming_keys(config):
    model = task.make_model(config.model)
    parameters = count_parameters(model, task.shape)
  rules_of(abstract_params(model, task.shape))  # raises if a parameter has no rule
  splits = make_splits(task, config.data.validation)
  if config.train.patience and 'validation' not in splits:
    raise UserError(
      f'train.patience is {config.train.patience}, but no data are held out to evaluate: set data.validation above '
      '0, or train.patience to 0'
    )
  if config.optimizer.schedule == 'plateau' and 'validation' not in splits:
    raise UserError(
      'optimizer.schedule is plateau, but no data are held out to evaluate: set data.validation above 0, or '
      'optimizer.schedule to another schedule'
    )
  examples = len(splits['train'])
  if examples < config.train.batch_size:
    size = config.train.batch_size
    raise UserError(
      f'train.batch_size {size} is more than the {examples} examples of train: set it to {examples} or less'
    )
  clock = Clock(examples, config.train.batch_size, config.train.epochs)
  due = {name: clock.every(f'{name}.every', config[name].every) for name in ('log', 'evaluate', 'checkpoint')}
  traced = traced_steps(config.log.profile, clock.steps)
  check_loggers(config.log.to)
  check_average(config)
  check_noise_scale(config)
  schedule = make_schedule(config.optimizer, clock)
  optimizer = make_optimizer(config.optimizer, schedule)
  initial = read_initial(config, model, task) if config.init_from and not resumed else None
  teacher = read_teacher(config, task)
  return Plan(config, task, splits, model, parameters, clock, due, traced, schedule, optimizer, initial, teacher)


def gradients_per_step(config: ConfigDict) -> int:
  """Return the number of gradients of the whole batch that a step computes: 2 with SAM, else 1."""
  return 2 if config.optimizer.sam else 1


def training_operations(
  flops: int, clock: Clock, teacher_flops: int = 0, gradients: int = 1, steps: int | None = None
) -> float:
  """Return the floating-point operations of a run. A backward pass counts as two forward passes.

  Args:
    flops: the floating-point operations of a forward pass for one example.
    clock: the length of the run.
    teacher_flops: the floating-point operations of the teacher's forward pass for one example. The teacher has no
      backward pass.
    gradients: the number of gradients in a step (`gradients_per_step`).
    steps: the number of steps of a run that ended early. None: all steps.
  """
  return gradients * (3.0 * flops + teacher_flops) * clock.batch_size * (clock.steps if steps is None else steps)


def prepare(
  config: ConfigDict,
  resumed: bool = False,
  devices: Sequence[jax.Device] | None = None,
  dataset: Any = None,
) -> Experiment:
  """Build and check everything that a run needs.

  Args:
    config: the config of the run.
    resumed: see `make_plan`.
    devices: the devices of the run. None: all.
    dataset: see `make_plan`.

  Raises:
    UserError: something in the config or the data is wrong.
  """
  with processes.raise_everywhere():  # before the devices of the processes work together
    mesh = make_mesh(jax.devices() if devices is None else devices, config.mesh)
    plan = make_plan(config, resumed, dataset)
    config = plan.config
    check_implementation(config.model, mesh)
    check_tensor(config.model, mesh)
    check_batch_size('train.batch_size', config.train.batch_size, mesh, config.train.accumulate)
    inputs = {name: plan.task.open(source, batch_sharding(mesh)) for name, source in plan.splits.items()}
  _check_same_weights(plan)
  data = inputs['train'].resident
  resident = plan.teacher.beside(data, mesh) if plan.teacher else data
  config = plan.task.measure(config, inputs['train'])
  task = make_task(config, plan.task.dataset)
  evaluator_of = functools.partial(make_evaluator, config, task, plan.model, mesh, plan.splits)
  ordered = plan.splits['train'], config.seed, config.train.batch_size
  return Experiment(
    **{**vars(plan), 'config': config, 'task': task},
    mesh=mesh,
    inputs=inputs,
    resident=resident,
    order=task.train_order(*ordered),
    first_order=task.first_order(*ordered),
    objective=make_objective(config, task, plan.teacher, batch_parts(config, plan.model, task.shape, mesh)),
    evaluator=evaluator_of(),
    copies_evaluator=evaluator_of(task.copies) if task.copies else None,
    steps_per_call=steps_per_call(config.train.steps_per_call, inputs['train'].resident is not None, mesh),
    flops_per_unit=flops_per_example(plan.model, task.shape) // task.units,
  )


def _check_same_weights(plan: Plan) -> None:
  """Check that all processes have read the same weights, to start from and to learn from."""
  if jax.process_count() == 1:
    return
  read = {'init_from': plan.initial, 'train.teacher': plan.teacher and plan.teacher.network}
  processes.check_same(
    {f'the checksum of the weights of {key}': sha256(found.params)[:12] for key, found in read.items() if found}
  )


def make_splits(task: TaskData, validation: float) -> dict[str, Any]:
  """Return the sources of the splits train, validation and test. Without held-out examples, validation is missing.

  Args:
    task: the data of the task.
    validation: the fraction of train that is held out, from 0 to below 1.

  Raises:
    UserError: `validation` leaves no example to train on. Or it is above 0 but holds out no example.
  """
  splits = task.splits(validation)
  if 'train' not in splits:
    raise UserError(f'data.validation {validation} leaves no example to train on: hold out less')
  if validation and 'validation' not in splits:
    raise UserError(
      f'data.validation is {validation}, less than one of the {len(splits["train"])} examples of train: hold out '
      'more, or set it to 0'
    )
  return splits


def steps_per_call(asked: int, resident: bool, mesh: Mesh) -> int:
  """Return the largest number of steps in one call of the compiled program.

  This is `asked`, the key `train.steps_per_call`, if it is not 0. Else it is 10 on GPUs and TPUs that hold all
  examples in memory (`resident`), and 1 in all other cases.
  """
  return asked or (10 if resident and mesh.devices.flat[0].platform != 'cpu' else 1)


def make_objective(config: ConfigDict, task: Task, teacher: Teacher | None = None, parts: int = 1) -> Objective:
  """Return the function that a step minimizes: the loss of the task, or of distillation if there is a teacher.

  Args:
    config: the config of the run.
    task: its task.
    teacher: the network whose answers the run learns too. None: there is no teacher.
    parts: the number of parts in which a step computes a batch (`batch_parts`).
  """
  distillation = teacher.distillation(config) if teacher else None
  return Objective(task, parts, config.seed, distillation, config.optimizer.sam, config.log.noise_scale)


def make_evaluator(
  config: ConfigDict,
  task: Task,
  model: nn.Module,
  mesh: Mesh,
  splits: Mapping[str, Any],
  copies: Copies | None = None,
) -> Evaluator:
  """Return the function that measures the scores of `model` on a split.

  If `copies` is given, the network's outputs for changed copies of an image are averaged. The batch size is
  `evaluate.batch_size`, but not more than the largest of `splits` except train. It is rounded up to a multiple of the
  number of shards of a batch.
  """
  largest = max(len(source) for name, source in splits.items() if name != 'train')
  size = -(-min(config.evaluate.batch_size, largest) // batch_shares(mesh)) * batch_shares(mesh)
  return Evaluator(task, model, size, batch_sharding(mesh), copies)
