"""Stage 1 over the positions of tokens alone. No contents are compared, so there are no queries and keys."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.nn.cache import update_cache
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.grid_sums import sums_over_grid
from hbf.nn.projections import mask_and_causality, project_out, project_qkv
from hbf.nn.relative_positions import grid_coordinates, relative_coordinates
from hbf.nn.traits import StageTraits
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf, responses
from hbf.ops.layout import explicit_split, laid_out_by_xla
from hbf.options import FLOATS, whole


class PositionalHyperBF(CheckedModule):
  """Stage 1 as a HyperBF over positions: y = Σ K v / Σ K in every head, with K = exp(−‖(p_q − p_k − o)/s‖²/2).

  This is `HyperBFAttention` with relative positions 'gaussian' and without the distance of contents. p_q and p_k are
  the positions of a query and a key, which the context must have. Every head learns an offset o and a scale s, which
  start as `hbf.nn.relative_positions.relative_coordinates` says. A token without a position, such as a class token,
  has distance 0 to all tokens. The values v are computed from the tokens.

  The weights K / Σ K are the same for all examples. If the tokens are the patches of an image with R rows and C
  columns, K is the product of a Gaussian of the rows and one of the columns, and so is Σ K. The sums over the R rows
  of a column come first, and then those over the C columns. So each token costs 4D² + 2(R + C)D operations, and the
  weights cost 10(R² + C²)H operations for all examples together. Other tokens, such as those of a text or beside a
  class token, cost 4D² + 2ND each. Their weights cost 2(P + 2)N²H operations, for positions of P dimensions.

  Attributes:
    heads: H, a divisor of the tokens' width D.
    dtype: type of the matrix products. Parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(masks='any', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the context has no positions, or a grid of another number of tokens. Or D is not divisible by the
        number of heads.
    """
    check_context(self, context, tokens.shape)
    if context.positions is None:
      raise UserError('stage 1 positional needs the positions of the tokens: give a Context with positions')
    if context.grid and not context.grid_of(tokens.shape[1]):
      rows, columns = context.grid
      raise UserError(
        f'the grid of the Context has {rows}×{columns} patches, and there are {tokens.shape[1]} tokens: leave the '
        'grid out unless the tokens are exactly its patches'
      )
    (v,) = project_qkv(tokens, self.heads, self.dtype, parts='v')
    v = update_cache(self, 'values', v.swapaxes(1, 2), context, 2).swapaxes(1, 2)
    return project_out(self._over_tokens(v, tokens.shape[1], context), self.dtype)

  def _over_tokens(self, values: Float[Array, 'B N H d'], count: int, context: Context) -> Float[Array, 'B n H d']:
    """Return Σ K v / Σ K for the last `count` tokens, from the values of all. Interceptors can replace the values."""
    mask, causal = mask_and_causality(context, count)
    if context.grid and mask is None and not causal:
      return self._over_grid(values, context.grid)
    without_contents = jnp.zeros((1, self.heads, count, 0), self.dtype)
    x, t = relative_coordinates(self, 'gaussian', without_contents, context)
    if mask is not None:
      return hyperbf(x, t, values.swapaxes(1, 2), _basis(x), mask=mask, causal=causal).swapaxes(1, 2)
    return laid_out_by_xla(_over_all, explicit_split(values), values, x, t, causal)

  def _over_grid(self, values: Float[Array, 'B N H d'], grid: tuple[int, int]) -> Float[Array, 'B N H d']:
    """Return Σ K v / Σ K for tokens on a grid: sums over its rows, and then sums over its columns."""
    # There are fewer weights than values, so the weights are divided by their sums, and not the values.
    of_rows, of_columns = (
      responses(x, t, _basis(x)).astype(values.dtype) for x, t in grid_coordinates(self, self.heads, grid, self.dtype)
    )
    return sums_over_grid(values, of_rows, of_columns)


def _over_all(
  values: Float[Array, 'B N H d'], x: Float[Array, '... n c'], t: Float[Array, '... N c'], causal: bool
) -> Float[Array, 'B n H d']:
  """Return Σ K v / Σ K for coordinates x of the queries and t of the keys. All examples have the same coordinates."""
  # So their values are the columns of one matrix [N, B d] for each head. The sizes are given, because JAX refuses −1
  # for an empty batch.
  batch, length, heads, d = values.shape
  columns = values.transpose(2, 1, 0, 3).reshape(heads, length, batch * d)
  sums = hyperbf(x, t, columns, _basis(x), causal=causal)
  return sums.reshape(heads, x.shape[-2], batch, d).transpose(2, 1, 0, 3)


def _basis(coordinates: jax.Array) -> RadialBasis:
  """Return the Gaussian of coordinates [..., c], which are already divided by the widths."""
  return RadialBasis('gaussian', 1.0, dot_only_dims=coordinates.shape[-1])
