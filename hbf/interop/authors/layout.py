"""Which tensors a state_dict of the authors' public code has, in all of its versions, and of which shapes.

Read in main.py of github.com/sunrainyg/Unified_architecture, at its commits of 2023-09-08 to 2023-10-31.
"""

import dataclasses
from collections.abc import Iterable

from hbf.errors import UserError
from hbf.interop.positions import square_side
from hbf.interop.table import Shape, Tensors, check, count_blocks

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
ORIGINS = {'hyperbf': "the authors' Hyper_ViT", 'vit': "the authors' ViT"}
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


def read_layout(tensors: Tensors, heads: int | None) -> Layout:
  """The layout of a state_dict.

  Args:
    tensors: by name.
    heads: of the attention, or None: Hyper_ViT's M has their dimensions. ViT's tensors don't depend on its heads;
      there None is 4, the code's default, unless somebody made the unused M of another size than the code's 192.

  Raises:
    UserError: it is that of another network; the message lists missing and unknown tensors, and wrong shapes.
  """
  model = 'vit' if any(name.endswith('.mlp.fc1.weight') for name in tensors) else 'hyperbf'
  depth = count_blocks(tensors, 'blocks.{}.')
  optional = {name for name in _OPTIONAL if any(t.endswith(f'.{name}') for t in tensors)}
  expected = _expected(model, depth, optional)
  sizes = check(tensors, expected, depth, ORIGINS[model])
  return Layout(
    model=model,
    width=sizes['D'],
    depth=depth,
    heads=_heads(model, sizes['D'], sizes['d'], heads),
    hidden=sizes['hidden'],
    patch=sizes['patch'],
    channels=sizes['channels'],
    classes=sizes['classes'],
    grid=square_side(sizes['N'] - 1),
    unused=tuple(name for name in expected if name.endswith(_UNUSED[model])),
  )


def _expected(model: str, depth: int, optional: Iterable[str]) -> dict[str, Shape]:
  """Names and shapes of all tensors, in the order of the network."""
  block = {n: shape for n, shape in (_BLOCK | _STAGES[model]).items() if n not in _OPTIONAL or n in optional}
  return _NETWORK | {f'blocks.{i}.{name}': shape for i in range(depth) for name, shape in block.items()}


def _heads(model: str, width: int, d: int, given: int | None) -> int:
  told = _VIT_HEADS if (model, d) == ('vit', _VIT_M) else width // max(d, 1)
  heads = told if given is None or model == 'hyperbf' else given
  if heads < 1 or width % heads or (model == 'hyperbf' and (heads * d != width or given not in (None, heads))):
    wanted = '' if given is None else f' with {given} heads'
    raise UserError(f'attn.M is {d}×{d}, which does not go with a width of {width}{wanted}')
  return heads
