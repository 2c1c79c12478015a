"""Language model: an embedding of the tokens of a text, homogeneous blocks and a linear head."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from hbf.errors import UserError
from hbf.models.embedding import sincos
from hbf.nn.cache import new_tokens
from hbf.nn.checked import CheckedModule
from hbf.nn.context import Context, Continued
from hbf.nn.dropout import Dropout
from hbf.nn.trunk import Trunk
from hbf.ops.layout import explicit_split, laid_out_by_xla
from hbf.options import FLAG, FLOATS, RATE, one_of, whole


class LanguageModel(CheckedModule):
  """A language model: an embedding of tokens and positions, a trunk of blocks, and a linear head without a bias.

  A causal model predicts, for every token, the token that follows. If the stages are attention and MLP, this is a GPT
  (Radford et al. 2019). A model that is not causal predicts masked tokens from the tokens around them (Devlin et al.
  2019).

  Attributes:
    trunk: the blocks and the last LayerNorm.
    vocabulary: V, number of tokens in the vocabulary.
    length: largest number of tokens of a text.
    width: D, a token's dimensions.
    positions: the vectors that are added to the tokens: 'learned', 'sincos' (fixed sines and cosines; D even) or
      'none'. In addition, the stages get the index of each token as its position.
    causal: True if a token attends only to itself and the tokens before it.
    tied: True if the weights of the head are the vectors of the tokens (Press & Wolf 2017).
    dropout: dropout rate of the embedded tokens.
    dtype: type of the matrix products. Parameters are float32.
    input_dtype: type of the inputs.
  """

  input_dtype: ClassVar[Any] = jnp.int32

  trunk: Trunk
  vocabulary: Annotated[int, whole(1)]
  length: Annotated[int, whole(1)]
  width: Annotated[int, whole(1)]
  positions: Annotated[str, one_of(('learned', 'sincos', 'none'))] = 'learned'
  causal: Annotated[bool, FLAG] = True
  tied: Annotated[bool, FLAG] = True
  dropout: Annotated[float, RATE] = 0.0
  dtype: Annotated[Any, FLOATS] = jnp.float32

  def setup(self) -> None:
    """Name the parameters `block0` and `norm`, not `trunk/block0` and `trunk/norm`."""
    nn.share_scope(self, self.trunk)

  @nn.compact
  def __call__(
    self,
    tokens: Int[Array, 'B N'],
    *,
    train: bool,
    mask: Bool[Array, 'B N'] | None = None,
    start: Int[Array, ''] | None = None,
  ) -> Float[Array, 'B N V']:
    """Compute logits [B, N, V] in float32 of texts [B, N], whose tokens are int32 from 0 to V − 1.

    Args:
      tokens: the texts. A text with a token outside the vocabulary has logits of NaN.
      train: True in training, with dropout. Dropout needs a random key named 'dropout'.
      mask: booleans [B, N], False for padding. No token attends to padding, which may stand on either side of a text.
        The logits of padding are finite numbers without a meaning. None: there is no padding.
      start: int32 [], number of tokens in the cache (`hbf.nn.cache`). 0 for the first call. With `start`, padding
        must follow all other tokens. The next call has the position of the first padding as `start`, and overwrites
        the padding in the cache. If `start` and the number of tokens, with padding, exceed `length`, all logits are
        NaN, and the cache is spoiled. None: the texts are complete, and there is no cache.

    Raises:
      UserError: the texts are not [B, N], are empty or are longer than `length`, the mask has another shape, `start`
        is given to a model that is not causal, or an option's value is unknown.
    """
    if tokens.ndim != 2:
      raise UserError(f'tokens have shape {list(tokens.shape)}: expected [B, N], such as tokens[None] for one text')
    batch, length = tokens.shape
    if not length:
      raise UserError(f'tokens have shape {list(tokens.shape)}, [B, N]: expected one token or more in each text')
    if length > self.length:
      raise UserError(f'a text of {length} tokens is longer than the {self.length} that the model takes: cut it')
    if mask is not None and not (mask.ndim == 2 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, length)):
      raise UserError(f'mask has shape {list(mask.shape)}: expected [{batch}, {length}], False for padding')
    vectors = nn.Embed(self.vocabulary, self.width, embedding_init=nn.initializers.normal(0.02), name='embedding')
    coordinates = np.arange(self.length, dtype=np.float32)[:, None]
    known = length if start is None else self.length  # number of positions in the context
    context = Context(
      train=train,
      causal=self.causal,
      mask=None if mask is None else mask[:, None],
      positions=jnp.asarray(coordinates[:known]),
      continued=None if start is None else Continued(start, self.length),
    )
    positions = new_tokens(self._positions(coordinates)[:known], context, length, 0)
    split = PartitionSpec(*explicit_split(tokens), None)
    embedded = laid_out_by_xla(_look_up, split, vectors.embedding, tokens)
    embedded = (embedded + positions).astype(self.dtype or jnp.float32)
    embedded = Dropout(self.dropout, deterministic=not train)(embedded)
    flat = self.trunk(embedded, context).reshape(-1, self.width).astype(jnp.float32)
    head = vectors.attend if self.tied else nn.Dense(self.vocabulary, use_bias=False, name='head')
    logits = head(flat).reshape(batch, length, self.vocabulary)
    return logits if start is None else jnp.where(start + length <= self.length, logits, jnp.nan)

  def _positions(self, coordinates: np.ndarray) -> jax.Array:
    """Return the vectors [length, D] that are added to the tokens at coordinates [length, 1]."""
    shape = (self.length, self.width)
    makers: dict[str, Callable[[], Any]] = {
      'learned': lambda: self.param('positions', nn.initializers.normal(0.02), shape, jnp.float32),
      'sincos': lambda: sincos(coordinates, self.width),
      'none': lambda: np.zeros(shape, np.float32),
    }
    return jnp.asarray(makers[self.positions]())


def _look_up(vectors: jax.Array, tokens: jax.Array) -> jax.Array:
  """Return the vectors [B, N, D] of tokens [B, N]. The vector of a token outside the vocabulary is NaN."""
  known = ((tokens >= 0) & (tokens < len(vectors)))[..., None]  # else −1 would get the last token's vector
  return jnp.where(known, jnp.take(vectors, tokens, axis=0), jnp.nan)
