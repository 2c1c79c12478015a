"""The train step and the evaluation step of a config, traced for devices that this machine need not have."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.datasets import describe
from hbf.tasks.registry import make_task, on_images
from hbf.training.batch_parts import batch_parts
from hbf.training.experiment import Plan, make_evaluator, make_objective, make_plan, steps_per_call
from hbf.training.programs import jit_steps, make_init
from hbf.training.sharding import (
  batch_sharding,
  check_batch_size,
  check_implementation,
  check_tensor,
  make_mesh,
  with_sharding,
)


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that can be traced and compiled.

  Attributes:
    name: the step that the program computes: 'train step' or 'evaluation step'.
    units: number of images or tokens in a call, over all devices.
    trace: function that traces the program.
    held_bytes: bytes of arrays that the program does not use, but that lie in a device's memory while it runs.
  """

  name: str
  units: int
  trace: Callable[[], Any]
  held_bytes: int

  @functools.cached_property
  def traced(self) -> Any:
    """Return the result of JAX's tracing. `traced.lower().compile()` compiles the program for the devices."""
    return self.trace()


@dataclasses.dataclass(frozen=True)
class Programs:
  """The programs of a config on some devices.

  Attributes:
    plan: the parts of the run that do not depend on the examples (`hbf.training.experiment.Plan`).
    mesh: the devices.
    parameter_bytes: bytes of the model's parameters on one device.
    optimizer_bytes: bytes of the optimizer's state and of the parameters' moving average on one device.
    each: the train step and the evaluation step.
  """

  plan: Plan
  mesh: Mesh
  parameter_bytes: int
  optimizer_bytes: int
  each: tuple[Program, ...]


def plan_of(config: ConfigDict) -> Plan:
  """Return the parts of a run that do not depend on the examples (`hbf.training.experiment.Plan`).

  A published data set and the file of `init_from` need not be on disk.
  """
  data = config.data
  described = describe(data.name, data.dir, data.image_size) if on_images(config.task) else None
  return make_plan(config, resumed=True, dataset=described)


def trace_programs(config: ConfigDict, devices: Sequence[Any]) -> Programs:
  """Trace the train step and the evaluation step of a config. The arguments are those of `prepare_programs`."""
  programs = prepare_programs(config, devices)
  for program in programs.each:
    program.traced  # noqa: B018  # it is kept
  return programs


def prepare_programs(config: ConfigDict, devices: Sequence[Any]) -> Programs:
  """Return the train step and the evaluation step of a config, which are not traced yet.

  No example is read, so a published data set need not be on disk. Some constants of the programs would be measured on
  the examples, such as the mean of each channel. Here they have placeholder values.

  Args:
    config: the config of a run.
    devices: real devices, or devices of `hbf.hardware.topologies`.

  Raises:
    UserError: the config is wrong, or its batch cannot be split over the devices.
  """
  mesh, plan = make_mesh(devices, config.mesh), plan_of(config)
  config = plan.config
  check_implementation(config.model, mesh)
  check_tensor(config.model, mesh)
  check_batch_size('train.batch_size', config.train.batch_size, mesh, config.train.accumulate)
  sharding, splits = batch_sharding(mesh), plan.splits
  config = plan.task.measure(config, None)
  task = make_task(config, plan.task.dataset)
  objective = make_objective(config, task, plan.teacher, batch_parts(config, plan.model, task.shape, mesh))
  evaluator = make_evaluator(config, task, plan.model, mesh, splits)
  residents = {split: task.abstract_inputs(source, sharding, 1)[0] for split, source in splits.items()}
  steps = steps_per_call(config.train.steps_per_call, residents['train'] is not None, mesh)
  resident, stack = task.abstract_inputs(splits['train'], sharding, steps, config.train.batch_size)
  state = with_sharding(jax.eval_shape(make_init(plan, objective), resident, stack, {}), mesh)
  beside = plan.teacher.abstract(resident, mesh) if plan.teacher else resident
  teacher = _bytes(beside) - _bytes(resident)

  def train() -> Any:
    with jax.set_mesh(mesh):  # type: ignore[arg-type]  # a concrete mesh
      return jit_steps(plan, objective, mesh, state).trace(state, beside, stack, np.int32(1))

  def evaluate() -> Any:
    return evaluator.trace(state.params, *task.abstract_inputs(splits['test'], sharding, evaluator.batch_size))

  examples, optimizer = _bytes(residents), _bytes((state.opt_state, state.average))
  each = (
    Program('train step', config.train.batch_size * task.units, train, examples - _bytes(resident)),
    Program('evaluation step', evaluator.batch_size * task.units, evaluate, examples + optimizer + teacher),
  )
  return Programs(plan, mesh, _bytes(state.params), optimizer, each)


def _bytes(tree: Any) -> int:
  """Return the bytes that arrays with shardings take on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
