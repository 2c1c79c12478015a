"""A text in device memory, and its windows, which are the examples.

A *batch* is {'index': int32 [B]}, −1 for padding, as for images in device memory (`hbf.data.pipeline.inputs`).
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
  """Tokens [L], cut into consecutive windows.

  Attributes:
    tokens: unsigned integers [L].
    length: T, the length of a window. Every token but the first is a target in exactly one window.
  """

  tokens: np.ndarray
  length: int

  def __post_init__(self) -> None:
    """Raise UserError if 32 bits can't number the tokens, and the window that begins behind the last one."""
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
  """A text on every device.

  Attributes:
    tokens: unsigned integers [L].
    length: T, the length of a window.
  """

  tokens: jax.Array
  length: int = dataclasses.field(metadata={'static': True})


class TextInput(ResidentInput):
  """An input whose text lies in the memory of every device."""

  resident: Tokens

  def __init__(self, source: Text, sharding: NamedSharding):
    """Take the text, and the sharding of batches."""
    super().__init__(sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    tokens = jax.make_array_from_callback(source.tokens.shape, whole, lambda at: source.tokens[at])
    self._count = len(source)
    self.resident = Tokens(tokens, source.length)


def check_length(what: str, tokens: int, length: int) -> None:
  """Raise a UserError unless a text is longer than a window."""
  if tokens <= length:
    raise UserError(
      f'{what} has {tokens:,} tokens, a window has {length:,}: expected more; set a smaller data.length, or take a '
      'longer text'
    )


def windows(text: Tokens, index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return windows, each with the token behind it. It is pure, made to run inside jit.

  Args:
    text: the text of the input.
    index: int32 [B], numbers of windows, −1 for padding.

  Returns:
    int32 [B, T + 1], and a mask of the tokens that exist, bool [B, T + 1]. The others are 0.
  """
  start = jnp.where(index >= 0, index * text.length, len(text.tokens))
  return _taken(text, start)


def shifted_windows(key: jax.Array, text: Tokens, index: jax.Array) -> jax.Array:
  """Return windows, each moved at random and with the token behind it: int32 [B, T + 1].

  So texts are never cut at the same positions. Window i draws from `fold_in(key, index[i])`, as images do
  (`hbf.data.augment.batches`): neither its row in the batch nor the number of devices matters. Every one of the L − T
  possible starts of a window is equally likely in an epoch. Window i begins within its own T positions. If it draws a
  start beyond the last possible one, it begins anywhere.
  """
  places, count = len(text.tokens) - text.length, -(-(len(text.tokens) - 1) // text.length)

  def draw(number: jax.Array) -> jax.Array:
    own = number * text.length + jax.random.randint(jax.random.fold_in(key, number), (), 0, text.length)
    anywhere = jax.random.randint(jax.random.fold_in(key, number + count), (), 0, places)
    return jnp.where(own < places, own, anywhere)

  return _taken(text, jax.vmap(draw)(index))[0]


def _taken(text: Tokens, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  at = start[:, None] + jnp.arange(text.length + 1)
  there = at < len(text.tokens)
  found = text.tokens[jnp.where(there, at, 0)].astype(jnp.int32)
  return jnp.where(there, found, 0), there
