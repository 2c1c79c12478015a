"""Interventions on the parameters of stage 2's units: silence, rescale, swap and move.

A unit is a center of a HyperBF or a hidden unit of an MLP. In both, stage 2 is z = Σ_a R_a(y) c_a + b. So both allow
the same interventions: the coefficients c_a of a unit are set to 0, scaled, or exchanged with those of another unit.
A unit with coefficients 0 is silenced. A center can also be moved. The functions return new parameters, and the
parameters of the run do not change.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose

Params = Any


def count_units(params: Params, block: str) -> int:
  """Return the number of units in stage 2 of a block, summed over the heads.

  Raises:
    UserError: there is no such block, or its stage 2 has no units.
  """
  blocks = {name: part for name, part in params.items() if name.startswith('block')}
  unit = choose('block', block, blocks).get('stage2', {})
  if 'coefficients' in unit:
    return int(unit['coefficients'].shape[0] * unit['coefficients'].shape[1])
  if 'out' in unit and 'hidden' in unit:
    return int(unit['out']['kernel'].shape[0])
  raise UserError(f'stage 2 of {block} has no units: give a run whose stage 2 is hyperbf or mlp')


def coefficients(params: Params, block: str) -> jax.Array:
  """Return the coefficients of a block's units, [U, D]. Errors are as for `count_units`."""
  count, unit = count_units(params, block), params[block]['stage2']
  return jnp.asarray(unit['coefficients'] if 'coefficients' in unit else unit['out']['kernel']).reshape(count, -1)


def with_coefficients(params: Params, block: str, values: jax.Array) -> Params:
  """Return parameters in which the units of a block have the coefficients `values` [U, D]."""
  unit = params[block]['stage2']
  if 'coefficients' in unit:
    changed = unit | {'coefficients': values.reshape(unit['coefficients'].shape)}
  else:
    changed = unit | {'out': unit['out'] | {'kernel': values}}
  return params | {block: params[block] | {'stage2': changed}}


def rescale(params: Params, block: str, units: Sequence[int], factor: float) -> Params:
  """Return parameters with the coefficients of some units multiplied by a factor.

  Args:
    params: the parameters of a network.
    block: name of a block, such as 'block2'.
    units: indices of the units.
    factor: the factor. 0 silences the units.

  Raises:
    UserError: there is no such block or unit, or stage 2 has no units.
  """
  values = coefficients(params, block)
  return with_coefficients(params, block, values.at[_checked(params, block, units)].multiply(factor))


def silence(params: Params, block: str, units: Sequence[int]) -> Params:
  """Return parameters with the coefficients of some units set to 0. Responses in the block do not change.

  Arguments and errors are as for `rescale`.
  """
  return rescale(params, block, units, 0.0)


def swap(params: Params, block: str, one: int, other: int) -> Params:
  """Return parameters in which two units exchange their coefficients. Arguments and errors are as for `rescale`."""
  pair = _checked(params, block, [one, other])
  values = coefficients(params, block)
  return with_coefficients(params, block, values.at[pair].set(values[pair[::-1]]))


def move(params: Params, block: str, center: int, place: jax.Array) -> Params:
  """Return parameters in which a center has other coordinates.

  Args:
    params: the parameters of a network with HyperBF in stage 2.
    block: name of a block.
    center: index of a center.
    place: the new coordinates of the center, [d], where d is the width of a head. They are coordinates of the input
      of stage 2 (`hbf.analysis.capture.Activations.points`).

  Raises:
    UserError: there is no such block or center, the shape of `place` is not [d], or the units are not centers.
  """
  _checked(params, block, [center])
  unit = params[block]['stage2']
  if 'centers' not in unit:
    raise UserError(
      f'the units of {block} are no centers, so they have no place: give a run whose stage 2 is hyperbf'
    )
  heads, count, d = unit['centers'].shape
  if jnp.shape(place) != (d,):
    raise UserError(f'place has shape {jnp.shape(place)}: expected ({d},), the dimensions of a head')
  centers = unit['centers'].reshape(heads * count, d).at[center].set(place).reshape(heads, count, d)
  return params | {block: params[block] | {'stage2': unit | {'centers': centers}}}


def _checked(params: Params, block: str, units: Sequence[int]) -> np.ndarray:
  """Return the indices of units as an int array. Raise `UserError` if an index is out of range."""
  count, numbers = count_units(params, block), np.asarray(units, int).reshape(-1)
  if wrong := [number for number in numbers.tolist() if not 0 <= number < count]:
    raise UserError(f'{block} has no unit {wrong[0]}: expected 0 to {count - 1}')
  return numbers
