"""The MLP, which is the baseline stage 2, and its gated variants."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context
from hbf.nn.projections import Projections
from hbf.nn.traits import TOKENWISE, StageTraits
from hbf.ops.row_major import by_columns
from hbf.options import FLAG, FLOATS, NOT_NEGATIVE, one_of, whole

# 'gelu' is the tanh form, as in JAX and Google's networks. 'gelu_erf' is the exact form, as in PyTorch.
Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
  'relu': nn.relu,
  'gelu': nn.gelu,
  'gelu_erf': functools.partial(nn.gelu, approximate=False),
}
# Activations of the gated forms act(V x) ⊙ U x (Shazeer 2020), by name.
GATED: dict[str, Activation] = {'glu': nn.sigmoid, 'reglu': nn.relu, 'geglu': nn.gelu, 'swiglu': nn.silu}


class MLP(CheckedModule):
  """Two dense layers with a non-linearity between them, on every token.

  A token costs 4 · hidden · D operations, or 6 · hidden · D operations if the MLP is gated.

  Attributes:
    hidden: number of units between the layers. The first layer of a gated MLP has two rows of weights for each unit.
    activation: 'relu' (as in CBMM Memo 143), 'gelu', 'gelu_erf', or one of the gated linear units 'glu', 'reglu',
      'geglu', 'swiglu'.
    output_scale: √hidden times the standard deviation of the second layer's initial weights.
    normalize: True to scale tokens x, and the weights w of each unit, to norm 1. A unit is then act(s x·w + b). The
      scale s is learned, is the same for all units, and starts at 2√D. Since ‖x − w‖² = 2 − 2 x·w, this MLP is a
      HyperBF with kernel φ(b' − r²/2σ²), where r = ‖x − w‖, φ = act, σ² = 1/s and b' = b + s. So this MLP is the
      baseline for such kernels.
    dtype: type of the matrix products. Parameters are float32.
  """

  hidden: Annotated[int, whole(1)]
  activation: Annotated[str, one_of(ACTIVATIONS | GATED)] = 'relu'
  output_scale: Annotated[float, NOT_NEGATIVE] = 1.0
  normalize: Annotated[bool, FLAG] = False
  dtype: Annotated[Any, FLOATS] = jnp.float32
  traits: ClassVar[StageTraits] = dataclasses.replace(TOKENWISE, units='hidden')

  @nn.compact
  def __call__(self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION) -> Float[Array, 'B N D']:
    """Map tokens [B, N, D] to [B, N, D]."""
    width = tokens.shape[-1]
    activation = (ACTIVATIONS | GATED)[self.activation]
    parts = 2 if self.activation in GATED else 1
    hidden_layer = Projections(parts, self.hidden, normalize=self.normalize, dtype=self.dtype, name='hidden')
    gates, *values = hidden_layer(tokens.reshape(-1, width))
    hidden = activation(gates) * values[0] if values else activation(gates)
    usual = nn.initializers.variance_scaling(self.output_scale**2, 'fan_in', 'truncated_normal')
    out = nn.Dense(width, dtype=self.dtype, kernel_init=usual, dot_general=_by_columns, name='out')
    return out(hidden).reshape(tokens.shape)


def _by_columns(rows: jax.Array, kernel: jax.Array, axes: Any, **options: Any) -> jax.Array:
  """Multiply rows by a kernel [hidden, D], stored column by column so that the kernel's gradient is faster."""
  return jax.lax.dot_general(rows, by_columns(kernel), axes, **options)
