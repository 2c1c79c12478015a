"""Image classifier: patches, homogeneous blocks, a linear head."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose
from hbf.nn.block import Block
from hbf.nn.registry import Stage


class ImageClassifier(nn.Module):
  """Vision transformer (Dosovitskiy et al. 2021) with blocks of any two stages.

  Attributes:
    classes: number of logits.
    width: D, a token's dimensions.
    depth: number of blocks.
    patch: side of a square patch in pixels; it must divide the image's height and width.
    pool: 'cls' (a class token is read out) or 'mean' (of the patches).
    positions: 'learned', 'sincos2d' (fixed 2-D sines and cosines; D divisible by 4) or 'none'.
    dropout: rate, after the embedding and each stage.
    stage1: constructor, see `hbf.nn.registry.make_stages`.
    stage2: constructor.
    dtype: of the products; parameters and logits are float32.
    norm_epsilon: added to the variance in each LayerNorm.
    scan_layers: loop over one block instead of writing all of them into the program. The parameters are the same, but
      dropout draws other numbers, and intermediates can't be captured.
    remat: compute what a block holds once more in the backward pass instead of keeping it.
    parallel: both stages of a block read its input, see `hbf.nn.block.Block`.
    layer_scale: where the factors on the stages' outputs start; 0: there are none.
    drop_path: stochastic depth: rate of the last block, growing linearly from 0 in the first.
  """

  classes: int
  width: int
  depth: int
  patch: int
  pool: str
  positions: str
  dropout: float
  stage1: Stage
  stage2: Stage | None
  dtype: Any = jnp.float32
  norm_epsilon: float = 1e-6
  scan_layers: bool = False
  remat: bool = False
  parallel: bool = False
  layer_scale: float = 0.0
  drop_path: float = 0.0

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
    """Logits [B, classes] in float32 of normalised images [B, height, width, channels].

    Raises:
      UserError: the patch doesn't divide the image, or an option's value isn't known.
    """
    read_class_token = choose('pool', self.pool, {'cls': True, 'mean': False})
    patches = to_patches(images, self.patch)
    batch, *grid, pixels = patches.shape
    tokens = nn.Dense(self.width, dtype=self.dtype, name='embedding')(patches.reshape(-1, pixels))
    tokens = tokens.reshape(batch, -1, self.width) + self._positions(*grid)
    if read_class_token:
      token = self.param('class_token', nn.initializers.normal(0.02), (1, 1, self.width))
      first = jnp.broadcast_to(token, (batch, 1, self.width))
      tokens = jnp.concatenate([first.astype(self.dtype), tokens], axis=1)
    tokens = nn.Dropout(self.dropout, deterministic=not train)(tokens)
    tokens = self._blocks(tokens, train)
    # A norm works on each token alone, so norm only what is read.
    tokens = tokens[:, 0] if read_class_token else tokens
    tokens = nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name='norm')(tokens)
    pooled = tokens if read_class_token else tokens.mean(axis=1)
    return nn.Dense(self.classes, name='head')(pooled.astype(jnp.float32))

  def _blocks(self, tokens: jax.Array, train: bool) -> jax.Array:
    """Takes tokens [B, N, D] through block0, block1, …"""
    kind = nn.remat(Block, prevent_cse=not self.scan_layers, static_argnums=(2,)) if self.remat else Block
    make = functools.partial(
      kind,
      self.stage1,
      self.stage2,
      self.dropout,
      self.dtype,
      self.norm_epsilon,
      self.parallel,
      self.layer_scale,
    )
    if not 0 <= self.drop_path < 1:
      raise UserError(f'model.drop_path is a rate from 0 to below 1: it is {self.drop_path}')
    rates = jnp.linspace(0, self.drop_path, self.depth) if self.drop_path else [None] * self.depth
    # At init, parameters depend on the tokens that reach their block.
    if self.is_initializing() or not self.scan_layers:
      for i in range(self.depth):
        tokens = make(name=f'block{i}')(tokens, train, rates[i])
      return tokens

    def layer(tokens: jax.Array, xs: tuple[Any, dict[str, jax.Array], Any]) -> tuple[jax.Array, None]:
      params, rngs, rate = xs
      return jnp.asarray(make(parent=None).apply({'params': params}, tokens, train, rate, rngs=rngs)), None

    blocks = [self.variables['params'][f'block{i}'] for i in range(self.depth)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    rngs = {'dropout': jax.random.split(self.make_rng('dropout'), self.depth)} if self.has_rng('dropout') else {}
    return jax.lax.scan(layer, tokens, (stacked, rngs, rates if self.drop_path else None))[0]

  def _positions(self, rows: int, columns: int) -> jax.Array:
    """Positions of the patches, row by row: [rows · columns, D]."""
    shape = (rows * columns, self.width)
    makers: dict[str, Callable[[], Any]] = {
      'learned': lambda: self.param('positions', nn.initializers.normal(0.02), shape),
      'sincos2d': lambda: sincos2d(rows, columns, self.width),
      'none': lambda: np.zeros(shape),
    }
    return jnp.asarray(choose('positions', self.positions, makers)(), self.dtype)


def to_patches(images: jax.Array, patch: int) -> jax.Array:
  """Cuts images [B, H, W, C] into patches [B, H/patch, W/patch, patch · patch · C].

  Raises:
    UserError: the patch doesn't divide the height and width.
  """
  batch, height, width, channels = images.shape
  if height % patch or width % patch:
    raise UserError(f"patches of {patch} pixels don't divide images of {height}×{width}: change model.patch")
  grid = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
  return grid.swapaxes(2, 3).reshape(batch, height // patch, width // patch, -1)


def sincos2d(rows: int, columns: int, width: int) -> np.ndarray:
  """Fixed positions [rows · columns, width]: sine and cosine of row and column (as in Beyer et al. 2022).

  Raises:
    UserError: the width isn't divisible by 4.
  """
  if width % 4:
    raise UserError(f'sincos2d positions need a width divisible by 4: model.width is {width}')
  frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
  y, x = np.mgrid[:rows, :columns].reshape(2, -1, 1) * frequencies
  return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=-1).astype(np.float32)
