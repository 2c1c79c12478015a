"""Softmax attention, the baseline stage 1, and the projections that every attention shares."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.cache import new_tokens, update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context
from hbf.nn.parameters import sigma_parameter
from hbf.nn.projections import of_norm_1, project_out, project_qkv, visible
from hbf.nn.relative_positions import RELATIVE_POSITIONS, append, relative_coordinates, turned
from hbf.ops.fast.attention import attention
from hbf.options import FLAG, NOT_NEGATIVE, one_of, whole


class SoftmaxAttention(CheckedModule):
  """Multi-head softmax(q·k/√d) v (Vaswani et al. 2017, eq. 1): 8D² + 4ND operations a token.

  Attributes:
    heads: H; the tokens' width D must be divisible by it.
    qk_norm: softmax(q·k/τ) of queries and keys of norm 1, with a learned temperature τ a head that
      starts at 1/√d. It is HyperBF attention of unit-norm queries and keys with σ² = τ (fact 1 of docs/design.md).
    qkv_bias: whether queries, keys and values have a bias.
    relative_positions: 'none', or 'gaussian': −‖(p_q − p_k − o)/s‖²/2 is added to a head's logits, with
      a learned offset o and width s, as in HyperBF attention (`hbf.nn.relative_positions`). A token costs 2 C N H
      operations more, with C as there. 'rotary': queries and keys are turned by their places.
    mimetic: start of queries and keys with Wq Wkᵀ about this times (Z + I), see `hbf.nn.projections.mimetic_init`;
      0: as other projections.
    dtype: of the products; parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  qk_norm: Annotated[bool, FLAG] = False
  qkv_bias: Annotated[bool, FLAG] = False
  relative_positions: Annotated[str, one_of(RELATIVE_POSITIONS)] = 'none'
  mimetic: Annotated[float, NOT_NEGATIVE] = 0.0
  dtype: Any = jnp.float32
  masked: ClassVar[str] = 'any'
  causal: ClassVar[bool] = True
  continues: ClassVar[bool] = True

  @nn.compact
  def __call__(self, tokens: jax.Array, context: Context = EVALUATION) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    q, k, v = project_qkv(tokens, self.heads, self.dtype, self.qkv_bias, self.mimetic)
    return project_out(self._over_tokens(q, k, v, context), self.dtype)

  def _over_tokens(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> jax.Array:
    """Means of values [B, N, H, e], for queries and keys [B, N, H, d]: [B, N, H, e]; makes its parameters."""
    q, k, v = (z.swapaxes(1, 2) for z in (q, k, v))
    scale = q.shape[-1] ** -0.5
    if self.relative_positions == 'rotary':
      q, k = turned(q, context), turned(k, context)
    if self.qk_norm:
      scale = jnp.square(1 / sigma_parameter(self, 'head', scale, self.heads))  # 1/τ [H, 1, 1]
      q, k = of_norm_1(q), of_norm_1(k)
    k, v = update_cache(self, 'keys', k, context, 2), update_cache(self, 'values', v, context, 2)
    how: dict[str, Any] = visible(context, q.shape[2])
    if self.relative_positions != 'gaussian':
      return attention(q, k, v, scale, **how).swapaxes(1, 2)
    x, t = relative_coordinates(self, self.heads, context, q.dtype)
    q = append((q * scale).astype(q.dtype), new_tokens(x, context, q.shape[2], 1))
    with jax.default_matmul_precision('highest'):  # a distance is a difference of larger numbers
      return attention(q, append(k, t), v, 1.0, **how).swapaxes(1, 2)
