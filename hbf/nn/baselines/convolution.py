"""Stage 1 as a convolution over the patches of an image: the control for Gaussians over positions."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.grid_sums import sums_over_grid
from hbf.nn.projections import project_out, project_qkv
from hbf.nn.relative_positions import initial_gaussians
from hbf.nn.traits import StageTraits
from hbf.options import FLOATS, odd, one_of, whole


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return nn.initializers.normal(shape[-1] ** -0.5)(key, shape, jnp.float32)


def _gaussian(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Return the Gaussians of `positional` at init, for the places j − i of the patches j that a patch i sums over."""
  axes, heads, window = shape
  offsets, sigmas = initial_gaussians(heads, axes, causal=False)
  places = np.arange(window) - window // 2
  distances = (places + offsets.transpose(2, 0, 1)) / sigmas[..., 0]
  return jax.nn.softmax(jnp.asarray(-(distances**2) / 2, jnp.float32))


INITIALIZERS = {'normal': _normal, 'gaussian': _gaussian}


class SeparableConvolution(CheckedModule):
  """Values, convolved with learned filters over the rows and the columns of patches, and an output layer.

  All channels of a head share a filter over rows and a filter over columns. Patches outside the image count as 0. On
  the patches of an image, stage 1 `positional` is the same with Gaussians instead of free filters, but divides by the
  sum of the weights within the image. So this stage is the control for the Gaussians. A token costs 4D² + 2(R + C)D
  operations, for R rows and C columns of patches.

  Attributes:
    heads: H, a divisor of the tokens' width D.
    window: K, the length of a filter in patches, odd.
    filters_init: 'normal' starts filters as random numbers, with a standard deviation of 1/√K. 'gaussian' starts them
      as the Gaussians with which the heads of `positional` start, so that only the form of the filters differs. Their
      sum over the window is 1.
    dtype: type of the matrix products. Parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  window: Annotated[int, odd(1)] = 7
  filters_init: Annotated[str, one_of(INITIALIZERS)] = 'normal'
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits()

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D].

    Raises:
      UserError: the context has no grid, or a grid of another number of tokens. Or D is not divisible by the number
        of heads.
    """
    check_context(self, context, tokens.shape)
    grid = context.grid_of(tokens.shape[1])
    if grid is None:
      raise UserError(
        f'stage 1 convolution needs a grid of as many patches as tokens, and here are {tokens.shape[1]} tokens and '
        f'grid {context.grid}: use images without a class token (pool mean or sequence)'
      )
    (values,) = project_qkv(tokens, self.heads, self.dtype, parts='v')
    filters = self.param('filters', INITIALIZERS[self.filters_init], (2, self.heads, self.window))
    of_rows, of_columns = (
      toeplitz(one, length).astype(values.dtype) for one, length in zip(filters, grid, strict=True)
    )
    return project_out(sums_over_grid(values, of_rows, of_columns), self.dtype)


def toeplitz(filters: Float[Array, 'H K'], length: int) -> Float[Array, 'H L L']:
  """Return matrices that convolve `length` numbers with filters of odd length K, which are centered on each number.

  Entry [h, i, j] is filters[h, j − i + (K − 1)/2], or 0 if the filter is too short to reach from i to j.
  """
  size = filters.shape[-1]
  tap = jnp.arange(length) - jnp.arange(length)[:, None] + size // 2
  return jnp.where((tap >= 0) & (tap < size), filters[:, jnp.clip(tap, 0, size - 1)], 0)
