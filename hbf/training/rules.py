"""How a parameter is treated by its name, the last parts of its path, and by the layer that the first names.

Of rules the first that matches wins; a parameter without a rule or a layer is an error.
"""

import dataclasses
import re
from typing import Any

import jax

from hbf.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rule:
  """How the optimizer treats some parameters, and how devices share them.

  Attributes:
    names: pattern of the last parts of their paths.
    rate: what multiplies the learning rate: 'center' or 'sigma' (the config's `center_rate` or `sigma_rate`), or ''.
    decay: whether weight decay shrinks it.
    tensor: the axis of its heads, hidden units or centers, which the mesh's tensor splits; None if it has none.
    matrices: number of matrices side by side along its last axis, 0 for other parameters. Its last two axes are the
      rows and columns, and axes before them count further matrices. `BESIDE_OUT`: as many matrices as the rows of the
      kernel `out` beside it fit into its columns. Muon takes the matrices of the blocks.
  """

  names: str
  rate: str = ''
  decay: bool = False
  tensor: int | None = None
  matrices: int = 0


BESIDE_OUT = -1  # see `Rule.matrices`
# Weights decay, centers with them: not norms, biases, positions, gains, widths, offsets or metrics. Names are those
# that modules in hbf/nn and hbf/models give.
RULES = (
  Rule('centers', rate='center', decay=True, tensor=1, matrices=1),  # [heads, centers, dimensions]
  Rule('memory_centers', rate='center', decay=True, tensor=0, matrices=1),  # [heads, centers, dimensions of a head]
  Rule('(position_)?log_sigma|beta', rate='sigma'),
  Rule('slopes', decay=True, tensor=1, matrices=1),  # [heads, centers, dimensions]
  Rule('coefficients', decay=True, tensor=1, matrices=1),  # [heads, centers, width]
  Rule('memory_coefficients', decay=True, tensor=0, matrices=1),
  Rule('(attention_)?qkv/kernel', decay=True, tensor=1, matrices=3),  # [width, 3 · units]
  Rule('qk/kernel', decay=True, tensor=1, matrices=2),
  Rule('(in|hidden)/kernel', decay=True, tensor=1, matrices=BESIDE_OUT),  # [width, units]
  Rule('out/kernel', decay=True, tensor=0, matrices=1),  # [units, width]
  Rule('kernel|embedding/embedding', decay=True, matrices=1),  # tied, vectors of tokens are the head's kernel
  Rule('(qkv|qk|in|hidden)/bias', tensor=0),
  Rule(
    'bias|scale|scale_stage[12]|metric|log_gain|squared_radius|depth|slope_bias|position_slopes|class_token|positions|position_offset'
  ),
  Rule('whitening'),  # frozen: its gradient is 0, and nothing shrinks it
)
# First names: before the blocks, of a block, and behind them.
BEFORE, BLOCK, BEHIND = (
  r'(norm_)?stem\d+|embedding|class_token|positions',
  r'(?:block|(?:norm_)?merge)(\d+)',
  'norm|pool|head',
)


def rule_of(path: tuple[Any, ...]) -> Rule:
  """The rule of the parameter at a path of JAX keys.

  Raises:
    UserError: there is none; a module with a new kind of parameter needs a line in RULES.
  """
  name = '/'.join(key.key for key in path)
  for rule in RULES:
    if re.fullmatch(f'(.*/)?({rule.names})', name):
      return rule
  raise UserError(
    f'no rule for the parameter {jax.tree_util.keystr(path)}: the optimizer and the mesh treat every parameter by a '
    'rule. Add a line for it to RULES in hbf/training/rules.py'
  )


def rules_of(params: Any) -> Any:
  """A tree of rules like the parameters."""
  return jax.tree_util.tree_map_with_path(lambda path, _: rule_of(path), params)


def matrices_of(params: Any) -> Any:
  """Return a tree of numbers like the parameters: of matrices side by side that each leaf of a block is, or 0."""
  shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

  def count(path: tuple[Any, ...], leaf: Any) -> int:
    matrices = rule_of(path).matrices if re.fullmatch(BLOCK, path[0].key) else 0
    if matrices != BESIDE_OUT:
      return matrices
    beside = jax.tree_util.keystr((*path[:-2], jax.tree_util.DictKey('out'), path[-1]))
    return leaf.shape[-1] // shapes[beside][0]

  return jax.tree_util.tree_map_with_path(count, params)


def height_of(path: tuple[Any, ...], depth: int) -> int:
  """Layers from a parameter up to the head: depth − i in block i, depth + 1 before the blocks, 0 behind them.

  Raises:
    LookupError: it is of no layer; a network with a new part needs its name in BEFORE or BEHIND.
  """
  name = path[0].key
  if block := re.fullmatch(BLOCK, name):
    return depth - int(block[1])
  if not re.fullmatch(f'{BEFORE}|{BEHIND}', name):
    raise LookupError(f'no layer for the parameter {jax.tree_util.keystr(path)}: hbf/training/rules.py needs one')
  return depth + 1 if re.fullmatch(BEFORE, name) else 0


def heights_of(params: Any) -> Any:
  """A tree of heights like the parameters."""
  depth = sum(name.startswith('block') for name in params)
  return jax.tree_util.tree_map_with_path(lambda path, _: height_of(path, depth), params)
