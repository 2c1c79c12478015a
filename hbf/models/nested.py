"""Smaller networks inside a network: they keep only the first centers of each stage 2."""

from typing import Any

from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.nn.trunk import growth


def first_centers(config: ConfigDict, params: Any, count: int) -> tuple[ConfigDict, Any]:
  """Return config and parameters of the network that keeps only the first `count` centers of every stage 2.

  If the network was trained with the option `nested` (`hbf.nn.hyperbf.HyperBFCenters`), the smaller network stays
  accurate. Other networks can also be cut. If the network merges tokens (`merge` of `hbf.nn.trunk.Trunk`), the blocks
  after a merge have twice as many centers as those before it, before and after the cut.

  Args:
    config: the `model` part of a config whose stage 2 is hyperbf. It is not changed.
    params: parameters of that model.
    count: number of centers to keep in a block before tokens are merged, at least 1.

  Raises:
    UserError: the model has no centers in stage 2, or fewer than `count`.
  """
  if 'centers' not in config.stage2:
    raise UserError(f'{config.name} has no centers in its stage 2: expected a model with stage 2 hyperbf')
  if not 1 <= count <= config.stage2.centers:
    raise UserError(f'{count} centers can not be taken: the model has {config.stage2.centers}')
  cut = config.copy_and_resolve_references()
  cut.stage2.centers = count
  own = {f'block{i}': count * growth(config.get('merge', ()), i) for i in range(config.depth)}
  return cut, {name: _cut_block(part, own[name]) if name in own else part for name, part in params.items()}


def _cut_block(block: Any, count: int) -> Any:
  """Return a block's parameters with only the first `count` centers of stage 2."""
  unit = dict(block['stage2'])
  unit |= {name: unit[name][:, :count] for name in ('centers', 'coefficients', 'slopes') if name in unit}
  unit |= {
    name: unit[name][..., :count]
    for name in ('log_sigma', 'beta', 'squared_radius', 'depth', 'slope_bias')
    if name in unit
  }
  return {**block, 'stage2': unit}
