"""The jitted functions of a run. They can also be compiled for devices that this machine does not have."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.training.average import averaging, with_average
from hbf.training.experiment import Plan
from hbf.training.sharding import state_sharding
from hbf.training.skipping import skipping, with_skips
from hbf.training.state import Objective, Step, TrainState, init_state, make_train_step, repeat_step

_LEVEL = 'xla_backend_optimization_level'
Init = Callable[[Resident, Batch, Mapping[str, Any]], TrainState]


def make_init(plan: Plan, objective: Objective) -> Init:
  """Return a pure function that makes the state before step 1.

  The function has three arguments. `resident` has the examples that lie in device memory
  (`hbf.data.pipeline.inputs`). `stack` has several batches, stacked along a new first axis. `given` has parameters
  that replace random ones. Some of the other parameters, such as centers, may depend on the first batch.
  """

  def init(resident: Resident, stack: Batch, given: Mapping[str, Any]) -> TrainState:
    batch = jax.tree.map(lambda z: z[0], stack)
    state = init_state(plan.model, plan.optimizer, objective, resident, batch, given)
    return with_extras(state, plan.config)

  return init


def with_extras(state: TrainState, config: ConfigDict) -> TrainState:
  """Return a fresh state with what steps of `jit_steps` also need: an average and counts of skipped steps, if any."""
  return with_skips(with_average(state, config), config)


def jit_steps(plan: Plan, objective: Objective, mesh: Mesh, state: TrainState) -> Any:
  """Return the jitted function that takes several steps, see `hbf.training.state.repeat_step`. It donates the state.

  Args:
    plan: the run.
    objective: the function that a step minimizes.
    mesh: the devices.
    state: the state of training, as arrays or shapes.
  """
  step = with_options(make_train_step(plan.model, plan.optimizer, objective), plan.config)
  return jax.jit(repeat_step(step), donate_argnums=0, out_shardings=state_sharding(mesh, (state, state.step)))


def with_options(step: Step, config: ConfigDict) -> Step:
  """Return a step that also keeps the average of the parameters and skips bad batches, if the config says so."""
  return skipping(averaging(step, config), config)


def compile_quickly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
  """Compile a program that runs only a few times. On a CPU this takes about two thirds of the usual time.

  If the user has set the level of XLA's optimization in XLA_FLAGS, that level is used.
  """
  # Initial states have the same bits with level 1 as with the usual level, but not with level 0.
  given = _LEVEL in os.environ.get('XLA_FLAGS', '')
  options: Any = {_LEVEL: 1} if jax.default_backend() == 'cpu' and not given else None
  return lowered.compile(compiler_options=options)
