"""The programs of a config, traced for devices that needn't exist: those that `train.py` and `eval.py` run."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.datasets import describe
from hbf.tasks.registry import make_task
from hbf.training.experiment import Plan, make_evaluator, make_objective, make_plan, steps_per_call, with_sharding
from hbf.training.programs import jit_steps, make_init
from hbf.training.sharding import batch_sharding, check_batch_size, check_tensor, make_mesh


@dataclasses.dataclass(frozen=True)
class Program:
  """A program, traced.

  Attributes:
    name: what it does.
    units: images or tokens that it takes at once, on all devices.
    traced: by JAX; `traced.lower().compile()` makes it for the devices.
    held_bytes: what else lies in a device's memory while it runs.
  """

  name: str
  units: int
  traced: Any
  held_bytes: int


@dataclasses.dataclass(frozen=True)
class Programs:
  """What a config runs on some devices.

  Attributes:
    plan: of the run.
    mesh: the devices.
    parameter_bytes: of the model, on a device.
    optimizer_bytes: of the optimizer's state, and of the parameters' average if there is one, on a device.
    each: the programs: a train step, an evaluation step.
  """

  plan: Plan
  mesh: Mesh
  parameter_bytes: int
  optimizer_bytes: int
  each: tuple[Program, ...]


def plan_of(config: ConfigDict) -> Plan:
  """The plan of a config, whose published data set and whose `init_from` needn't be there."""
  data = config.data
  described = describe(data.name, data.dir, data.image_size) if config.task == 'classification' else None
  return make_plan(config, resumed=True, dataset=described)


def trace_programs(config: ConfigDict, devices: Sequence[Any]) -> Programs:
  """Traces the train step and the evaluation step of a config.

  Examples are never read: a published data set needn't be there. What is measured on them are constants of the
  programs; here others stand for them.

  Args:
    config: as `configs/` make it.
    devices: real ones, or of `hbf.hardware.topologies`.

  Raises:
    UserError: something is wrong with the config, or the devices can't share its batch.
  """
  mesh, plan = make_mesh(devices, config.mesh), plan_of(config)
  config = plan.config
  check_tensor(config.model, mesh)
  check_batch_size('train.batch_size', config.train.batch_size, mesh, config.train.accumulate)
  sharding, splits = batch_sharding(mesh), plan.splits
  config = plan.task.measured(config, None)
  task = make_task(config, plan.task.dataset)
  objective, evaluator = make_objective(config, task), make_evaluator(config, task, plan.model, mesh)
  residents = {split: task.shapes(source, sharding, 1)[0] for split, source in splits.items()}
  steps = steps_per_call(config.train.steps_per_call, residents['train'] is not None, mesh)
  resident, stack = task.shapes(splits['train'], sharding, steps, config.train.batch_size)
  rows = evaluator.rows(len(splits['test']))
  tested, batch = task.shapes(splits['test'], sharding, rows)
  state = with_sharding(jax.eval_shape(make_init(plan, objective), resident, stack, {}), mesh)
  counts = with_sharding(jax.eval_shape(task.zeros), mesh)
  with jax.set_mesh(mesh):  # type: ignore[arg-type]  # not an abstract one
    train = jit_steps(plan, objective, mesh, state).trace(state, resident, stack, np.int32(1))
    evaluate = evaluator.step.trace(counts, {'params': state.params}, tested, batch)
  examples, optimizer = _bytes(residents), _bytes((state.opt_state, state.average))
  each = (
    Program('train step', config.train.batch_size * task.units, train, examples - _bytes(resident)),
    Program('evaluation step', rows * task.units, evaluate, examples - _bytes(tested) + optimizer),
  )
  return Programs(plan, mesh, _bytes(state.params), optimizer, each)


def _bytes(tree: Any) -> int:
  """Of arrays with shardings, on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
