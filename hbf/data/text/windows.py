"""Windows of a text in device memory: the examples of language models.

A *batch* is a dict {'index': int32 [B]} with the indices of its windows. The index −1 stands for padding. Batches of
images in device memory have the same form (`hbf.data.pipeline.inputs`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hbf.data.pipeline.inputs import ResidentInput
from hbf.errors import UserError


@dataclasses.dataclass(frozen=True)
class Text:
  """A text that is cut into consecutive windows.

  Attributes:
    tokens: unsigned integers [L].
    length: T, the number of tokens in a window. Every token of the text except the first is a target in exactly one
      window.
  """

  tokens: np.ndarray
  length: int

  def __post_init__(self) -> None:
    """Raise UserError if the text is too long: int32 must hold the positions up to one window beyond its end."""
    most = 2**31 - 1 - self.length
    if len(self.tokens) > most:
      raise UserError(
        f'a text has {len(self.tokens):,} tokens; expected at most {most:,}: take a shorter text, or one token for '
        'more characters (data.tokenizer=bpe)'
      )

  def __len__(self) -> int:
    return -(-(len(self.tokens) - 1) // self.length)


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


class TextInput(ResidentInput):
  """An input that holds a text in the memory of every device."""

  resident: Tokens

  def __init__(self, source: Text, sharding: NamedSharding):
    """Copy the text to every device. `sharding` is the sharding of batches over their first axis."""
    super().__init__(sharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    tokens = jax.make_array_from_callback(source.tokens.shape, replicated, lambda at: source.tokens[at])
    self._count = len(source)
    self.resident = Tokens(tokens, source.length)


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


def windows(text: Tokens, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return windows of T tokens, each followed by the next token of the text. The function runs inside jit.

  Args:
    text: the text in device memory: `resident` of a `TextInput`.
    index: indices of windows, int32 [B]. −1 stands for padding.

  Returns:
    Tokens, int32 [B, T + 1], and a mask, bool [B, T + 1]. Beyond the end of the text and in padding, the mask is
    False and the token is 0.
  """
  start = jnp.where(index >= 0, index * text.length, len(text.tokens))
  return _take_windows(text, start)


def shifted_windows(key: jax.Array, text: Tokens, index: jax.Array) -> jax.Array:
  """Return windows that begin at random positions in the text, each followed by the next token.

  Window w begins at a random position from w·T to (w + 1)·T − 1. If it would then extend beyond the text of L tokens,
  it begins instead at a random position from 0 to L − T − 1. So in an epoch, windows begin at each of these L − T
  positions with equal probability. The random numbers of window w depend only on `key` and w.

  Args:
    key: random key of this step.
    text: the text in device memory.
    index: indices w of the windows, int32 [B], without padding.

  Returns:
    Tokens, int32 [B, T + 1].
  """
  places, count = len(text.tokens) - text.length, -(-(len(text.tokens) - 1) // text.length)

  def draw(number: jax.Array) -> jax.Array:
    own = number * text.length + jax.random.randint(jax.random.fold_in(key, number), (), 0, text.length)
    anywhere = jax.random.randint(jax.random.fold_in(key, number + count), (), 0, places)
    return jnp.where(own < places, own, anywhere)

  return _take_windows(text, jax.vmap(draw)(index))[0]


def _take_windows(text: Tokens, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  positions = start[:, None] + jnp.arange(text.length + 1)
  mask = positions < len(text.tokens)
  tokens = text.tokens[jnp.where(mask, positions, 0)].astype(jnp.int32)
  return jnp.where(mask, tokens, 0), mask
