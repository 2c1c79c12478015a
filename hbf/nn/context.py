"""What a stage may know beside the tokens themselves."""

import flax.linen as nn
import flax.struct
import jax

from hbf.errors import UserError


@flax.struct.dataclass
class Context:
  """The circumstances of a call, the same for all stages of a network. A stage that doesn't care takes no notice.

  Attributes:
    train: whether the network is being trained, so that a stage may drop things; that needs a 'dropout' key.
    mask: booleans that broadcast to [B, N, N], whether a token (first N) sees another (second N); every token sees
      at least one. None: all see all. A stage 1 that honours it says so in its class attribute `masked`.
    places: where each token is, float32 [N, P], in patches, NaN for one that is nowhere; None where nobody said.
  """

  train: bool = flax.struct.field(pytree_node=False, default=False)
  mask: jax.Array | None = None
  places: jax.Array | None = None


EVALUATION = Context()  # all see all, and nothing is dropped


def check_mask(stage: nn.Module, context: Context) -> None:
  """Raises UserError if there is a mask, and the stage mixes tokens without regard to it."""
  if context.mask is not None and not getattr(stage, 'masked', False):
    raise UserError(
      f'{type(stage).__name__} mixes all tokens, whatever a mask says: use softmax or hyperbf as stage 1'
    )
