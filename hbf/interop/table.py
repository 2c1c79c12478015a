"""Tables that describe how parameters of this project are made from tensors of other projects' networks."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hbf.errors import UserError

# A word in a shape names a size that is the same in several tensors. The first tensor with the word defines the size.
# '3D' is 3 times D.
Shape = tuple[int | str, ...]
Tensors = Mapping[str, np.ndarray]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParameterSource:
  """The source of one parameter: the tensors from which it is made, and the function that makes it.

  Attributes:
    tensors: shapes of the tensors by name. A word in a shape, such as 'D', stands for a size that is equal wherever
      the word occurs. '3D' is 3 times D.
    make: the function, which returns the parameter. Its arguments are the tensors, in the order of `tensors`.
  """

  tensors: Mapping[str, Shape]
  make: Callable[..., np.ndarray] = np.asarray


@dataclasses.dataclass(frozen=True)
class Table:
  """The sources of all parameters of one kind of network.

  Attributes:
    origin: the project and kind, such as "timm's ViT".
    network: sources of the parameters outside the blocks, by path, such as 'norm/scale'.
    block: sources of the parameters of each block, by path in the block, such as 'stage1/out/kernel'.
    prefix: start of the names of a block's tensors, with {} for the index of the block, such as 'blocks.{}.'.
  """

  origin: str
  network: Mapping[str, ParameterSource]
  block: Mapping[str, ParameterSource]
  prefix: str

  def read(self, tensors: Tensors) -> tuple[dict[str, int], Params]:
    """Return the sizes and the float32 parameters of the network with these weights.

    Args:
      tensors: the weights by name.

    Returns:
      The sizes by name, and the parameters. The names of the sizes are the words in the shapes of this table, such as
      'D'. In addition, the size 'depth' is the number of blocks.

    Raises:
      UserError: the tensors do not belong to such a network. The message lists the tensors that do not fit.
    """
    depth = count_blocks(tensors, self.prefix)
    sources = dict(self.network)
    for i in range(depth):
      for path, source in self.block.items():
        named = {self.prefix.format(i) + name: shape for name, shape in source.tensors.items()}
        sources[f'block{i}/{path}'] = ParameterSource(named, source.make)
    expected = {name: shape for source in sources.values() for name, shape in source.tensors.items()}
    sizes = check(tensors, expected, depth, self.origin)
    params = {
      path: np.asarray(source.make(*(np.asarray(tensors[name], np.float32) for name in source.tensors)), np.float32)
      for path, source in sources.items()
    }
    return sizes | {'depth': depth}, unflatten_dict(params, sep='/')


def count_blocks(tensors: Tensors, prefix: str) -> int:
  """Return the number of blocks, counted in the names of the tensors. `prefix` is as in `Table`."""
  start = re.escape(prefix).replace(r'\{\}', r'(\d+)')
  return len({match[1] for name in tensors if (match := re.match(start, name))})


def check(tensors: Tensors, expected: Mapping[str, Shape], depth: int, origin: str) -> dict[str, int]:
  """Check the shapes of tensors. Return the size for each word in the expected shapes, such as 'D'.

  Args:
    tensors: arrays by name.
    expected: shapes of all tensors that the network needs, by name.
    depth: number of blocks that the tensors have.
    origin: the project and kind of the network, for messages.

  Raises:
    UserError: there are no blocks, or tensors differ from the expected ones. The message lists them.
  """
  sizes: dict[str, int] = {}
  for name, shape in expected.items():
    if name in tensors and tensors[name].ndim == len(shape):
      for word, size in zip(shape, tensors[name].shape, strict=True):
        if isinstance(word, str) and not word[0].isdigit():
          sizes.setdefault(word, size)
  shapes = {name: tuple(_size(word, sizes) for word in shape) for name, shape in expected.items()}
  faults = misfits({name: tensor.shape for name, tensor in tensors.items()}, shapes)
  if faults := faults or ('' if depth else 'it has no blocks'):
    raise UserError(f'it does not hold {origin}: {faults}')
  return sizes


def shapes_of(params: Params) -> dict[str, Shape]:
  """Return the shape of every parameter by its path, such as 'block0/stage1/out/kernel'."""
  return {path: param.shape for path, param in flatten_dict(params, sep='/').items()}


def misfits(found: Mapping[str, Shape], expected: Mapping[str, Shape], most: int = 30) -> str:
  """Describe the tensors that are missing, unknown or of a wrong shape. Return '' if all tensors fit.

  Args:
    found: shapes of the tensors by name.
    expected: shapes of all tensors that the network needs, by name.
    most: largest number of names that are listed for each of the three faults.
  """
  faults = {
    'missing': [name for name in expected if name not in found],
    'unknown': [name for name in found if name not in expected],
    'of a wrong shape': [
      f'{name} {found[name]} instead of {shape}'
      for name, shape in expected.items()
      if name in found and found[name] != shape
    ],
  }
  return '; '.join(f'{what}: {_join_names(names, most)}' for what, names in faults.items() if names)


def same(ours: str, theirs: str, *shape: int | str) -> dict[str, ParameterSource]:
  """Return the source of the parameter at the path `ours`: the tensor `theirs` of shape `shape`, unchanged."""
  return {ours: ParameterSource({theirs: shape})}


def class_token(token: np.ndarray, positions: np.ndarray) -> np.ndarray:
  """Return the sum of a class token [1, 1, D] and the first of the positions [1, N, D].

  In this project, the learned class token includes its position.
  """
  return token + positions[:, :1]


def patch_positions(positions: np.ndarray) -> np.ndarray:
  """Return the positions of patches [N − 1, D]: `positions` [1, N, D] without the first one, of the class token."""
  return positions[0, 1:]


def _size(word: int | str, sizes: Mapping[str, int]) -> int | str:
  if isinstance(word, int):
    return word
  if word[0].isdigit() and word[1:] in sizes:
    return int(word[0]) * sizes[word[1:]]
  return sizes.get(word, word)


def _join_names(names: list[str], most: int) -> str:
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more
