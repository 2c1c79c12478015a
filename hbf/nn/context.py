"""The context of a call: what a stage may know beside the tokens themselves."""

import flax.linen as nn
import flax.struct
import jax
from jaxtyping import Array, Bool

from hbf.errors import UserError
from hbf.nn.traits import traits_of


@flax.struct.dataclass
class Continued:
  """The place of new tokens in a text whose earlier tokens are in the collection 'cache' (`hbf.nn.cache`).

  Attributes:
    start: number of earlier tokens, int32 [].
    room: most tokens that the text can have.
  """

  start: jax.Array
  room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Context:
  """The circumstances of a call, the same for all stages of a network. A stage ignores what it does not need.

  Attributes:
    train: True in training, so that a stage may drop values. That needs a 'dropout' key.
    causal: True if a token sees only itself and the tokens before it (those that the mask leaves). A stage 1 that
      supports it says so in its traits (`hbf.nn.traits`).
    mask: booleans that broadcast to [B, N, N], True where a token (first N) sees another (second N). Every token sees
      at least one. None: all tokens see all tokens. A stage 1 says in its traits which masks it accepts.
    positions: the position of each token, float32 [N, P], in patches or tokens. NaN for a token without a position,
      such as a class token. None if positions are unknown. For continued tokens, it has the positions of all tokens
      that the text can have, [room, P].
    continued: the place of causal tokens after others. A mask then hides only the last tokens. None: nothing comes
      before. A stage 1 that supports it says so in its traits.
  """

  train: bool = flax.struct.field(pytree_node=False, default=False)
  causal: bool = flax.struct.field(pytree_node=False, default=False)
  mask: jax.Array | None = None
  positions: jax.Array | None = None
  continued: Continued | None = None


EVALUATION = Context()  # all tokens see all tokens, and nothing is dropped


def check_context(stage: nn.Module, context: Context) -> None:
  """Check that a stage supports a context.

  Raises:
    UserError: the stage ignores causality, the cache or the mask of the context.
  """
  traits = traits_of(stage)
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
  if context.mask is None:
    return
  if traits.masks == 'none':
    raise UserError(
      f'{type(stage).__name__} ignores masks, and the context has one: use softmax or hyperbf as stage 1'
    )
  if traits.masks == 'keys' and context.mask.ndim > 1 and context.mask.shape[-2] > 1:
    raise UserError(
      f'{type(stage).__name__} takes only masks for keys, [B, 1, N], and this mask has shape '
      f'{list(context.mask.shape)}: use softmax or hyperbf as stage 1'
    )


def visible_keys(context: Context) -> Bool[Array, 'B N'] | None:
  """Return the tokens that a mask for keys leaves, booleans [B, N] or [1, N]. None: all tokens."""
  return None if context.mask is None else with_three_axes(context.mask)[:, 0]


def with_three_axes(mask: Bool[Array, '...']) -> Bool[Array, '_ _ N']:
  """Return the mask of a context with all three axes, broadcastable to [B, N, N]."""
  return mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
