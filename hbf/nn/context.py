"""What a stage may know beside the tokens themselves."""

import flax.linen as nn
import flax.struct
import jax

from hbf.errors import UserError


@flax.struct.dataclass
class Continued:
  """Tokens behind others, of which stages remember what they need in the collection 'cache' (`hbf.nn.cache`).

  Attributes:
    start: int32 [], how many tokens came before.
    room: most tokens that there can be in all.
  """

  start: jax.Array
  room: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Context:
  """The circumstances of a call, the same for all stages of a network. A stage that doesn't care takes no notice.

  Attributes:
    train: whether the network is being trained, so that a stage may drop things; that needs a 'dropout' key.
    mask: booleans that broadcast to [B, N, N], whether a token (first N) sees another (second N); every token sees
      at least one. None: all see all. A stage 1 that honors it says so in its class attribute `masked`: 'any', or
      'keys' if it takes those only that hide a token from all others alike.
    causal: whether a token sees only those before it and itself (of those that the mask lets it see). A stage 1 that
      honors it says so in its class attribute `causal`.
    places: where each token is, float32 [N, P], in patches or tokens, NaN for one that is nowhere; None where nobody
      said. Of continued tokens: of all that there can be, [room, P].
    continued: of causal tokens, what they continue; a mask then hides none but the last ones. None: nothing comes
      before. A stage 1 that can go on says so in its class attribute `continues`.
  """

  train: bool = flax.struct.field(pytree_node=False, default=False)
  causal: bool = flax.struct.field(pytree_node=False, default=False)
  mask: jax.Array | None = None
  positions: jax.Array | None = None
  continued: Continued | None = None


EVALUATION = Context()  # all see all, and nothing is dropped


def check_context(stage: nn.Module, context: Context) -> None:
  """Raises UserError if a token isn't to see all others, and the stage mixes tokens without regard to that."""
  if context.causal and not getattr(stage, 'causal', False):
    raise UserError(
      f'{type(stage).__name__} mixes a token with those after it, and here are tokens that see only those before: '
      'use another stage 1, such as softmax, hyperbf, linear or gmlp'
    )
  if context.continued is not None and not getattr(stage, 'continues', False):
    raise UserError(
      f'{type(stage).__name__} remembers no earlier tokens: give it whole texts, or use another stage 1, such as '
      'softmax, hyperbf, linear or gmlp'
    )
  if context.mask is None:
    return
  masked = getattr(stage, 'masked', 'none')
  if masked == 'none':
    raise UserError(
      f'{type(stage).__name__} mixes all tokens, whatever a mask says: use softmax or hyperbf as stage 1'
    )
  if masked == 'keys' and context.mask.ndim > 1 and context.mask.shape[-2] > 1:
    raise UserError(
      f'{type(stage).__name__} takes masks that hide a token from all others alike, [B, 1, N], and here is one of '
      f'shape {list(context.mask.shape)}: use softmax or hyperbf as stage 1'
    )


def seen_by_all(context: Context) -> jax.Array | None:
  """Which tokens a mask that hides a token from all alike doesn't hide, [B, N] or [1, N]; None: all."""
  return None if context.mask is None else of_pairs(context.mask)[:, 0]


def of_pairs(mask: jax.Array) -> jax.Array:
  """A context's mask, broadcastable to [B, N, N], with all three axes."""
  return mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
