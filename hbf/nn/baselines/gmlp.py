"""gMLP and aMLP: one gated module that mixes tokens and channels, in place of both stages (Liu et al. 2021)."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hbf.nn.baselines.mlp import ACTIVATIONS
from hbf.nn.baselines.token_mixing import TokenDense, check_length, most_tokens, zero_hidden
from hbf.nn.cache import new_tokens, update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.projections import Projections, mask_and_causality
from hbf.nn.traits import StageTraits
from hbf.ops.fast.attention import attention
from hbf.options import FLOATS, POSITIVE, one_of, whole

# The names of the gates (Table 3 of the paper), each with the ratio of the number of channels of its input to that of
# its output.
GATES = {'linear': 1, 'additive': 1, 'multiplicative': 1, 'split': 2}


class GatedMLP(CheckedModule):
  """The gated MLP out(s(Z)) with Z = act(in(x)), where s is the Spatial Gating Unit (Liu et al. 2021, eq. 1 to 3).

  in and out are dense layers, and act is the activation. The option `gate` is the form of s. Every form contains
  f(Z) = W LayerNorm(Z) + b, where a matrix W [N, N] mixes the tokens. So the number N of tokens is fixed. In a causal
  context W is triangular. Except with gate 'linear', W starts near 0. So s(Z) starts near Z, or near the half Z₁ of Z
  with gate 'split'. With `attention`, a tiny attention over x is added to f (aMLP, section 4.4 of the paper).

  With gate 'split' a token costs 6 hidden D + 2 hidden N operations. Attention of d dimensions adds 6 D d + 4 N d + 2
  d hidden operations.

  Attributes:
    hidden: number of channels after the gate s. With gate 'split', the input Z of s has twice as many channels. This
      larger number is d_ffn in Liu et al. 2021.
    gate: the form of the gate s(Z): 'linear' for f(Z), 'additive' for Z + f(Z), 'multiplicative' for Z ⊙ f(Z), or
      'split' for Z₁ ⊙ f(Z₂) with the halves Z₁ and Z₂ of the channels. Here f(Z) = W LayerNorm(Z) + b mixes the
      tokens.
    attention: number of dimensions of the tiny attention that is added to f, 64 in Liu et al. 2021. 0: there is no
      attention.
    activation: a name in `hbf.nn.baselines.mlp.ACTIVATIONS`.
    norm_epsilon: number added to the variance in the LayerNorm of f(Z) = W LayerNorm(Z) + b.
    dtype: type of the matrix products. Parameters are float32.
  """

  hidden: Annotated[int, whole(1)]
  gate: Annotated[str, one_of(GATES)] = 'split'
  attention: Annotated[int, whole(0)] = 0
  activation: Annotated[str, one_of(ACTIVATIONS)] = 'gelu'
  norm_epsilon: Annotated[float, POSITIVE] = 1e-6
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(units='hidden', masks='keys', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the parameters were made for longer or shorter inputs.
    """
    check_context(self, context, tokens.shape)
    batch, length, width = tokens.shape
    check_length(self, 'spatial', most_tokens(tokens, context))
    activation = ACTIVATIONS[self.activation]
    rows = Projections(GATES[self.gate], self.hidden, dtype=self.dtype, name='in')(tokens.reshape(-1, width))
    z = [activation(part).reshape(batch, length, self.hidden) for part in rows]
    kept, gating = z[0], z[-1]
    gating = zero_hidden(nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name='norm')(gating), context)
    gate = self._over_tokens(gating, context)
    if self.attention:
      gate += self._tiny_attention(tokens, context)
    gated = {'linear': gate, 'additive': kept + gate}.get(self.gate, kept * gate)
    out = nn.Dense(width, dtype=self.dtype, name='out')(gated.reshape(-1, self.hidden))
    return out.reshape(tokens.shape)

  def _over_tokens(self, gating: jax.Array, context: Context) -> jax.Array:
    """Compute f = W `gating` + b, where `gating` [B, N, hidden] is the input of f after LayerNorm."""
    near_zero, gates = nn.initializers.normal(1e-6), self.gate in ('multiplicative', 'split')
    count, length = gating.shape[1], most_tokens(gating, context)
    spatial = TokenDense(
      length,
      length,
      kernel_init=nn.initializers.lecun_normal() if self.gate == 'linear' else near_zero,
      bias_init=nn.initializers.constant(float(gates)),
      dtype=self.dtype,
      name='spatial',
    )
    kernel = new_tokens(spatial.kernel(np.tri(length, dtype=bool).T if context.causal else None), context, count, 1)
    gating = update_cache(self, 'gating', gating, context, 1)
    return (gating.mT @ kernel + new_tokens(spatial.bias(), context, count, 0)).mT

  def _tiny_attention(self, tokens: jax.Array, context: Context) -> jax.Array:
    """Return the output [B, N, hidden] of the tiny attention, which has a single head."""
    qkv = nn.Dense(3 * self.attention, dtype=self.dtype, name='attention_qkv')(tokens)
    q, k, v = (z[:, None] for z in jnp.split(qkv, 3, axis=-1))
    k, v = update_cache(self, 'keys', k, context, 2), update_cache(self, 'values', v, context, 2)
    mask, causal = mask_and_causality(context, q.shape[2])
    attended = attention(q, k, v, mask=mask, causal=causal)[:, 0]
    return nn.Dense(self.hidden, dtype=self.dtype, name='attention_out')(attended)
