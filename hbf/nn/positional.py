"""Stage 1 over the positions of tokens alone. No contents are compared, so there are no queries and keys."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hbf.errors import UserError
from hbf.nn.cache import update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context
from hbf.nn.projections import mask_and_causality, project_out, project_qkv
from hbf.nn.relative_positions import relative_coordinates
from hbf.nn.traits import StageTraits
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf
from hbf.options import one_of, whole


class PositionalHyperBF(CheckedModule):
  """Stage 1 as a HyperBF over positions: y = Σ K v / Σ K in every head, with K = exp(−‖(p_q − p_k − o)/s‖²/2).

  This is `HyperBFAttention` with relative positions 'gaussian' and without the distance of contents. p_q and p_k are
  the positions of a query and a key, which the context must have. Every head learns an offset o and a scale s, which
  start as `hbf.nn.relative_positions.relative_coordinates` says. A token without a position, such as a class token,
  has distance 0 to all tokens. The values v are computed from the tokens.

  The weights K / Σ K are the same for all examples. Each of N tokens costs 4D² + 2ND operations. The weights cost
  2CN²H operations for all examples together, with C = 4 for images and 3 for texts.

  Attributes:
    heads: H, a divisor of the tokens' width D.
    dtype: type of the matrix products. Parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  gate: Annotated[str, one_of({'none': 0, 'silu': 1, 'sigmoid': 2})] = 'none'
  dtype: Any = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(masks='any', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the context has no positions, or D is not divisible by the number of heads.
    """
    if context.positions is None:
      raise UserError('stage 1 positional needs the positions of the tokens: give a Context with positions')
    if self.gate == 'none':
      (v,) = project_qkv(tokens, self.heads, self.dtype, parts='v')
    else:
      gate, v = project_qkv(tokens, self.heads, self.dtype, parts='qk')
    v = update_cache(self, 'values', v.swapaxes(1, 2), context, 2)
    count = tokens.shape[1]
    without_contents = jnp.zeros((1, self.heads, count, 0), self.dtype)
    x, t = relative_coordinates(self, 'gaussian', without_contents, context)
    mask, causal = mask_and_causality(context, count)
    mixed = self._over_tokens(x, t, v.swapaxes(1, 2), mask, causal)
    if self.gate != 'none':
      mixed *= {'silu': nn.silu, 'sigmoid': lambda z: 2 * nn.sigmoid(z)}[self.gate](gate)
    return project_out(mixed, self.dtype)

  def _over_tokens(
    self,
    x: Float[Array, 'H n C'],
    t: Float[Array, 'H N C'],
    values: Float[Array, 'B N H d'],
    mask: Bool[Array, '#B #H #n #N'] | None,
    causal: bool,
  ) -> Float[Array, 'B n H d']:
    """Return Σ K v / Σ K for coordinates x of queries and t of keys. Interceptors can replace the values."""
    basis = RadialBasis('gaussian', 1.0, dot_only_dims=x.shape[-1])
    if mask is not None:
      return hyperbf(x, t, values.swapaxes(1, 2), basis, mask=mask, causal=causal).swapaxes(1, 2)
    # All examples have the same weights. So their values are the columns of one matrix [N, B d] for each head. The
    # sizes are given, because JAX refuses −1 for an empty batch.
    batch, count, heads, d = values.shape
    columns = values.transpose(2, 1, 0, 3).reshape(heads, count, batch * d)
    sums = hyperbf(x, t, columns, basis, causal=causal)
    return sums.reshape(*sums.shape[:2], batch, d).transpose(2, 1, 0, 3)
