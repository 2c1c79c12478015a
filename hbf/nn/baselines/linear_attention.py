"""Linear attention, a stage 1 whose time is linear in the number of tokens."""

import functools
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context, visible_keys
from hbf.nn.parameters import sigma_parameter
from hbf.nn.projections import project_out, project_qkv
from hbf.nn.traits import StageTraits
from hbf.ops.linear_attention import (
  MAPS,
  NORMALIZERS,
  RANDOM_MAPS,
  Features,
  continued_linear_attention,
  feature_map,
  keep_visible,
  linear_attention,
  no_state,
  orthogonal_projections,
)
from hbf.options import FLOATS, one_of, whole

# Added to the mean square of a head's outputs. The number is so small because weights of random features may be 1e-8.
_EPSILON = 1e-18


class LinearAttention(CheckedModule):
  """Multi-head linear attention: y = Σ_j w_j v_j with weights w_j = φ(q)·φ(k_j), then a normalization of y.

  y is divided by Σ_j w_j or by the root mean square of y, see `normalizer`.

  The following list has the number of operations for each token in the forward pass, by the value of `features`.
  There are N tokens of D channels, H heads, and m features in each head. A multiplication with an addition counts as
  two operations. For comparison, softmax attention needs 8 D² + 4 N D.

  - 'elu', 'relu', 'exp': 8 D² + 4 m (D + H), with m = D/H.
  - 'softmax', 'gaussian': 8 D² + 4 m (D + H) + 4 m D, with m = random_features. The last term is for the features.
  - A causal context needs 2 C (m H + D + H) more, because the sums are computed in chunks of C = min(128, N) tokens.

  Attributes:
    heads: H, a divisor of the tokens' width D. A head works on d = D/H dimensions.
    features: the feature map φ, a name in `hbf.ops.linear_attention.MAPS`. With normalizer 'sum', 'softmax'
      approximates `SoftmaxAttention`, and 'gaussian' approximates `HyperBFAttention` with metric identity and one σ
      for each head.
    random_features: m, the number of random features of a head. The relative variance of a weight is of order
      exp(‖q + k‖²/√d)/m, where ‖q + k‖² grows with d. So wide heads need many features, and so do queries and keys
      with large norms.
    normalizer: 'sum': the weights of a query sum to 1. 'none': the weights are not normalized. Instead, each head's
      output is divided by its root mean square (TransNormer, Qin et al. 2022), and multiplied by learned factors.
    dtype: type of the matrix products. Parameters are float32.
  """

  heads: Annotated[int, whole(1)]
  features: Annotated[str, one_of(MAPS)] = 'elu'
  random_features: Annotated[int, whole(1)] = 64
  normalizer: Annotated[str, one_of(NORMALIZERS)] = 'sum'
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = StageTraits(masks='keys', causal=True, decodes=True)

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    check_context(self, context, tokens.shape)
    q, k, v = (z.swapaxes(1, 2) for z in project_qkv(tokens, self.heads, self.dtype))
    d = q.shape[-1]
    chosen: dict[str, Any] = {'name': self.features}
    if self.features in RANDOM_MAPS:
      chosen['projections'] = _projections(self.heads, self.random_features, d)
    if self.features == 'gaussian':
      chosen['sigma'] = sigma_parameter(self, 'head', d**0.5, self.heads)
    queries, keys = (feature_map(z, **chosen) for z in (q, k))
    seen = visible_keys(context)
    keys = keys if seen is None else keep_visible(keys, seen[:, None, :, None])
    out = self._over_tokens(queries, keys, v, context).swapaxes(1, 2)
    if self.normalizer == 'none':
      out = nn.RMSNorm(epsilon=_EPSILON, dtype=self.dtype, reduction_axes=-1, feature_axes=(-2, -1), name='norm')(out)
    return project_out(out, self.dtype)

  def _over_tokens(self, queries: Features, keys: Features, values: jax.Array, context: Context) -> jax.Array:
    """Return the outputs [B, H, N, d] of the heads."""
    if context.continued is None:
      return linear_attention(queries, keys, values, normalizer=self.normalizer, causal=context.causal)
    state = self.variable('cache', 'state', no_state, keys.values, values)
    out, state.value = continued_linear_attention(queries, keys, values, state.value, normalizer=self.normalizer)
    return out


@functools.cache
def _projections(heads: int, count: int, d: int) -> np.ndarray:
  """Return the projections ω [H, count, d] of all heads.

  They are constants, not parameters. All blocks have the same ω.
  """
  rng = np.random.default_rng(0)
  return np.stack([orthogonal_projections(rng, count, d) for _ in range(heads)])
