"""The trunk of a network: homogeneous blocks one after another, and a norm. What tokens stand for doesn't matter."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.errors import UserError
from hbf.nn.block import Block
from hbf.nn.context import Context
from hbf.nn.registry import Stage
from hbf.ops.layout import BATCH, laid


class Trunk(nn.Module):
  """Blocks block0, block1, … of any two stages, then a LayerNorm.

  Attributes:
    depth: number of blocks.
    stage1: constructor, see `hbf.nn.registry.make_stages`.
    stage2: constructor, or None.
    dropout: rate, after each stage.
    dtype: of the products; parameters are float32.
    norm_epsilon: added to the variance in each LayerNorm.
    scan_layers: loop over one block instead of writing all of them into the program. The parameters are the same, but
      dropout draws other numbers, and intermediates can't be captured.
    remat: compute what a block holds once more in the backward pass instead of keeping it.
    parallel: both stages of a block read its input, see `hbf.nn.block.Block`.
    layer_scale: where the factors on the stages' outputs start; 0: there are none.
    drop_path: stochastic depth: rate of the last block, growing linearly from 0 in the first.
  """

  depth: int
  stage1: Stage
  stage2: Stage | None
  dropout: float = 0.0
  dtype: Any = jnp.float32
  norm_epsilon: float = 1e-6
  scan_layers: bool = False
  remat: bool = False
  parallel: bool = False
  layer_scale: float = 0.0
  drop_path: float = 0.0

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context, read: slice = slice(None)) -> jax.Array:
    """Maps tokens [B, N, D] to [B, M, D].

    Args:
      tokens: embedded.
      context: of the call; every stage gets it.
      read: which M of the N tokens come out. A norm works on each token alone, so only these are normed.

    Raises:
      UserError: an option's value can't be.
    """
    if not 0 <= self.drop_path < 1:
      raise UserError(f'model.drop_path is a rate from 0 to below 1: it is {self.drop_path}')
    tokens = self._blocks(laid(tokens, BATCH, None, None), context)[:, read]
    return nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name='norm')(tokens)

  def _blocks(self, tokens: jax.Array, context: Context) -> jax.Array:
    kind = nn.remat(Block, prevent_cse=not self.scan_layers) if self.remat else Block
    make = functools.partial(
      kind, self.stage1, self.stage2, self.dropout, self.dtype, self.norm_epsilon, self.parallel, self.layer_scale
    )
    rates = jnp.linspace(0, self.drop_path, self.depth) if self.drop_path else [None] * self.depth
    # At init, parameters depend on the tokens that reach their block.
    if self.is_initializing() or not self.scan_layers:
      for i in range(self.depth):
        tokens = make(name=f'block{i}')(tokens, context, rates[i])
      return tokens

    def layer(tokens: jax.Array, xs: tuple[Any, dict[str, jax.Array], Any]) -> tuple[jax.Array, None]:
      params, rngs, rate = xs
      return jnp.asarray(make(parent=None).apply({'params': params}, tokens, context, rate, rngs=rngs)), None

    blocks = [self.variables['params'][f'block{i}'] for i in range(self.depth)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    rngs = {'dropout': jax.random.split(self.make_rng('dropout'), self.depth)} if self.has_rng('dropout') else {}
    return jax.lax.scan(layer, tokens, (stacked, rngs, rates if self.drop_path else None))[0]
