"""Stages that do not compare the content of tokens: token MLP (MLP-Mixer), pooling (PoolFormer) and identity."""

import math
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.nn.baselines.mlp import ACTIVATIONS
from hbf.nn.cache import new_tokens
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context, visible_keys
from hbf.nn.traits import TOKENWISE, StageTraits
from hbf.options import FLOATS, odd, one_of, whole


class TokenMLP(CheckedModule):
  """Two dense layers over the tokens, with the same weights for every channel.

  This is the token-mixing MLP of MLP-Mixer (Tolstikhin et al. 2021, eq. 1). A token costs 4 · `hidden` · D
  operations. The number N of tokens is fixed. If the context is causal, each hidden unit belongs to a token. The
  unit's inputs are this token and earlier tokens. Its outputs go to this token and later tokens only (masks as in
  MADE, Germain et al. 2015).

  Attributes:
    hidden: number of units between the two layers, D_S in Tolstikhin et al. 2021.
    activation: a name in `hbf.nn.baselines.mlp.ACTIVATIONS`.
    dtype: type of the matrix products. Parameters are float32.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  dtype: Annotated[Any, FLOATS] = jnp.float32
  # Mixer has D/2 hidden units in this stage, and 4D in stage 2.
  traits: ClassVar[StageTraits] = StageTraits(unit_share=1 / 8, masks='keys', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the parameters were made for longer or shorter inputs.
    """
    check_context(self, context, tokens.shape)
    (batch, count, width), length = tokens.shape, most_tokens(tokens, context)
    check_length(self, 'hidden', length)
    activation = ACTIVATIONS[self.activation]
    first = TokenDense(length, self.hidden, dtype=self.dtype, name='hidden')
    second = TokenDense(self.hidden, length, dtype=self.dtype, name='out')
    made_of, read_by = self._order(length) if context.causal else (None, None)
    sums = zero_hidden(tokens, context).mT.reshape(-1, count) @ new_tokens(first.kernel(made_of), context, count, 0)
    if context.continued is not None:
      earlier = self.variable('cache', 'sums', jnp.zeros_like, sums)
      sums = earlier.value = earlier.value + sums
    out = activation(sums + first.bias()) @ new_tokens(second.kernel(read_by), context, count, 1)
    out += new_tokens(second.bias(), context, count, 0)
    return out.reshape(batch, width, count).mT

  def _order(self, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two causal masks: a mask [N, hidden] of the units' inputs, and a mask [hidden, N] of their outputs."""
    tokens, owners = np.arange(length), np.arange(self.hidden) * length // self.hidden
    return tokens[:, None] <= owners, owners[:, None] <= tokens


class AveragePooling(CheckedModule):
  """The mean over a square window of patches around each patch, minus the patch (PoolFormer, Yu et al. 2022, eq. 4).

  Nothing is learned, and the weights of the mean do not depend on the patches. So this stage is the control for
  learned mixing. A token costs window² D operations.

  Attributes:
    window: side of the square window in patches, odd.
    dtype: type of the result.
  """

  window: Annotated[int, odd(1)] = 3
  dtype: Annotated[Any, FLOATS] = jnp.float32

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D], which are the patches of an image row by row, to [B, N, D].

    If the context has neither a grid nor positions, the image counts as a square.

    Raises:
      UserError: the context has a grid of another number of tokens, or positions without a grid. Or it has neither,
        and N is not a square number.
    """
    check_context(self, context, tokens.shape)
    batch, length, width = tokens.shape
    rows, columns = _grid(length, context)
    grid = tokens.reshape(batch, rows, columns, width).astype(self.dtype)
    # At the edges the mean is over the neighbors within the image.
    mean = nn.avg_pool(grid, (self.window, self.window), padding='SAME', count_include_pad=False)
    return (mean - grid).reshape(tokens.shape).astype(self.dtype)


def _grid(length: int, context: Context) -> tuple[int, int]:
  """Return the rows and columns of `length` tokens, or raise UserError if they are not the patches of an image."""
  if grid := context.grid_of(length):
    return grid
  side = math.isqrt(length)
  if context.grid is not None or context.positions is not None or side * side != length:
    raise UserError(
      f'stage 1 pooling needs a grid of as many patches as tokens. The grid is {context.grid}, and here are {length} '
      'tokens: use images without a class token (pool mean or sequence), and no texts'
    )
  return side, side


class Identity(nn.Module):
  """The unchanged tokens: no mixing at all (IdentityFormer, Yu et al. 2022). This stage costs no operations.

  Attributes:
    dtype: type of the result.
  """

  dtype: Any = jnp.float32
  traits: ClassVar[StageTraits] = TOKENWISE

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Return tokens [B, N, D]."""
    return tokens.astype(self.dtype)


class TokenDense(nn.Module):
  """The kernel and the bias of a dense layer over the tokens. The stage that has this module applies them.

  Attributes:
    inputs: number of inputs.
    outputs: number of outputs.
    kernel_init: initializer of the kernel, [inputs, outputs].
    bias_init: initializer of the bias, [outputs].
    dtype: type of the returned arrays. Parameters are float32.
  """

  inputs: int
  outputs: int
  kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
  bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
  dtype: Any = jnp.float32

  def setup(self) -> None:
    """Make the parameters."""
    self._kernel = self.param('kernel', self.kernel_init, (self.inputs, self.outputs), jnp.float32)
    self._bias = self.param('bias', self.bias_init, (self.outputs,), jnp.float32)

  def kernel(self, seen: np.ndarray | None) -> jax.Array:
    """Return the kernel [inputs, outputs], with zeros where the mask `seen` [inputs, outputs] is False."""
    kernel = self._kernel if seen is None else jnp.where(seen, self._kernel, 0)
    return kernel.astype(self.dtype)

  def bias(self) -> jax.Array:
    """Return the bias, [outputs]."""
    return self._bias.astype(self.dtype)


def most_tokens(tokens: Float[Array, 'B N D'], context: Context) -> int:
  """Return the number of tokens for which a layer over the tokens needs weights.

  This is N, or the largest length that a text can have, if the tokens continue a text.
  """
  return tokens.shape[1] if context.continued is None else context.continued.room


def zero_hidden(tokens: Float[Array, 'B N D'], context: Context) -> Float[Array, 'B N D']:
  """Return tokens [B, N, D]. Tokens that the attention mask hides from all tokens become zeros."""
  seen = visible_keys(context)
  return tokens if seen is None else jnp.where(seen[..., None], tokens, 0)


def check_length(module: nn.Module, layer: str, length: int) -> None:
  """Check that the dense layer `layer` of a module was made for `length` tokens.

  Raises:
    UserError: the layer was made for another number of tokens. The message has both numbers.
  """
  if module.has_variable('params', layer):
    learned = module.variables['params'][layer]['kernel'].shape[0]
    if learned != length:
      raise UserError(
        f'{type(module).__name__} has parameters for {learned} tokens, and here are {length}: its weights belong to '
        'the tokens, so give it images (and a patch and pool) of the size it was made for, or train it for '
        'this size; attention and HyperBF take any number'
      )
