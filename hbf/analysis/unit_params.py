"""Interventions on the parameters of stage 2's units: silence, rescale, swap, move and add.

A unit is a center of a HyperBF or a hidden unit of an MLP. In both, stage 2 is z = Σ_a R_a(y) c_a + b. So both allow
the same interventions: the coefficients c_a of a unit are set to 0, scaled, or exchanged with those of another unit.
A unit with coefficients 0 is silenced. A center can also be moved. A unit can be added, and removed again. The
functions return new parameters, and the parameters of the run do not change.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose
from hbf.nn.registry import with_units
from hbf.nn.trunk import growth

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


def directions(params: Params, block: str) -> np.ndarray:
  """Return the vectors [U, D], float64, that a block's units add to a token for a response of 1.

  They are the coefficients. If the block multiplies the output of stage 2 by learned factors (`layer_scale`), the
  coefficients are multiplied by them. Errors are as for `count_units`.
  """
  return np.asarray(coefficients(params, block), np.float64) * np.asarray(params[block].get('scale_stage2', 1.0))


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
  """Return parameters in which two units exchange their coefficients.

  `one` and `other` are the indices of the units. The other arguments and the errors are as for `rescale`.
  """
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


class Resized(NamedTuple):
  """A network with another number of units, and its parameters.

  Attributes:
    model: the network. All heads of all its blocks have the same number of units.
    params: the parameters.
    unit: the index of the added unit in its block. −1 after a removal.
  """

  model: nn.Module
  params: Params
  unit: int = -1


def add(
  model: Any, params: Params, block: str, place: jax.Array, coefficient: jax.Array, head: int = 0, bias: Any = 0.0
) -> Resized:
  """Add a unit to a block. Stage 2 becomes z(y) + R(y) c, where R is the response of the new unit.

  All heads of all blocks of a network have the same number of units, or a multiple of it behind merges of tokens. So
  each of the other heads gets silent units, which have coefficients 0.

  If each center has its own σ or radius, a new center gets the mean over its head's centers. For σ, it is the mean of
  log σ. If the coefficients of the stage are linear functions of the token, those of the new center are constant.

  Args:
    model: the network, such as `TrainedRun.model`.
    params: its parameters.
    block: name of a block.
    place: the coordinates of a center, [d], as in `move`. For an MLP: the weights of a hidden unit, [D]. A gated MLP
      takes [2, D]: weights of the gate and of the value.
    coefficient: c, [D].
    head: the head of a center, from 0.
    bias: the bias of a hidden unit. A gated MLP takes two numbers, for gate and value, or one number for both.

  Raises:
    UserError: there is no such block or head, its stage 2 has no units, or a shape is wrong. Or stage 2 normalizes
      its responses over the centers, so a new center would change all other responses.
  """
  total, stage = count_units(params, block), _stage_of(model)
  rows = {name: _rows(params[name]['stage2'], stage) for name in block_names(model)}
  heads = len(rows[block]['coefficients'])
  count = total // heads
  if not 0 <= head < heads:
    raise UserError(f'head is {head}: expected 0 to {heads - 1}')
  more = _units_for_each(model)
  grown = {
    name: {key: _with_silent(key, z, more[name]) for key, z in of_block.items()} for name, of_block in rows.items()
  }
  new = grown[block]
  for name, value in {'coefficients': coefficient, 'places': place}.items():
    shape = tuple(n for n in new[name].shape[2:] if n > 1)
    if jnp.shape(value) != shape:
      said = 'place' if name == 'places' else 'coefficient'
      raise UserError(f'{said} has shape {jnp.shape(value)}: expected {shape}')
    new[name] = new[name].at[head, count].set(jnp.reshape(value, new[name].shape[2:]))
  if 'bias' in new:
    new['bias'] = new['bias'].at[head, count].set(bias)
  return Resized(*_resized(model, params, grown, 1), unit=head * (count + more[block]) + count)


def remove(model: Any, params: Params, block: str, unit: int) -> Resized:
  """Remove a unit from a block, and silent units from the other heads of all blocks. This undoes `add`.

  The coefficients of a silent unit are 0.

  Args:
    model: the network.
    params: its parameters.
    block: name of a block.
    unit: index of the unit.

  Raises:
    UserError: as for `add`. Or there is no such unit, or another head has too few silent units.
  """
  _checked(params, block, [unit])
  stage = _stage_of(model)
  left = {}
  for name, fewer in _units_for_each(model).items():
    rows = _rows(params[name]['stage2'], stage)
    heads, count = rows['coefficients'].shape[:2]
    first = np.array(jnp.all(rows['coefficients'] == 0, axis=-1)).astype(int)
    if name == block:
      first[unit // count, unit % count] = 2
    # The given unit, then the last silent ones.
    gone = np.argsort(first + np.arange(count) / (count + 1), axis=1)[:, -fewer:]
    if not np.take_along_axis(first, gone, axis=1).all():
      raise UserError(
        f'a head of {name} has too few silent units to remove {fewer}, and all heads need equal numbers of units: '
        'silence the unit instead'
      )
    kept = [np.delete(np.arange(count), numbers) for numbers in gone]
    left[name] = {key: jnp.stack([z[h, kept[h]] for h in range(heads)]) for key, z in rows.items()}
  return Resized(*_resized(model, params, left, -1))


def _stage_of(model: Any) -> Any:
  """Return the constructor of stage 2. Raise `UserError` if its units cannot be added or removed."""
  stage = model.trunk.stage2
  if (normalization := _option(stage, 'normalization')) not in (None, 'none'):
    raise UserError(
      f'stage 2 normalizes its responses over the centers (normalization {normalization}), so another center changes '
      'them all: give a run with model.stage2.normalization=none'
    )
  return stage


def _option(stage: Any, name: str) -> Any:
  """Return the value of an option in the constructor of a stage. None if the stage has no such option."""
  return stage.keywords.get(name, getattr(stage.func, name, None))


def block_names(model: Any) -> list[str]:
  """Return the names of a network's blocks, as in its parameters."""
  return [f'block{i}' for i in range(model.trunk.depth)]


def last_block(model: Any) -> str:
  """Return the name of a network's last block, as in its parameters."""
  return block_names(model)[-1]


def _units_for_each(model: Any) -> dict[str, int]:
  """Return, by block, how many more units a head of the block has if a head of the first block has one more."""
  return {name: growth(model.trunk.merge, i) for i, name in enumerate(block_names(model))}


def in_order(found: Mapping[str, Any]) -> dict[str, Any]:
  """Return what is known of each block, block by block. A dict from a compiled function has block10 before block2."""
  return dict(sorted(found.items(), key=lambda item: int(item[0].removeprefix('block'))))


# Parameters of HyperBFCenters with the centers on axis 1, and with the centers on axis 2.
_VECTORS = 'centers', 'coefficients', 'slopes'
_SCALARS = 'log_sigma', 'beta', 'depth', 'squared_radius', 'slope_bias'


def _rows(params: Params, stage: Any) -> dict[str, jax.Array]:
  """Return the parameters of stage 2 that have a row for each unit, as arrays [heads, units, …] by name.

  'coefficients' are the units' coefficients. 'places' are centers or weights. 'bias' is the bias of hidden units.
  """
  if 'coefficients' in params:
    shared = () if _option(stage, 'sigma_per') == 'center' else ('log_sigma', 'beta')
    found = {name: params[name] for name in _VECTORS if name in params}
    found |= {name: params[name].swapaxes(1, 2) for name in _SCALARS if name in params and name not in shared}
    return {'places': found.pop('centers'), **found}
  hidden, out = params['hidden'], params['out']['kernel']
  width, parts = len(hidden['kernel']), hidden['kernel'].shape[1] // len(out)
  return {
    'coefficients': out[None],
    'places': hidden['kernel'].reshape(width, parts, -1).transpose(2, 1, 0)[None],
    'bias': hidden['bias'].reshape(parts, -1).T[None],
  }


def _with_rows(params: Params, rows: dict[str, jax.Array]) -> Params:
  """Return the parameters of stage 2 with new rows. `rows` has the form of the result of `_rows`."""
  if 'coefficients' in params:
    named = {'centers' if name == 'places' else name: z for name, z in rows.items()}
    return params | {name: z.swapaxes(1, 2) if name in _SCALARS else z for name, z in named.items()}
  count, parts, width = rows['places'].shape[1:]
  kernel = rows['places'][0].transpose(2, 1, 0).reshape(width, parts * count)
  hidden = params['hidden'] | {'kernel': kernel, 'bias': rows['bias'][0].T.reshape(-1)}
  return params | {'hidden': hidden, 'out': params['out'] | {'kernel': rows['coefficients'][0]}}


def _with_silent(name: str, rows: jax.Array, count: int) -> jax.Array:
  """Append `count` rows of silent units to each head in `rows` [heads, units, …], the parameter `name` (`_rows`)."""
  constant = {'coefficients': 0.0, 'slopes': 0.0, 'slope_bias': 1.0}
  last = rows.mean(axis=1, keepdims=True)
  if name in constant:
    last = jnp.full_like(last, constant[name])
  return jnp.concatenate([rows, *[last] * count], axis=1)


def _resized(
  model: Any, params: Params, rows: dict[str, dict[str, jax.Array]], more: int
) -> tuple[nn.Module, Params]:
  """Return a network with `more` additional units in each head of the first block, and its parameters.

  `rows` has the new parameters of each block's units, in the form that `_rows` returns.
  """
  stage = with_units(model.trunk.stage2, more=more)
  changed = {
    name: params[name] | {'stage2': _with_rows(params[name]['stage2'], of_block)} for name, of_block in rows.items()
  }
  return model.clone(trunk=model.trunk.clone(stage2=stage)), {**params, **changed}


def _checked(params: Params, block: str, units: Sequence[int]) -> np.ndarray:
  """Return the indices of units as an int array. Raise `UserError` if an index is out of range."""
  count, numbers = count_units(params, block), np.asarray(units, int).reshape(-1)
  if wrong := [number for number in numbers.tolist() if not 0 <= number < count]:
    raise UserError(f'{block} has no unit {wrong[0]}: expected 0 to {count - 1}')
  return numbers
