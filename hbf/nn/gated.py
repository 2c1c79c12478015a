"""The gated HyperBF: one unit that mixes tokens and channels, in place of both stages. Softmax is its control."""

from typing import Annotated, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.baselines.mlp import ACTIVATIONS
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import EVALUATION, Context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.projections import Projections, check_heads, mimetic_init
from hbf.options import one_of, whole


class _Gated(nn.Module):
  """out(act(gate(x)) ⊙ f(act(values(x)))), f an attention of as many values as the gate has.

  It is the Gated Attention Unit (Hua et al. 2022, section 3.1) with several heads. A token costs
  4 D² + 6 hidden D + 2 (D + hidden) N operations.

  The class goes before an attention among the bases, whose `_over_tokens` is f.
  """

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Map tokens [B, N, D] to [B, N, D]."""
    batch, length, width = tokens.shape
    check_heads(width, self.heads)
    activation = ACTIVATIONS[self.activation]
    flat = tokens.reshape(-1, width)
    init = mimetic_init(self.heads, self.mimetic)
    qk = Projections(2, width, use_bias=False, dtype=self.dtype, kernel_init=init, name='qk')(flat)
    q, k = (z.reshape(batch, length, self.heads, -1) for z in qk)
    gate, values = map(activation, Projections(2, self.hidden, dtype=self.dtype, name='in')(flat))
    filled = jnp.pad(values, ((0, 0), (0, -self.hidden % self.heads)))
    v = filled.reshape(batch, length, self.heads, -1)
    mixed = self._over_tokens(q, k, v, context).reshape(filled.shape)[:, : self.hidden]
    return nn.Dense(width, dtype=self.dtype, name='out')(gate * mixed).reshape(tokens.shape)


class GatedHyperBF(_Gated, HyperBFAttention, kw_only=True):
  """A gated unit whose attention is a HyperBF over the tokens, with metric identity at the cost of `_Gated`.

  Attributes:
    hidden: channels of values and gate; the heads share them, the last one may have fewer.
    activation: of both, a name in `hbf.nn.baselines.mlp.ACTIVATIONS`.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  size: ClassVar[str] = 'hidden'  # the option that says how large the stage is
  share: ClassVar[float] = 5 / 6  # of a recipe's hidden units: with 4D of them it is as large as two stages


class GatedSoftmax(_Gated, SoftmaxAttention, kw_only=True):
  """A gated unit whose attention is softmax: the control that tells the gate from the kernel.

  Attributes:
    hidden: as of `GatedHyperBF`.
    activation: likewise.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  size: ClassVar[str] = 'hidden'
  share: ClassVar[float] = GatedHyperBF.share
