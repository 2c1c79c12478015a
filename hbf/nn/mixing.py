"""Stages that mix tokens without asking what is in them: MLP-Mixer's, PoolFormer's, and none."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError, choose
from hbf.nn.context import EVALUATION, Context, seen_by_all
from hbf.nn.mlp import ACTIVATIONS


class TokenMLP(nn.Module):
  """Two dense layers over the tokens, the same for every channel (MLP-Mixer, Tolstikhin et al. 2021, eq. 1).

  A token costs 4 hidden D operations. N is fixed. Under a causal context units belong to the tokens, in order: a unit
  is made of the tokens up to its own, and read by those from there on (masks as in MADE, Germain et al. 2015).

  Attributes:
    hidden: units between the layers, the paper's D_S.
    activation: a name in `hbf.nn.mlp.ACTIVATIONS`.
    dtype: of the products; parameters are float32.
  """

  hidden: int
  activation: str = 'gelu'
  dtype: Any = jnp.float32
  masked: ClassVar[str] = 'keys'
  causal: ClassVar[bool] = True
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
    made_of, read_by = self._order(length) if context.causal else (None, None)
    inputs = shown(tokens, context).mT.reshape(-1, length)
    hidden = nn.Dense(self.hidden, dtype=self.dtype, dot_general=product_over(made_of), name='hidden')(inputs)
    out = nn.Dense(length, dtype=self.dtype, dot_general=product_over(read_by), name='out')(activation(hidden))
    return out.reshape(batch, width, length).mT

  def _order(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens a unit is made of, [N, hidden], and which read it, [hidden, N]."""
    tokens, owners = np.arange(length), np.arange(self.hidden) * length // self.hidden
    return tokens[:, None] <= owners, owners[:, None] <= tokens


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
  masked: ClassVar[str] = 'any'  # no token sees another
  causal: ClassVar[bool] = True

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Returns tokens [B, N, D]."""
    return tokens.astype(self.dtype)


def product_over(seen: np.ndarray | None) -> Callable[..., jax.Array] | None:
  """A dense layer's product with the kernel's numbers that are seen, booleans [inputs, outputs], or with all."""
  if seen is None:
    return None
  return lambda inputs, kernel, *how, **more: jax.lax.dot_general(inputs, jnp.where(seen, kernel, 0), *how, **more)


def shown(tokens: jax.Array, context: Context) -> jax.Array:
  """Tokens [B, N, D] with zeros for those that no other sees."""
  seen = seen_by_all(context)
  return tokens if seen is None else jnp.where(seen[..., None], tokens, 0)


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
