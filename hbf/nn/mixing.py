"""Stages that mix tokens without asking what is in them: MLP-Mixer's, PoolFormer's, and none."""

import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.errors import UserError, choose
from hbf.nn.context import EVALUATION, Context
from hbf.nn.mlp import ACTIVATIONS


class TokenMLP(nn.Module):
  """Two dense layers over the tokens, the same for every channel (MLP-Mixer, Tolstikhin et al. 2021, eq. 1).

  A token costs 4 hidden D operations. N is fixed.

  Attributes:
    hidden: units between the layers, the paper's D_S.
    activation: a name in `hbf.nn.mlp.ACTIVATIONS`.
    dtype: of the products; parameters are float32.
  """

  hidden: int
  activation: str = 'gelu'
  dtype: Any = jnp.float32
  share: ClassVar[float] = 1 / 8  # of a recipe's hidden units: Mixer has D/2 here for 4D in stage 2

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the parameters are for another number of tokens.
    """
    batch, length, width = tokens.shape
    check_length(self, 'hidden', length)
    activation = choose('activation', self.activation, ACTIVATIONS)
    hidden = nn.Dense(self.hidden, dtype=self.dtype, name='hidden')(tokens.mT.reshape(-1, length))
    out = nn.Dense(length, dtype=self.dtype, name='out')(activation(hidden))
    return out.reshape(batch, width, length).mT


class AveragePooling(nn.Module):
  """The mean of a square of patches around each, minus the patch (PoolFormer, Yu et al. 2022, eq. 4).

  Nothing is learned and what the patches show doesn't matter: the null control. A token costs window² D operations.

  Attributes:
    window: side of the square in patches, odd.
    dtype: of the result.
  """

  window: int = 3
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D], a square of patches row by row, to [B, N, D].

    Raises:
      UserError: N isn't a square, or the window is even.
    """
    batch, length, width = tokens.shape
    side = math.isqrt(length)
    if side * side != length:
      raise UserError(
        f'pooling needs a square of patches, and here are {length} tokens: use square images without a class token '
        '(model.pool=mean)'
      )
    if self.window < 1 or self.window % 2 == 0:
      raise UserError(f'the window of pooling must be odd to have a middle: stage1.window is {self.window}')
    grid = tokens.reshape(batch, side, side, width).astype(self.dtype)
    # Sums of neighbours within the image over their number: at the edges they are fewer.
    mean = nn.avg_pool(grid, (self.window, self.window), padding='SAME', count_include_pad=False)
    return (mean - grid).reshape(tokens.shape).astype(self.dtype)


class Identity(nn.Module):
  """The tokens as they are: no mixing at all (IdentityFormer, Yu et al. 2022). It costs nothing.

  Attributes:
    dtype: of the result.
  """

  dtype: Any = jnp.float32
  masked: ClassVar[bool] = True  # no token sees another

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Returns tokens [B, N, D]."""
    return tokens.astype(self.dtype)


def check_length(module: nn.Module, layer: str, length: int) -> None:
  """Refuses another number of tokens than a module's dense layer over them was made for.

  Raises:
    UserError: naming both numbers.
  """
  if module.has_variable('params', layer):
    learned = module.variables['params'][layer]['kernel'].shape[0]
    if learned != length:
      raise UserError(
        f'{type(module).__name__} has parameters for {learned} tokens, and here are {length}: its weights belong to '
        'the tokens, so give it images (and model.patch, model.pool) of the size it was made for, or train it for '
        'this size; attention and HyperBF take any number'
      )
