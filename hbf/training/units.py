"""The health of the units of stage 2 during training: values for the log, and warnings.

`hbf.evaluation.unit_health` defines dead, constant and doubled units.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hbf.data.pipeline.inputs import Batch, Resident
from hbf.evaluation.unit_health import correlations, doubled, unit_health
from hbf.models.build import unrolled
from hbf.training.experiment import Experiment
from hbf.training.programs import compile_quickly
from hbf.training.sharding import replicated

EXAMPLES = 32  # the first examples of the first batch, always the same
MANY = 50.0  # the first report of a block warns if at least this percentage of its units is dead or constant
WORSE = 10.0  # percentage points by which this share must grow before the next warning

UnitReport = Callable[[Any], dict[str, dict[str, float]]]


def make_unit_report(experiment: Experiment, params: Any, stack: Batch) -> UnitReport | None:
  """Return a function from parameters to the percentages of dead, constant and doubled units, by block.

  Here a unit is dead if all its responses are 0 up to rounding. Gradients are not tested. No unit is both dead and
  constant. The responses are those to the first EXAMPLES examples of a batch.

  Args:
    experiment: the run.
    params: the shapes of the parameters, with their shardings.
    stack: several batches, stacked along a new first axis. The first one is used.

  Returns:
    The function. None if no block has a stage 2 with centers.
  """
  model, task = unrolled(experiment.model), experiment.task

  def shares(params: Any, resident: Resident, stack: Batch) -> dict[str, dict[str, jax.Array]]:
    batch = jax.tree.map(lambda z: z[0], stack)
    # Devices share a whole batch evenly, but not any number of its examples.
    inputs = jax.tree.map(lambda z: z[:EXAMPLES], task.eval_batch(resident, batch).inputs)
    _, sown = model.apply({'params': params}, inputs, train=False, mutable=['responses'])
    found = {block: stages['stage2']['responses'][0] for block, stages in sown.get('responses', {}).items()}
    return {block: _shares(jnp.moveaxis(r, 0, 1).reshape(r.shape[1], -1)) for block, r in found.items()}

  resident = experiment.inputs['train'].resident
  with jax.set_mesh(experiment.mesh):
    lowered = jax.jit(shares, out_shardings=replicated(experiment.mesh)).lower(params, resident, stack)
    if not lowered.out_info:
      return None
    program = compile_quickly(lowered)

  def report(params: Any) -> dict[str, dict[str, float]]:
    return jax.tree.map(float, jax.device_get(program(params, resident, stack)))

  return report


def _shares(responses: jax.Array) -> dict[str, jax.Array]:
  """Return the percentages of dead, constant and doubled units of a block, from responses [M tokens, U units]."""
  health = unit_health(responses)
  faults = {**health._asdict(), 'doubled': doubled(correlations(responses))}
  return {name: 100 * jnp.mean(fault) for name, fault in faults.items()}


class UnitWarnings:
  """Warnings for blocks with idle units, which are dead or constant.

  The first report of a block warns if at least `MANY` percent of its units are idle. A later report warns if this
  percentage has grown by `WORSE` points since the last warning, or since the first report if there was no warning.
  """

  def __init__(self) -> None:
    """Begin without any report."""
    self._said: dict[str, float] = {}

  def __call__(self, shares: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line of warning for each block that needs one.

    Args:
      shares: the percentages of dead, constant and doubled units, by block and by kind; see `make_unit_report`.
    """
    lines = []
    for block, faults in shares.items():
      idle = faults['dead'] + faults['constant']
      if idle >= (self._said[block] + WORSE if block in self._said else MANY):
        lines.append(
          f'warning: of the units of {block}, {faults["dead"]:.0f}% are dead and {faults["constant"]:.0f}% constant. '
          f'{_CURE}'
        )
        self._said[block] = idle
      else:
        self._said.setdefault(block, idle)
    return lines


_CURE = (
  'A dead unit responds to no token, a constant one to all alike. If most are idle, change model.stage2.sigma_scale, '
  'or set model.stage2.centers_init=tokens'
)
