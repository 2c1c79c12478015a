"""Which tensors a state_dict of the authors' public code has, in all of its versions, and of which shapes.

Read in main.py of github.com/sunrainyg/Unified_architecture, at its commits of 2023-09-08 to 2023-10-31. A word in a
shape is a size that tensors share; the first tensor that has it says how much it is.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hbf.errors import UserError

Shape = tuple[int | str, ...]

_NETWORK: dict[str, Shape] = {
  'cls_token': (1, 1, 'D'),
  'pos_embed': (1, 'N', 'D'),
  'patch_embed.proj.weight': ('D', 'channels', 'patch', 'patch'),
  'patch_embed.proj.bias': ('D',),
  'norm.weight': ('D',),
  'norm.bias': ('D',),
  'head.weight': ('classes', 'D'),
  'head.bias': ('classes',),
}
_BLOCK: dict[str, Shape] = {
  'norm1.weight': ('D',),
  'norm1.bias': ('D',),
  'attn.M': ('d', 'd'),
  'attn.qkv.weight': ('3D', 'D'),
  'attn.proj.weight': ('D', 'D'),
  'attn.proj.bias': ('D',),
  'norm2.weight': ('D',),
  'norm2.bias': ('D',),
}
_STAGES: dict[str, dict[str, Shape]] = {
  'hyperbf': {
    'attn.scale': (),
    'mlp.centers': ('hidden', 'D'),
    'mlp.beta': ('hidden',),
    'mlp.M_RBF': ('D', 'D'),
    'mlp.fc.weight': ('D', 'hidden'),
    'mlp.fc.bias': ('D',),
  },
  'vit': {
    'mlp.fc1.weight': ('hidden', 'D'),
    'mlp.fc1.bias': ('hidden',),
    'mlp.fc2.weight': ('D', 'hidden'),
    'mlp.fc2.bias': ('D',),
  },
}
# Versions differ in these: all blocks have one, or none has.
_OPTIONAL = ('attn.scale', 'mlp.M_RBF', 'mlp.fc.bias')
_NAMES = {'hyperbf': 'Hyper_ViT', 'vit': 'ViT'}
# ViT's attention has an M as well, which it doesn't use: an identity of 192, whatever its width and heads.
_UNUSED: dict[str, tuple[str, ...]] = {'hyperbf': (), 'vit': ('.attn.M',)}
_VIT_M, _VIT_HEADS = 192, 4


@dataclasses.dataclass(frozen=True)
class Layout:
  """What the tensors say of a network.

  Attributes:
    model: 'hyperbf' (Hyper_ViT) or 'vit' (ViT).
    width: D.
    depth: number of blocks.
    heads: of the attention.
    hidden: centres, or hidden units, of a block.
    patch: side of a patch in pixels.
    channels: of the images.
    classes: number of logits.
    grid: rows, and columns, of the patches that have positions.
    unused: names of tensors that the network doesn't compute with.
  """

  model: str
  width: int
  depth: int
  heads: int
  hidden: int
  patch: int
  channels: int
  classes: int
  grid: int
  unused: tuple[str, ...]


def read_layout(tensors: Mapping[str, np.ndarray], heads: int | None) -> Layout:
  """The layout of a state_dict.

  Args:
    tensors: by name.
    heads: of the attention, or None: Hyper_ViT's M has their dimensions. ViT's tensors don't depend on its heads;
      there None is 4, the code's default, unless somebody made the unused M of another size than the code's 192.

  Raises:
    UserError: it is that of another network; the message lists missing and unknown tensors, and wrong shapes.
  """
  model = 'vit' if any(name.endswith('.mlp.fc1.weight') for name in tensors) else 'hyperbf'
  blocks = {match[1] for name in tensors if (match := re.match(r'blocks\.(\d+)\.', name))}
  expected = _expected(
    model, len(blocks), {name for name in _OPTIONAL if any(t.endswith(f'.{name}') for t in tensors)}
  )
  sizes = _sizes(tensors, expected)
  shapes = {name: tuple(sizes.get(n, n) for n in shape) for name, shape in expected.items()}
  faults = {
    'missing': [name for name in expected if name not in tensors],
    'unknown': [name for name in tensors if name not in expected],
    'of a wrong shape': [
      f'{name} {tensors[name].shape} instead of {shape}'
      for name, shape in shapes.items()
      if name in tensors and tensors[name].shape != shape
    ],
  }
  if any(faults.values()) or not blocks:
    found = '; '.join(f'{what}: {_listed(names)}' for what, names in faults.items() if names) or 'it has no blocks'
    raise UserError(f"not a state_dict of the authors' {_NAMES[model]}: {found}")
  grid = round((sizes['N'] - 1) ** 0.5)
  if grid < 1 or grid**2 != sizes['N'] - 1:
    raise UserError(f'pos_embed has {sizes["N"]} positions: not those of a class token and a square of patches')
  return Layout(
    model=model,
    width=sizes['D'],
    depth=len(blocks),
    heads=_heads(model, sizes['D'], sizes['d'], heads),
    hidden=sizes['hidden'],
    patch=sizes['patch'],
    channels=sizes['channels'],
    classes=sizes['classes'],
    grid=grid,
    unused=tuple(name for name in expected if name.endswith(_UNUSED[model])),
  )


def _expected(model: str, depth: int, optional: Iterable[str]) -> dict[str, Shape]:
  """Names and shapes of all tensors, in the order of the network."""
  block = {n: shape for n, shape in (_BLOCK | _STAGES[model]).items() if n not in _OPTIONAL or n in optional}
  return _NETWORK | {f'blocks.{i}.{name}': shape for i in range(depth) for name, shape in block.items()}


def _sizes(tensors: Mapping[str, np.ndarray], expected: Mapping[str, Shape]) -> dict[Any, int]:
  """How much each word is."""
  sizes: dict[Any, int] = {}
  for name, shape in expected.items():
    if name in tensors and tensors[name].ndim == len(shape):
      for word, size in zip(shape, tensors[name].shape, strict=True):
        if isinstance(word, str):
          sizes.setdefault(word, size)
  return sizes | {'3D': 3 * sizes.get('D', 0)}


def _heads(model: str, width: int, d: int, given: int | None) -> int:
  told = _VIT_HEADS if (model, d) == ('vit', _VIT_M) else width // max(d, 1)
  heads = told if given is None or model == 'hyperbf' else given
  if heads < 1 or width % heads or (model == 'hyperbf' and (heads * d != width or given not in (None, heads))):
    wanted = '' if given is None else f' with {given} heads'
    raise UserError(f'attn.M is {d}×{d}, which does not go with a width of {width}{wanted}')
  return heads


def _listed(names: list[str], most: int = 30) -> str:
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more
