"""Models of equal size: how many centres or hidden units a model needs to have a given number of parameters."""

from collections.abc import Callable

from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.nn.registry import size_option

TOLERANCE = 0.01  # of the budget


def match_parameters(
  config: ConfigDict, budget: int, parameters: Callable[[ConfigDict], int], tolerance: float = TOLERANCE
) -> ConfigDict:
  """The model with as many units as bring it closest to a number of parameters.

  Args:
    config: the `model` part of a config; it isn't changed.
    budget: learned numbers of the whole model.
    parameters: of the model that such a part describes.
    tolerance: how far from the budget the model may be, as a part of the budget.

  Raises:
    UserError: no number of units comes that close, and the message has the nearest; or the model has no units.
  """
  size = size_option(config.name)
  if size is None:
    raise UserError(f'{config.name} has no units to have more or fewer of: compare it as it is, with --nomatch')
  stage, option = size

  def count(units: int) -> int:
    return parameters(_with_units(config, stage, option, units))

  # Every unit of a stage costs the same.
  one, two = count(1), count(2)
  units = max(1, 1 + round((budget - one) / (two - one)))
  if abs(count(units) - budget) > tolerance * budget:
    raise UserError(
      f'{config.name} can not have {budget:,} parameters to within {tolerance:.0%}: it has {count(units):,} with '
      f'{stage}.{option}={units}; choose another width, depth or number of parameters'
    )
  return _with_units(config, stage, option, units)


def units_of(config: ConfigDict) -> dict[str, int]:
  """How many units the `model` part of a config asks for, such as {'stage2.centres': 256}; {} if it has no units."""
  size = size_option(config.name)
  return {'.'.join(size): config[size[0]][size[1]]} if size else {}


def _with_units(config: ConfigDict, stage: str, option: str, units: int) -> ConfigDict:
  sized = config.copy_and_resolve_references()
  sized[stage][option] = units
  return sized
