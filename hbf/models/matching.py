"""Choice of the number of units for models of equal size, and of the number of steps for runs of equal cost."""

from collections.abc import Callable

from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.nn.registry import size_option

TOLERANCE = 0.01  # largest difference from a budget of parameters, divided by the budget
OPERATIONS_TOLERANCE = 0.005  # the same for a budget of training operations


def match_parameters(
  config: ConfigDict, budget: int, parameters: Callable[[ConfigDict], int], tolerance: float = TOLERANCE
) -> ConfigDict:
  """Choose the number of units for which a model's number of parameters is closest to a budget.

  Args:
    config: the `model` part of a config. It is not changed.
    budget: number of learned parameters of the whole model.
    parameters: function from the `model` part of a config to the number of parameters of the model.
    tolerance: largest difference from the budget, divided by the budget.

  Returns:
    The `model` part with the new number of units.

  Raises:
    UserError: the difference from the budget is larger than the tolerance for every number of units, or the model has
      no units. The message has the nearest number of parameters.
  """
  size = size_option(config.name)
  if size is None:
    raise UserError(f'{config.name} has no units to have more or fewer of: compare it as it is, with --nomatch')
  stage, option = size

  def count(units: int) -> int:
    return parameters(_with_units(config, stage, option, units))

  # Every unit of a stage adds the same number of parameters. One center may be refused (normalization layer).
  two, three = count(2), count(3)
  units = max(1, 2 + round((budget - two) / (three - two)))
  if abs(count(units) - budget) > tolerance * budget:
    raise UserError(
      f'{config.name} can not have {budget:,} parameters to within {tolerance:.0%}: it has {count(units):,} with '
      f'{stage}.{option}={units}; choose another width, depth or number of parameters'
    )
  return _with_units(config, stage, option, units)


def match_steps(step: float, budget: float) -> int:
  """Return the number of steps whose operations are closest to a budget.

  Args:
    step: number of operations of one step.
    budget: number of operations of the whole training.

  Raises:
    UserError: no number of steps is within 0.5% of the budget. The message has the nearest number of steps.
  """
  steps = max(1, round(budget / step))
  if abs(steps * step - budget) > OPERATIONS_TOLERANCE * budget:
    raise UserError(
      f'{budget:.3g} training operations are no whole number of steps, to within {OPERATIONS_TOLERANCE:.1%}: a step '
      f'takes {step:.3g}, and {steps} of them {steps * step:.3g}. Take more operations, smaller batches or another '
      'size'
    )
  return steps


def units_of(config: ConfigDict) -> dict[str, int]:
  """Return a model's number of units by its option, such as {'stage2.centers': 256}. {} for a model without units."""
  size = size_option(config.name)
  return {'.'.join(size): config[size[0]][size[1]]} if size else {}


def _with_units(config: ConfigDict, stage: str, option: str, units: int) -> ConfigDict:
  sized = config.copy_and_resolve_references()
  sized[stage][option] = units
  return sized
