"""The gated HyperBF, which does the work of both stages, and gated softmax attention as its control."""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.nn.baselines.mlp import ACTIVATIONS
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.projections import Projections, check_heads, join_heads, project_qkv, split_heads
from hbf.nn.traits import StageTraits
from hbf.options import one_of, whole


class _Gated(nn.Module):
  """A gated attention: out(act(gate(x)) ⊙ f(act(values(x)))), where f(v) is attention with values v.

  gate, values and out are dense layers. gate(x) and values(x) have `hidden` channels each. This is the Gated
  Attention Unit (Hua et al. 2022, section 3.1) with several heads. A token costs 4·D² + 6·hidden·D +
  2·(D + hidden)·N operations.

  A subclass has two bases: this class, and then a class of attention with the methods `_sigma` and `_over_tokens`.
  The second is f.
  """

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    check_context(self, context, tokens.shape)
    batch, length, width = tokens.shape
    check_heads(width, self.heads)
    activation = ACTIVATIONS[self.activation]
    sigma = self._sigma(width)
    divisor = None if self.qk_norm else sigma
    bias = getattr(self, 'qkv_bias', False)  # HyperBF attention has no such option
    q, k = project_qkv(tokens, self.heads, self.dtype, bias, self.mimetic, divisor, 'qk')
    flat = tokens.reshape(-1, width)
    gate, values = map(activation, Projections(2, self.hidden, dtype=self.dtype, name='in')(flat))
    filled = jnp.pad(values, ((0, 0), (0, -self.hidden % self.heads)))
    v = split_heads(filled.reshape(batch, length, filled.shape[1]), self.heads)
    mixed = join_heads(self._over_tokens(q, k, v, sigma, context)).reshape(filled.shape)[:, : self.hidden]
    return nn.Dense(width, dtype=self.dtype, name='out')(gate * mixed).reshape(tokens.shape)


class GatedHyperBF(_Gated, HyperBFAttention, kw_only=True):
  """The gated HyperBF out(act(gate(x)) ⊙ f(act(values(x)))), where f(v) is HyperBF attention with the values v.

  gate, values and out are dense layers, and act is the activation. With metric identity a token costs 4 D² + 6 hidden
  D + 2 (D + hidden) N operations.

  Attributes:
    hidden: number of channels of the values, and of the gate. They are divided among the heads, and the last head may
      have fewer channels.
    activation: activation of the values and the gate, a name in `hbf.nn.baselines.mlp.ACTIVATIONS`.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  # With 5/6 of the 4D units of a block, this stage has as many parameters as two stages.
  traits: ClassVar[StageTraits] = dataclasses.replace(HyperBFAttention.traits, units='hidden', unit_share=5 / 6)


class GatedSoftmax(_Gated, SoftmaxAttention, kw_only=True):
  """A gated attention like `GatedHyperBF`, but with softmax attention as f.

  A comparison of the two shows the effect of the kernel alone. With `qkv_bias`, queries and keys have a bias. The
  values always have one.

  Attributes:
    hidden: number of channels of the values, and of the gate, as in `GatedHyperBF`.
    activation: activation of the values and the gate, as in `GatedHyperBF`.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  traits: ClassVar[StageTraits] = GatedHyperBF.traits
