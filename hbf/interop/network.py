"""Networks of other projects, as this project describes them: the `model` part of a config, and the parameters."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.interop import tensors as files
from hbf.interop.positions import AnySizeEmbedding, Resize
from hbf.interop.table import Params, Table, Tensors
from hbf.models.build import build_model
from hbf.models.classifier import ImageClassifier
from hbf.nn.registry import stage_options


@dataclasses.dataclass(frozen=True)
class Network:
  """An image classifier that was trained by another project, or earlier by this one.

  Attributes:
    origin: the project and kind, such as "timm's ViT".
    config: the `model` part of a config that describes the network.
    params: the parameters in this project's layout, float32, on the host.
    channels: number of channels of the network's images.
    classes: number of logits.
    patches: number of patches of an image.
    resize: function that interpolates the learned positions to images of another size. None: positions are not
      learned, or cannot be resized.
    any_size: True if the network takes images of any size without learned positions. If it is False and `resize` is
      None, the number of patches is fixed.
    class_names: the names of the classes, in the order of the logits. (): the source does not name them.
    targets: the kind of the outputs: 'classes'. Networks of this project may also have 'labels' or 'values'.
    unused: names of tensors in the file that the network does not use.
  """

  origin: str
  config: dict[str, Any]
  params: Params
  channels: int
  classes: int
  patches: int
  resize: Resize | None = None
  any_size: bool = False
  class_names: tuple[str, ...] = ()
  targets: str = 'classes'
  unused: tuple[str, ...] = ()

  @property
  def grid(self) -> int:
    """The number of rows, and of columns, of patches. The patches must form a square."""
    return math.isqrt(self.patches)


def read_file(path: pathlib.Path, read: Callable[[Tensors], Network]) -> Network:
  """Read a file of tensors, and return the network that `read` makes from them. Errors name the file."""
  tensors = files.read(path)
  try:
    return read(tensors)
  except UserError as error:
    raise UserError(f'{path}: {error}') from error


def read_fixed(table: Table, tensors: Tensors, config: Callable[[Mapping[str, int]], dict[str, Any]]) -> Network:
  """Return a network without learned positions, which takes only one number of patches.

  Args:
    table: the table of the network's tensors.
    tensors: arrays by name.
    config: a function from sizes such as width and depth to the `model` part of a config.

  Raises:
    UserError: the tensors do not belong to such a network.
  """
  sizes, params = table.read(tensors)
  return Network(table.origin, config(sizes), params, sizes['channels'], sizes['classes'], sizes['N'])


def to_module(network: Network) -> tuple[ImageClassifier, dict[str, Params]]:
  """Return the module and the variables of a network. With `network.resize`, the module takes images of any size."""
  model = build_model(ConfigDict(network.config), network.classes)
  if network.resize is not None:
    options = {field.name: getattr(model.embed, field.name) for field in dataclasses.fields(model.embed)}
    model = model.clone(embed=AnySizeEmbedding(**options, grid=network.grid, resize=network.resize))
  return model, {'params': jax.tree.map(jnp.asarray, network.params)}


def model_config(
  name: str,
  sizes: Mapping[str, int],
  stage1: dict[str, Any],
  stage2: dict[str, Any],
  *,
  heads: int = 1,
  pool: str = 'mean',
  positions: str = 'none',
  norm_epsilon: float = 1e-6,
) -> dict[str, Any]:
  """Return the `model` part of a config.

  Args:
    name: name of the model, such as 'vit'.
    sizes: the sizes 'D' (width), 'depth' (number of blocks) and 'patch'.
    stage1: options of stage 1 that differ from the defaults.
    stage2: options of stage 2 that differ from the defaults.
    heads: number of heads of stage 1, if stage 1 has heads.
    pool: value of `model.pool`.
    positions: value of `model.positions`.
    norm_epsilon: value of `model.norm_epsilon`.
  """
  defaults = stage_options(name, 0)
  return {
    'name': name,
    'width': sizes['D'],
    'depth': sizes['depth'],
    'heads': heads,
    'patch': sizes['patch'],
    'pool': pool,
    'stem': 'patch',
    'whiten': False,
    'positions': positions,
    'dropout': 0.0,
    'dtype': 'float32',
    'norm_epsilon': norm_epsilon,
    'merge': (),
    'window': 0,
    'scan_layers': False,
    'remat': False,
    'parallel': False,
    'layer_scale': 0.0,
    'drop_path': 0.0,
    'stage1': defaults[0] | stage1,
    'stage2': defaults[1] | stage2,
  }


def vit_config(sizes: Mapping[str, int], heads: int, activation: str, pool: str = 'cls') -> dict[str, Any]:
  """Return the `model` part of a config for a ViT (Dosovitskiy et al. 2021).

  `sizes` has 'D' (width), 'depth' (number of blocks), 'patch' and 'hidden' (number of hidden units of stage 2).
  """
  mlp = {'hidden': sizes['hidden'], 'activation': activation}
  return model_config('vit', sizes, {'qkv_bias': True}, mlp, heads=heads, pool=pool, positions='learned')


def mixer_config(sizes: Mapping[str, int], activation: str) -> dict[str, Any]:
  """Return the `model` part of a config for a Mixer (Tolstikhin et al. 2021).

  Args:
    sizes: the sizes 'D' (width), 'depth' (number of blocks) and 'patch', and the numbers of hidden units 'tokens'
      (stage 1) and 'hidden' (stage 2).
    activation: activation of both stages.
  """
  stages = ({'hidden': sizes[units], 'activation': activation} for units in ('tokens', 'hidden'))
  return model_config('mixer', sizes, *stages)
