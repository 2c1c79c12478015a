"""Stages that mix tokens without asking what is in them: MLP-Mixer's, PoolFormer's, and none."""

import math
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.errors import UserError
from hbf.nn.baselines.mlp import ACTIVATIONS
from hbf.nn.cache import new_tokens
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, seen_by_all
from hbf.options import odd, one_of, whole


class TokenMLP(CheckedModule):
  """Two dense layers over the tokens, the same for every channel (MLP-Mixer, Tolstikhin et al. 2021, eq. 1).

  A token costs 4 hidden D operations. N is fixed. Under a causal context units belong to the tokens, in order: a unit
  is made of the tokens up to its own, and read by those from there on (masks as in MADE, Germain et al. 2015).

  Attributes:
    hidden: units between the layers, the paper's D_S.
    activation: a name in `hbf.nn.baselines.mlp.ACTIVATIONS`.
    dtype: of the products; parameters are float32.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  dtype: Any = jnp.float32
  masked: ClassVar[str] = 'keys'
  causal: ClassVar[bool] = True
  continues: ClassVar[bool] = True
  share: ClassVar[float] = 1 / 8  # of a recipe's hidden units: Mixer has D/2 here for 4D in stage 2

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the parameters are for another number of tokens.
    """
    (batch, count, width), length = tokens.shape, room(tokens, context)
    check_length(self, 'hidden', length)
    activation = ACTIVATIONS[self.activation]
    first = TokenDense(length, self.hidden, dtype=self.dtype, name='hidden')
    second = TokenDense(self.hidden, length, dtype=self.dtype, name='out')
    made_of, read_by = self._order(length) if context.causal else (None, None)
    sums = shown(tokens, context).mT.reshape(-1, count) @ new_tokens(first.kernel(made_of), context, count, 0)
    if context.continued is not None:
      earlier = self.variable('cache', 'sums', jnp.zeros, sums.shape, sums.dtype)
      sums = earlier.value = earlier.value + sums
    out = activation(sums + first.bias()) @ new_tokens(second.kernel(read_by), context, count, 1)
    out += new_tokens(second.bias(), context, count, 0)
    return out.reshape(batch, width, count).mT

  def _order(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens a unit is made of, [N, hidden], and which read it, [hidden, N]."""
    tokens, owners = np.arange(length), np.arange(self.hidden) * length // self.hidden
    return tokens[:, None] <= owners, owners[:, None] <= tokens


class AveragePooling(CheckedModule):
  """The mean of a square of patches around each, minus the patch (PoolFormer, Yu et al. 2022, eq. 4).

  Nothing is learned and what the patches show doesn't matter: the null control. A token costs window² D operations.

  Attributes:
    window: side of the square in patches, odd.
    dtype: of the result.
  """

  window: Annotated[int, odd(1)] = 3
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D], a square of patches row by row, to [B, N, D].

    Raises:
      UserError: N isn't a square.
    """
    batch, length, width = tokens.shape
    side = math.isqrt(length)
    if side * side != length:
      raise UserError(
        f'pooling needs a square of patches, and here are {length} tokens: use square images without a class token '
        '(pool mean or sequence)'
      )
    grid = tokens.reshape(batch, side, side, width).astype(self.dtype)
    # Sums of neighbors within the image over their number: at the edges they are fewer.
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
  continues: ClassVar[bool] = True

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Returns tokens [B, N, D]."""
    return tokens.astype(self.dtype)


class TokenDense(nn.Module):
  """The parameters of a dense layer over tokens, to or from them; what they multiply is the stage's to say.

  Attributes:
    inputs: numbers that it takes.
    outputs: numbers that it gives.
    kernel_init: of its kernel, [inputs, outputs].
    bias_init: of its bias, [outputs].
    dtype: of both as they are given out; as parameters they are float32.
  """

  inputs: int
  outputs: int
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Any = jnp.float32

  def setup(self) -> None:
    """Makes the parameters."""
    self._kernel = self.param('kernel', self.kernel_init, (self.inputs, self.outputs))
    self._bias = self.param('bias', self.bias_init, (self.outputs,))

  def kernel(self, seen: np.ndarray | None) -> jax.Array:
    """The kernel [inputs, outputs], with zeros where booleans of that shape say that an input isn't seen."""
    kernel = self._kernel if seen is None else jnp.where(seen, self._kernel, 0)
    return kernel.astype(self.dtype)

  def bias(self) -> jax.Array:
    """The bias, [outputs]."""
    return self._bias.astype(self.dtype)


def room(tokens: jax.Array, context: Context) -> int:
  """How many tokens [B, N, D] are, or, where they continue others, can be."""
  return tokens.shape[1] if context.continued is None else context.continued.room


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
        'the tokens, so give it images (and a patch and pool) of the size it was made for, or train it for '
        'this size; attention and HyperBF take any number'
      )
