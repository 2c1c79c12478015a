"""Stage 1 as a HyperBF over the places of tokens alone: y = Σ K(‖(p_q − p_k − o)/s‖²/2) v / Σ K in every head."""

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context
from hbf.nn.projections import project_out, project_qkv
from hbf.nn.relative_positions import relative_coordinates
from hbf.nn.traits import StageTraits
from hbf.ops.basis import RadialBasis
from hbf.ops.hyperbf import hyperbf
from hbf.options import whole


class HyperBFPlaces(CheckedModule):
  """Stage 1 that compares places and not contents."""

  heads: Annotated[int, whole(1)]
  dtype: Any = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits()

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    batch, count, width = tokens.shape
    (v,) = project_qkv(tokens, self.heads, self.dtype, parts='v')
    x, t = relative_coordinates(self, 'gaussian', jnp.zeros((1, self.heads, count, 1), self.dtype), context)
    values = v.transpose(2, 1, 0, 3).reshape(self.heads, count, -1)
    y = hyperbf(x, t, values, RadialBasis('gaussian', 1.0, dot_only_dims=x.shape[-1]))
    return project_out(y.reshape(self.heads, count, batch, -1).transpose(2, 1, 0, 3), self.dtype)
