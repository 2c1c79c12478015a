"""Softmax attention, which is the baseline stage 1."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.nn.cache import update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.parameters import sigma_parameter
from hbf.nn.projections import mask_and_causality, of_norm_1, project_out, project_qkv
from hbf.nn.relative_positions import GAUSSIAN, RELATIVE_POSITIONS, append_coordinates, relative_coordinates, rotate
from hbf.nn.traits import StageTraits
from hbf.ops.fast.attention import attention
from hbf.options import FLAG, FLOATS, NOT_NEGATIVE, one_of, whole


class SoftmaxAttention(CheckedModule):
  """Multi-head attention softmax(q·k/√d) v (Vaswani et al. 2017, eq. 1). A token costs 8D² + 4ND operations.

  Attributes:
    heads: H, a divisor of the tokens' width D.
    qk_norm: True for softmax(q·k/τ) with queries and keys of norm 1. The temperature τ of each head is learned, and
      starts at 1/√d. This equals HyperBF attention of queries and keys of norm 1 with σ² = τ
      (docs/explanation/attention.md, fact 1).
    qkv_bias: True if queries, keys and values have a bias.
    relative_positions: 'none', 'gaussian', 'adaptive' or 'rotary' (`hbf.nn.relative_positions`). 'gaussian' adds
      −‖(p_q − p_k − o)/s‖²/2 to a head's logits, as in HyperBF attention, for the positions p of the query and the
      key. The offset o and the scale s are learned. With 'adaptive' o and s also depend on the query. 'gaussian' and
      'adaptive' add 2 C N H operations for each token. C is the number of additional coordinates in a head: 4 for
      images and 3 for texts. If `dtype` is bfloat16, there are three times as many up to 32 tokens along an axis,
      and six times as many beyond. 'adaptive' adds another 2 D (P + 1) for positions of P dimensions. 'rotary'
      rotates queries and keys by their positions.
    mimetic: α. The projections of queries and keys start with Wq Wkᵀ ≈ α (Z + I) for a random matrix Z, see
      `hbf.nn.projections.mimetic_init`. 0: these projections start like all others.
    dtype: type of the matrix products. Parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  qk_norm: Annotated[bool, FLAG] = False
  qkv_bias: Annotated[bool, FLAG] = False
  relative_positions: Annotated[str, one_of(RELATIVE_POSITIONS)] = 'none'
  mimetic: Annotated[float, NOT_NEGATIVE] = 0.0
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(masks='any', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    check_context(self, context, tokens.shape)
    q, k, v = project_qkv(tokens, self.heads, self.dtype, self.qkv_bias, self.mimetic)
    return project_out(self._over_tokens(q, k, v, self._sigma(tokens.shape[-1]), context), self.dtype)

  def _sigma(self, width: int) -> Float[Array, 'H 1 1'] | None:
    """Return √τ of every head, or None if the logits are q·k/√d."""
    return sigma_parameter(self, 'head', (width // self.heads) ** -0.5, self.heads) if self.qk_norm else None

  def _over_tokens(
    self, q: jax.Array, k: jax.Array, v: jax.Array, sigma: jax.Array | None, context: Context
  ) -> jax.Array:
    """Return the outputs [B, N, H, e] of the heads for queries and keys [B, N, H, d] and values [B, N, H, e]."""
    q, k, v = (z.swapaxes(1, 2) for z in (q, k, v))
    given, scale = q, q.shape[-1] ** -0.5
    if self.relative_positions == 'rotary':
      q, k = rotate(q, context), rotate(k, context)
    if sigma is not None:
      scale = jnp.square(1 / sigma)  # 1/τ [H, 1, 1]
      q, k = of_norm_1(q), of_norm_1(k)
    k, v = update_cache(self, 'keys', k, context, 2), update_cache(self, 'values', v, context, 2)
    mask, causal = mask_and_causality(context, q.shape[2])
    if self.relative_positions not in GAUSSIAN:
      return attention(q, k, v, scale, mask=mask, causal=causal).swapaxes(1, 2)
    x, t = relative_coordinates(self, self.relative_positions, given, context)
    q = append_coordinates((q * scale).astype(q.dtype), x)
    # Distances of positions are differences of larger numbers.
    out = attention(q, append_coordinates(k, t), v, 1.0, mask=mask, causal=causal, full_precision=True)
    return out.swapaxes(1, 2)
