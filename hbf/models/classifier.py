"""Image classifier: patches, homogeneous blocks, a linear head."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose
from hbf.nn.context import Context
from hbf.nn.trunk import Trunk

POOLS = {'cls': True, 'mean': False}


class PatchEmbedding(nn.Module):
  """Patches of an image as tokens, with their positions (Dosovitskiy et al. 2021).

  Attributes:
    width: D, a token's dimensions.
    patch: side of a square patch in pixels; it must divide the image's height and width.
    pool: 'cls' (a class token comes first, and is read out) or 'mean' (of the patches).
    positions: 'learned', 'sincos2d' (fixed 2-D sines and cosines; D divisible by 4) or 'none'.
    dropout: rate.
    dtype: of the products; parameters are float32.
  """

  width: int
  patch: int
  pool: str
  positions: str
  dropout: float = 0.0
  dtype: Any = jnp.float32

  @property
  def read(self) -> slice:
    """The tokens that a head reads the mean of."""
    return slice(0, 1) if choose('pool', self.pool, POOLS) else slice(None)

  @nn.compact
  def __call__(self, images: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, N, D] of images [B, height, width, channels], and their places [N, 2]: row and column, in patches.

    A class token has no place.

    Raises:
      UserError: the patch doesn't divide the image, or an option's value isn't known.
    """
    patches = to_patches(images, self.patch)
    batch, rows, columns, pixels = patches.shape
    places = np.mgrid[:rows, :columns].reshape(2, -1).T.astype(np.float32)
    tokens = nn.Dense(self.width, dtype=self.dtype, name='embedding')(patches.reshape(-1, pixels))
    tokens = tokens.reshape(batch, -1, self.width) + self._positions(places)
    if choose('pool', self.pool, POOLS):
      token = self.param('class_token', nn.initializers.normal(0.02), (1, 1, self.width))
      first = jnp.broadcast_to(token, (batch, 1, self.width))
      tokens = jnp.concatenate([first.astype(self.dtype), tokens], axis=1)
      places = np.concatenate([np.full((1, 2), np.nan, np.float32), places])
    return nn.Dropout(self.dropout, deterministic=not train)(tokens), jnp.asarray(places)

  def _positions(self, places: np.ndarray) -> jax.Array:
    """What is added to patches at places [N, 2], row by row: [N, D]."""
    shape = (len(places), self.width)
    makers: dict[str, Callable[[], Any]] = {
      'learned': lambda: self.param('positions', nn.initializers.normal(0.02), shape),
      'sincos2d': lambda: sincos2d(places, self.width),
      'none': lambda: np.zeros(shape),
    }
    return jnp.asarray(choose('positions', self.positions, makers)(), self.dtype)


class ImageClassifier(nn.Module):
  """An embedding, a trunk of blocks, and a linear head on the mean of the tokens that are read.

  Attributes:
    embed: makes tokens of images.
    trunk: the blocks and the last norm.
    classes: number of logits.
  """

  embed: PatchEmbedding
  trunk: Trunk
  classes: int

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
    """Logits [B, classes] in float32 of normalised images [B, height, width, channels].

    Raises:
      UserError: the patch doesn't divide the image, or an option's value isn't known.
    """
    for part in (self.embed, self.trunk):
      nn.share_scope(self, part)  # parameters are `embedding` and `block0`, not `embed/embedding` and `trunk/block0`
    tokens, places = self.embed(images, train)
    tokens = self.trunk(tokens, Context(train=train, places=places), self.embed.read)
    return nn.Dense(self.classes, name='head')(tokens.mean(axis=1).astype(jnp.float32))


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


def sincos2d(places: np.ndarray, width: int) -> np.ndarray:
  """Fixed positions [N, width] of places [N, 2]: sine and cosine of row and column (as in Beyer et al. 2022).

  Raises:
    UserError: the width isn't divisible by 4.
  """
  if width % 4:
    raise UserError(f'sincos2d positions need a width divisible by 4: model.width is {width}')
  frequencies = 10_000.0 ** -np.linspace(0, 1, width // 4)
  y, x = places.T[:, :, None] * frequencies
  return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=-1).astype(np.float32)
