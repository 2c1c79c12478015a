"""Softmax attention, the baseline stage 1, and the projections that every attention shares."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.cache import remember, so_far, these
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, of_pairs
from hbf.nn.parameters import width_parameter
from hbf.nn.places import PLACES, append, place_coordinates, turned
from hbf.nn.projections import Projections, mimetic_init, of_norm_1
from hbf.ops.attention import attention
from hbf.options import FLAG, NOT_NEGATIVE, OptionError, one_of, whole

NORMS = {'none': False, 'unit': True}


class SoftmaxAttention(CheckedModule):
  """Multi-head softmax(q·k/√d) v (Vaswani et al. 2017, eq. 1): 8D² + 4ND operations a token.

  Attributes:
    heads: H; the tokens' width D must be divisible by it.
    qk_norm: 'none', or 'unit': softmax(q·k/τ) of queries and keys of norm 1, with a learned temperature τ a head that
      starts at 1/√d. It is HyperBF attention of unit-norm queries and keys with σ² = τ (fact 1 of docs/design.md).
    qkv_bias: whether queries, keys and values have a bias.
    places: 'none', or 'offsets': −‖(p_q − p_k − o)/s‖²/2 is added to a head's logits, with a learned offset o and
      width s, as in HyperBF attention (`hbf.nn.places`). A token costs 2 C N H operations more, C as there.
      'rotary': queries and keys are turned by their places.
    mimetic: start of queries and keys with Wq Wkᵀ about this times (Z + I), see `hbf.nn.projections.mimetic_init`;
      0: as other projections.
    dtype: of the products; parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  qk_norm: Annotated[str, one_of(NORMS)] = 'none'
  qkv_bias: Annotated[bool, FLAG] = False
  places: Annotated[str, one_of(PLACES)] = 'none'
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
    if self.places == 'rotary':
      q, k = turned(q, context), turned(k, context)
    if NORMS[self.qk_norm]:
      scale = jnp.square(1 / width_parameter(self, 'head', scale, self.heads))  # 1/τ [H, 1, 1]
      q, k = of_norm_1(q), of_norm_1(k)
    k, v = remember(self, 'keys', k, context, 2), remember(self, 'values', v, context, 2)
    how: dict[str, Any] = visible(context, q.shape[2])
    if self.places != 'offsets':
      return attention(q, k, v, scale, **how).swapaxes(1, 2)
    x, t = place_coordinates(self, self.heads, context, q.dtype)
    q = append((q * scale).astype(q.dtype), these(x, context, q.shape[2], 1))
    with jax.default_matmul_precision('highest'):  # a distance is a difference of larger numbers
      return attention(q, append(k, t), v, 1.0, **how).swapaxes(1, 2)


def project_qkv(
  tokens: jax.Array, heads: int, dtype: Any, bias: bool = False, mimetic: float = 0.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return queries, keys and values [B, N, heads, D/heads] of tokens [B, N, D], by one product.

  Call it from a compact method: it makes the layer `qkv` there.

  Raises:
    OptionError: D isn't divisible by the number of heads.
  """
  batch, length, width = tokens.shape
  check_heads(width, heads)
  init = mimetic_init(heads, mimetic)
  qkv = Projections(3, width, use_bias=bias, dtype=dtype, kernel_init=init, name='qkv')(tokens.reshape(-1, width))
  q, k, v = (z.reshape(batch, length, heads, width // heads) for z in qkv)
  return q, k, v


def project_out(values: jax.Array, dtype: Any) -> jax.Array:
  """Joins the heads of values [B, N, H, d] and projects them: [B, N, H d]. Makes the layer `out`."""
  batch, length, heads, d = values.shape
  joined = values.reshape(batch * length, heads * d)
  return nn.Dense(heads * d, dtype=dtype, name='out')(joined).reshape(batch, length, heads * d)


def visible(context: Context, count: int) -> dict[str, Any]:
  """Which keys `count` tokens see, as `hbf.ops.attention.attention` takes it: a mask, and whether they are causal."""
  if context.continued is not None:  # what a mask may hide then comes later than all that count
    return {'mask': so_far(context.continued, count), 'causal': False}
  return {'mask': None if context.mask is None else of_pairs(context.mask)[:, None], 'causal': context.causal}


def check_heads(width: int, heads: int) -> None:
  """Raise OptionError unless `width` divides into `heads`."""
  if width % heads:
    raise OptionError(
      f'a width of {width} is not divisible by {heads} heads: change one of them', width=width, heads=heads
    )
