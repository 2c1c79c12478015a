"""The trunk of a network: homogeneous blocks and a final LayerNorm. It is the same for images and for texts."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.nn.block import Block, make_constructors
from hbf.nn.checked import CheckedModule
from hbf.nn.context import Context, grid_positions
from hbf.nn.registry import Stage, with_units
from hbf.nn.tiles import tiles
from hbf.ops.layout import BATCH, constrain
from hbf.options import BLOCKS, FLAG, FLOATS, NOT_NEGATIVE, POSITIVE, RATE, OptionError, whole


def growth(merge: Sequence[int], block: int) -> int:
  """Return 2ᵏ for a block behind k merges. Its width, units and sides of patches are 2ᵏ times those of block 0.

  `merge` is that of `Trunk`.
  """
  return 2 ** sum(block >= merged for merged in merge)


class Trunk(CheckedModule):
  """Blocks block0, block1, … of any two stages, then a LayerNorm.

  Attributes:
    depth: number of blocks.
    stage1: a module or a constructor, as in `hbf.nn.block.Block`. With `merge`, a constructor must be a class or a
      `functools.partial` of one, so that its units are known.
    stage2: a module or a constructor, or None.
    dropout: dropout rate after each stage.
    dtype: type of the matrix products. Parameters are float32.
    norm_epsilon: number added to the variance in each LayerNorm.
    scan_layers: True to compile one block and loop over it. The parameters are the same, but dropout draws other
      numbers, and Flax cannot return arrays from inside the blocks.
    remat: True to compute the activations of a block again in the backward pass instead of keeping them.
    parallel: True if both stages of a block get the block's input, see `hbf.nn.block.Block`.
    layer_scale: initial value of learned factors that multiply the stages' outputs. 0: there are no such factors.
    drop_path: rate of stochastic depth in the last block. The rate grows linearly from 0 in the first block.
    merge: the blocks before which tokens are merged, counted from 0. A LayerNorm and a dense layer then make every
      2×2 tokens one token of twice the width (patch merging, Liu et al. 2021, "Swin Transformer"). This block and all
      later ones have twice as many units, and the same number of heads. (): tokens are never merged.
    window: side of the squares of patches in which stage 1 mixes tokens (Liu et al. 2021). The squares of every
      second block of a resolution are moved by half a side, so that patches of neighboring squares meet. Where all
      patches fit into one square, nothing changes. 0: stage 1 mixes all tokens.
  """

  depth: Annotated[int, whole(1)]
  stage1: Stage | nn.Module
  stage2: Stage | nn.Module | None
  dropout: Annotated[float, RATE] = 0.0
  dtype: Annotated[Any, FLOATS] = jnp.float32
  norm_epsilon: Annotated[float, POSITIVE] = 1e-6
  scan_layers: Annotated[bool, FLAG] = False
  remat: Annotated[bool, FLAG] = False
  parallel: Annotated[bool, FLAG] = False
  layer_scale: Annotated[float, NOT_NEGATIVE] = 0.0
  drop_path: Annotated[float, RATE] = 0.0
  merge: Annotated[tuple[int, ...], BLOCKS] = ()
  window: Annotated[int, whole(0)] = 0

  def __post_init__(self) -> None:
    """Replace each stage that is a module by its constructor, as `hbf.nn.block.Block` does.

    Raises:
      ValueError: a stage is neither a module nor a constructor, or a field has a value outside its range.
    """
    make_constructors(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    tokens: Float[Array, 'B N D'],
    context: Context,
    read: slice = slice(None),
  ) -> Float[Array, 'B M E']:
    """Map tokens [B, N, D] to [B, M, D], or to [B, M, 2ᵏD] if they are merged before k blocks.

    Args:
      tokens: embedded tokens.
      context: the context of the call, for every stage.
      read: slice that selects the M tokens to return. With `merge` it selects from the N/4ᵏ merged tokens. The last
        LayerNorm is computed for the selected tokens only.

    Raises:
      OptionError: tokens cannot be merged as `merge` says, or not be divided into windows.
    """
    self._check_merge(context.grid_of(tokens.shape[1]))
    if self.window and self.scan_layers:
      raise OptionError(
        f'window={self.window} has two kinds of blocks, and scan_layers loops over one: set one of them off',
        window=self.window,
      )
    tokens = self._blocks(constrain(tokens, BATCH, None, None), context)[:, read]
    return nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name='norm')(tokens)

  def _check_merge(self, grid: tuple[int, int] | None) -> None:
    """Raise OptionError if tokens cannot be merged as `merge` says. `grid` is None if they are not patches only."""
    if not self.merge:
      return
    wrong, side, known = '', 2 ** len(self.merge), functools.partial | type | None
    if self.merge[-1] >= self.depth:
      wrong = f'names block {self.merge[-1]} of {self.depth}: use 1 to {self.depth - 1}, or () for one resolution'
    elif self.scan_layers:
      wrong = 'has blocks of several widths, and scan_layers loops over one: set one of them off'
    elif not all(isinstance(stage, known) for stage in (self.stage1, self.stage2)):
      wrong = 'doubles the units of stages, and those of a function are not known: give modules as stages'
    elif grid is None:
      wrong = 'needs tokens that are patches only: set pool to mean or sequence'
    elif grid[0] % side or grid[1] % side:
      wrong = (
        f'divides the sides of the grid of tokens by {side}, and {grid[0]}×{grid[1]} tokens have no such part: '
        'change the patch or the image'
      )
    if wrong:
      raise OptionError(f'merge={self.merge} {wrong}', merge=self.merge)

  def _merged(self, tokens: jax.Array, context: Context, block: int) -> tuple[jax.Array, Context]:
    """Merge tokens [B, N, D] to [B, N/4, 2D] for a block. Return them, and the context with their positions."""
    assert context.grid is not None
    (rows, columns), (batch, _, width) = (context.grid[0] // 2, context.grid[1] // 2), tokens.shape
    squares = tiles(tokens.reshape(batch, 2 * rows, 2 * columns, width), 2, 2)
    joined = squares.reshape(batch, rows, columns, 4 * width).reshape(-1, 4 * width)
    normed = nn.LayerNorm(self.norm_epsilon, self.dtype, name=f'norm_merge{block}')(joined)
    merged = nn.Dense(2 * width, use_bias=False, dtype=self.dtype, name=f'merge{block}')(normed)
    positions = jnp.asarray(grid_positions(rows, columns))
    context = dataclasses.replace(context, positions=positions, grid=(rows, columns))
    return constrain(merged.reshape(batch, rows * columns, 2 * width), BATCH, None, None), context

  def _blocks(self, tokens: jax.Array, context: Context) -> jax.Array:
    """Apply all blocks to tokens [B, N, D]."""
    kind: Any = nn.remat(Block, prevent_cse=not self.scan_layers) if self.remat else Block
    options = (self.dropout, self.dtype, self.norm_epsilon, self.parallel, self.layer_scale)
    rates = jnp.linspace(0, self.drop_path, self.depth) if self.drop_path else None
    # At initialization there is no loop: the parameters of a block depend on the tokens that reach it.
    if self.scan_layers and not self.is_initializing():
      return self._scan(functools.partial(kind, self.stage1, self.stage2, *options), tokens, context, rates)
    first = 0  # the first block of a resolution
    for i in range(self.depth):
      if i in self.merge:
        tokens, context = self._merged(tokens, context, i)
        first = i
      stages = [with_units(stage, growth(self.merge, i)) for stage in (self.stage1, self.stage2)]
      block = kind(*stages, *options, self.window, bool((i - first) % 2), name=f'block{i}')
      tokens = block(tokens, context, None if rates is None else rates[i])
    return tokens

  def _scan(self, make: Any, tokens: jax.Array, context: Context, rates: jax.Array | None) -> jax.Array:
    """Apply all blocks as a loop over one block. The loop's parameters are the stacked parameters of all blocks.

    `make` is the constructor of a block. `rates` has the rate of stochastic depth of each block, or is None.
    """

    def layer(tokens: jax.Array, xs: tuple[Any, dict[str, jax.Array], Any]) -> tuple[jax.Array, None]:
      params, rngs, rate = xs
      return jnp.asarray(make(parent=None).apply({'params': params}, tokens, context, rate, rngs=rngs)), None

    blocks = [self.variables['params'][f'block{i}'] for i in range(self.depth)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    rngs = {'dropout': jax.random.split(self.make_rng('dropout'), self.depth)} if self.has_rng('dropout') else {}
    return jax.lax.scan(layer, tokens, (stacked, rngs, rates))[0]
