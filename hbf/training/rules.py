"""Rules for parameters: learning rate, weight decay and sharding.

The end of a parameter's path selects its rule: the first one in `RULES` that matches. The beginning of the path tells
the parameter's layer. A parameter without a rule or a layer is an error.
"""

import dataclasses
import re
from typing import Any

import jax

from hbf.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule for some parameters, which the optimizer and the sharding follow.

  Attributes:
    names: a regular expression for the last parts of the parameters' paths.
    rate: 'center' or 'sigma' to multiply the learning rate by the config's `center_rate` or `sigma_rate`. '': the
      learning rate stays.
    decay: True if weight decay shrinks the parameters.
    tensor: the index of the parameter's axis of heads, hidden units or centers, which is split over the mesh axis
      'tensor'. None if there is no such axis.
    matrices: the number of matrices side by side in the last two axes of a parameter, such as 3 in the kernel
      [D, 3·D] of queries, keys and values. Muon updates each matrix separately. 0: Muon does not update the
      parameter. `BESIDE_OUT`: the number of columns of the parameter, divided by the number of rows of the
      kernel `out` in the same module. This is 2 in a gated MLP, and 1 in other MLPs.
  """

  names: str
  rate: str = ''
  decay: bool = False
  tensor: int | None = None
  matrices: int = 0


BESIDE_OUT = -1  # see `Rule.matrices`
# Weights and centers decay. Norms, biases, positions, gains, sigmas, offsets and metrics do not. The modules in
# hbf/nn and hbf/models define the names.
RULES = (
  Rule('centers', rate='center', decay=True, tensor=1, matrices=1),  # [heads, centers, dimensions]
  Rule('memory_centers', rate='center', decay=True, tensor=0, matrices=1),  # [heads, centers, dimensions of a head]
  Rule('(position_)?log_sigma|beta', rate='sigma'),
  Rule('slopes', decay=True, tensor=1, matrices=1),  # [heads, centers, dimensions]
  Rule('coefficients', decay=True, tensor=1, matrices=1),  # [heads, centers, width]
  Rule('memory_coefficients', decay=True, tensor=0, matrices=1),
  Rule('(attention_)?qkv/kernel', decay=True, tensor=1, matrices=3),  # [width, 3 · units]
  Rule('qk/kernel', decay=True, tensor=1, matrices=2),
  Rule('v/kernel', decay=True, tensor=1, matrices=1),  # [width, units]
  Rule('(in|hidden)/kernel', decay=True, tensor=1, matrices=BESIDE_OUT),  # [width, units]
  Rule('out/kernel', decay=True, tensor=0, matrices=1),  # [units, width]
  Rule('filters', decay=True, tensor=1),  # [2, heads, window]
  Rule('kernel|embedding/embedding', decay=True, matrices=1),  # a tied embedding is the head's kernel too
  Rule('(qkv|qk|in|hidden)/bias', tensor=0),
  Rule(
    'bias|scale|scale_stage[12]|metric|log_gain|squared_radius|depth|slope_bias|position_slopes|class_token|positions|position_offset'
  ),
  Rule('whitening'),  # frozen: its gradient is 0, and nothing shrinks it
)
# The first names in paths of parameters before the blocks, in a block, and behind the blocks.
BEFORE, BLOCK, BEHIND = (
  r'(norm_)?stem\d+|embedding|class_token|positions',
  r'(?:block|(?:norm_)?merge)(\d+)',
  'norm|pool|head',
)


def rule_of(path: tuple[Any, ...]) -> Rule:
  """Return the rule of the parameter at a path of JAX keys.

  Raises:
    UserError: no rule matches. A module with a new kind of parameter needs a line in RULES.
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
  """Return the `Rule` of each parameter, as a tree with the structure of the parameters."""
  return jax.tree_util.tree_map_with_path(lambda path, _: rule_of(path), params)


def matrices_of(params: Any) -> Any:
  """Return the number of matrices for Muon in each parameter, as a tree like the parameters.

  In the blocks, `Rule.matrices` defines the number. Outside the blocks, it is 0, because Muon treats only parameters
  of the blocks as matrices.
  """
  shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

  def count(path: tuple[Any, ...], leaf: Any) -> int:
    matrices = rule_of(path).matrices if re.fullmatch(BLOCK, path[0].key) else 0
    if matrices != BESIDE_OUT:
      return matrices
    beside = jax.tree_util.keystr((*path[:-2], jax.tree_util.DictKey('out'), path[-1]))
    return leaf.shape[-1] // shapes[beside][0]

  return jax.tree_util.tree_map_with_path(count, params)


def height_of(path: tuple[Any, ...], depth: int) -> int:
  """Return the height of a parameter: its distance from the head, in layers.

  The height is depth + 1 before the blocks, depth − i in block i, and 0 after the blocks.

  Args:
    path: the path of the parameter, as JAX keys.
    depth: the number of blocks.

  Raises:
    LookupError: the path belongs to no layer. If a network has a new part, its name must be in BEFORE or BEHIND.
  """
  name = path[0].key
  if block := re.fullmatch(BLOCK, name):
    return depth - int(block[1])
  if not re.fullmatch(f'{BEFORE}|{BEHIND}', name):
    raise LookupError(f'no layer for the parameter {jax.tree_util.keystr(path)}: hbf/training/rules.py needs one')
  return depth + 1 if re.fullmatch(BEFORE, name) else 0


def heights_of(params: Any) -> Any:
  """Return the height of each parameter (`height_of`), as a tree like the parameters."""
  depth = sum(name.startswith('block') for name in params)
  return jax.tree_util.tree_map_with_path(lambda path, _: height_of(path, depth), params)
