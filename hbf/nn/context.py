"""The context of a call: what a stage may know in addition to the tokens."""

import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from hbf.errors import UserError
from hbf.nn.traits import traits_of


@flax.struct.dataclass
class Continued:
  """The position of new tokens in a text. The earlier tokens are in the cache (`hbf.nn.cache`).

  Attributes:
    start: number of earlier tokens, int32 [].
    room: largest number of tokens that the text can have, earlier and new tokens together.
  """

  start: jax.Array
  room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Context:
  """Facts about a call of a network. All stages get the same context, and ignore what they don't need.

  Attributes:
    train: True in training. Stages then use dropout, which needs a random key named 'dropout'.
    causal: True if a token attends only to itself and the tokens before it. The mask may hide some of these too. Not
      every stage 1 supports causality (`hbf.nn.traits`).
    mask: booleans that broadcast to [B, N, N]. Entry [b, i, j] is True where token i of example b attends to token j.
      A token that attends to no token, such as padding before a text, gets finite numbers from the stages of this
      library, and they do not spoil gradients. None: the mask hides nothing. Not every stage 1 accepts every mask
      (`hbf.nn.traits`).
    positions: the position of each token, float32 [N, P], counted in patches or tokens. NaN for a token without a
      position, such as a class token. None if positions are unknown. If `continued` is set, the array has the
      positions of all tokens that the text can have, [room, P].
    grid: numbers of rows and columns of patches, if the tokens are exactly the patches of an image, row by row, with
      whole numbers as positions. None otherwise.
    continued: the position of the new tokens in a causal text, if earlier tokens are in the cache. Tokens that the
      mask hides must then follow all other tokens. None: there are no earlier tokens. Not every stage 1 can use a
      cache (`hbf.nn.traits`).
  """

  train: bool = flax.struct.field(pytree_node=False, default=False)
  causal: bool = flax.struct.field(pytree_node=False, default=False)
  mask: jax.Array | None = None
  positions: jax.Array | None = None
  grid: tuple[int, int] | None = flax.struct.field(pytree_node=False, default=None)
  continued: Continued | None = None

  def grid_of(self, count: int) -> tuple[int, int] | None:
    """Return the rows and columns of patches if `count` tokens are exactly the patches of the grid, else None."""
    return self.grid if self.grid is not None and math.prod(self.grid) == count else None


EVALUATION = Context()  # all tokens see all tokens, and nothing is dropped


def grid_positions(rows: int, columns: int) -> Float[np.ndarray, 'N 2']:
  """Return the row and the column of each patch of a grid, row by row, as `Context.positions`."""
  return np.mgrid[:rows, :columns].reshape(2, -1).T.astype(np.float32)


def check_context(stage: nn.Module, context: Context, shape: tuple[int, ...]) -> None:
  """Check that a stage supports a context, and that the context's mask and positions fit tokens of the given shape.

  Raises:
    UserError: the context has causality, a cache or a mask that the stage does not support, or a cache without
      causality. Or the shape is not
      [B, N, D] with N > 0, the mask has another type than booleans or does not broadcast to [B, N, N], or the
      positions or the grid have the wrong shape.
  """
  traits = traits_of(stage)
  if len(shape) != 3:
    raise UserError(f'tokens have shape {list(shape)}: expected [B, N, D], such as tokens[None] for one example')
  if not shape[1]:
    raise UserError(f'tokens have shape {list(shape)}, [B, N, D]: expected one token or more in each example')
  if context.causal and not traits.causal:
    raise UserError(
      f'{type(stage).__name__} mixes a token with later tokens, and the context is causal: '
      'use another stage 1, such as softmax, hyperbf, linear or gmlp'
    )
  if context.continued is not None and not traits.decodes:
    raise UserError(
      f'{type(stage).__name__} keeps no cache of earlier tokens: give it whole texts, or use another stage 1, such '
      'as softmax, hyperbf, linear or gmlp'
    )
  if context.continued is not None and not context.causal:
    raise UserError(
      'the context continues a text and is not causal, but earlier tokens cannot see later ones: give whole texts, '
      'or use a causal model'
    )
  _check_positions(context, shape[1])
  if context.mask is None:
    return
  _check_mask(context.mask, shape[0], shape[1])
  if traits.masks == 'none':
    raise UserError(
      f'{type(stage).__name__} ignores masks, and the context has one: use softmax or hyperbf as stage 1'
    )
  if traits.masks == 'keys' and context.mask.ndim > 1 and context.mask.shape[-2] > 1:
    raise UserError(
      f'{type(stage).__name__} takes only masks for keys, [B, 1, N], and this mask has shape '
      f'{list(context.mask.shape)}: use softmax or hyperbf as stage 1'
    )


def _check_positions(context: Context, length: int) -> None:
  """Raise UserError unless the context has positions [length, P] or none, and a grid of two numbers or none."""
  if context.grid is not None and not (isinstance(context.grid, tuple) and len(context.grid) == 2):
    raise UserError(f'grid is {context.grid!r}: expected (rows, columns), the numbers of patches')
  if context.positions is None:
    return
  known = length if context.continued is None else context.continued.room
  shape = getattr(context.positions, 'shape', None)
  if shape is None or len(shape) != 2 or shape[0] != known or not shape[1]:
    given = f'has type {type(context.positions).__name__}' if shape is None else f'has shape {list(shape)}'
    hint = ', such as positions[:, None]' if shape == (known,) else ''
    raise UserError(f'positions {given}: expected an array [{known}, P], the P coordinates of each token{hint}')
  if context.grid is not None and shape[1] != 2:
    raise UserError(f'positions has shape {list(shape)}: expected [{known}, 2] beside a grid, row and column')


def _check_mask(mask: Any, batch: int, length: int) -> None:
  """Raise UserError unless a mask has booleans that broadcast to [batch, length, length]."""
  # An additive mask, 0 where a token is seen, would otherwise be taken for its opposite.
  type_name = str(getattr(mask, 'dtype', type(mask).__name__))
  if type_name != 'bool':
    raise UserError(
      f'the mask has type {type_name}; expected an array of booleans, True where a token attends to another'
    )
  fits = mask.ndim <= 3 and all(
    size in (1, expected) for size, expected in zip(mask.shape[::-1], (length, length, batch), strict=False)
  )
  if not fits:
    hint = f': for keys to hide, give mask[:, None, :], [B, 1, {length}]' if mask.shape == (batch, length) else ''
    raise UserError(
      f'the mask has shape {list(mask.shape)}; expected one that broadcasts to [{batch}, {length}, {length}]{hint}'
    )


def visible_keys(context: Context) -> Bool[Array, 'B N'] | None:
  """Return booleans [B, N] or [1, N], False for tokens that the mask hides from all tokens. None without a mask."""
  return None if context.mask is None else with_three_axes(context.mask)[:, 0]


def with_three_axes(mask: Bool[Array, '...']) -> Bool[Array, '_ _ N']:
  """Reshape a context's mask to three axes, so that it broadcasts to [B, N, N]."""
  return mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
