"""Windows of a text: the examples of language models. A text lies in device memory, or the host reads its windows.

A *batch* of a text in device memory is a dict {'index': int32 [B]} with the indices of its windows. A batch of a
stream is {'index', 'tokens': unsigned integers [B, T + 1], 'count': int32 [B]}. A row of 'tokens' has the T tokens of
a window and the next token of the text. The entry 'count' has the number of tokens of each row that are in the text.
It is less than T + 1 at the end of the text, and 0 in padding. The remaining tokens of a row are 0. In rows of
padding, the index is −1. `windows` and `shifted_windows` return the same tokens for both kinds of batches.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.pipeline.inputs import Batch
from hbf.errors import UserError

LARGEST = 2**31 - 1  # of int32


@dataclasses.dataclass(frozen=True)
class Text:
  """A text that is cut into consecutive windows.

  Attributes:
    tokens: unsigned integers [L].
    length: T, the number of tokens in a window. For task next_token, every token of the text except the first is a
      target in exactly one window.
  """

  tokens: np.ndarray
  length: int

  def __len__(self) -> int:
    return count_windows(len(self.tokens), self.length)

  @property
  def fits_32_bits(self) -> bool:
    """True if int32 can hold the positions up to one window beyond the end of the text."""
    return fits_32_bits(len(self.tokens), self.length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
  """A text that lies in the memory of every device.

  Attributes:
    tokens: unsigned integers [L].
    length: T, the number of tokens in a window.
  """

  tokens: jax.Array
  length: int = dataclasses.field(metadata={'static': True})


def check_length(what: str, tokens: int, length: int) -> None:
  """Raise UserError unless a text has more tokens than a window.

  Args:
    what: name of the text, for the message.
    tokens: number of tokens in the text.
    length: number of tokens in a window.
  """
  if tokens <= length:
    raise UserError(
      f'{what} has {tokens:,} tokens, a window has {length:,}: expected more tokens than in a window; set a smaller '
      'data.length, or take a longer text'
    )


def fits_32_bits(tokens: int, length: int) -> bool:
  """Return True if int32 can hold all positions up to one window of `length` tokens beyond the end of a text."""
  return tokens + length <= LARGEST


def count_windows(tokens: int, length: int) -> int:
  """Return the number of consecutive windows of `length` tokens in a text of `tokens` tokens.

  The last window may be incomplete. A single last token makes no window, because no token follows it.
  """
  return -(-(tokens - 1) // length)


def windows(resident: Tokens | None, batch: Batch) -> tuple[jax.Array, jax.Array]:
  """Return the windows of a batch, each followed by the next token of the text. The function runs inside jit.

  Args:
    resident: the `resident` of the input that yielded the batch.
    batch: a batch of consecutive windows, not of windows at random positions.

  Returns:
    Tokens, int32 [B, T + 1], and a mask, bool [B, T + 1]. Beyond the end of the text and in padding, the mask is
    False and the token is 0.
  """
  if resident is None:
    tokens = batch['tokens']
    return tokens.astype(jnp.int32), jnp.arange(tokens.shape[-1]) < batch['count'][:, None]
  index = batch['index']
  return _take_windows(resident, jnp.where(index >= 0, index * resident.length, len(resident.tokens)))


def shifted_windows(key: jax.Array, resident: Tokens | None, batch: Batch) -> jax.Array:
  """Return windows that begin at random positions in the text, each followed by the next token.

  So the text is cut at other positions in every epoch (`draw_starts`). The function runs inside jit.

  Args:
    key: random key of the training step. For a stream, it is not used: the host has drawn the positions already, with
      the same key (`ShiftedOrder`).
    resident: the `resident` of the input that yielded the batch.
    batch: a batch, without padding.

  Returns:
    Tokens, int32 [B, T + 1].
  """
  if resident is None:
    return batch['tokens'].astype(jnp.int32)
  starts = draw_starts(key, batch['index'], len(resident.tokens), resident.length)
  return _take_windows(resident, starts)[0]


def draw_starts(key: jax.Array, index: jax.Array, tokens: int, length: int) -> jax.Array:
  """Draw the positions in a text at which training windows begin.

  Window w begins at a random position from w·T to (w + 1)·T − 1. If it would then extend beyond the text of L tokens,
  it begins instead at a random position from 0 to L − T − 1. So in an epoch, windows begin at each of these L − T
  positions with equal probability. The random numbers of window w depend only on `key` and w.

  Args:
    key: random key of the training step.
    index: indices w of the windows, int32 [B], without padding.
    tokens: L, the number of tokens in the text.
    length: T, the number of tokens in a window.

  Returns:
    Positions [B], int32, or int64 if 32 bits are too few. Then 64-bit types must be enabled in JAX.
  """
  dtype = jnp.int32 if fits_32_bits(tokens, length) else jnp.int64
  places, count = tokens - length, count_windows(tokens, length)

  def draw(number: jax.Array) -> jax.Array:
    shift = jax.random.randint(jax.random.fold_in(key, number), (), 0, length, dtype)
    own = number.astype(dtype) * length + shift
    anywhere = jax.random.randint(jax.random.fold_in(key, number + count), (), 0, places, dtype)
    return jnp.where(own < places, own, anywhere)

  return jax.vmap(draw)(index)


def _take_windows(text: Tokens, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  positions = start[:, None] + jnp.arange(text.length + 1)
  mask = positions < len(text.tokens)
  tokens = text.tokens[jnp.where(mask, positions, 0)].astype(jnp.int32)
  return jnp.where(mask, tokens, 0), mask
