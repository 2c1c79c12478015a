"""The MLP, the baseline stage 2."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.errors import choose

ACTIVATIONS = {'relu': nn.relu, 'gelu': nn.gelu}


class MLP(nn.Module):
  """Two dense layers with a non-linearity between them, on every token.

  Attributes:
    hidden: units between the layers.
    activation: 'relu' (the memo's) or 'gelu'.
    dtype: of the products; parameters are float32.
  """

  hidden: int
  activation: str
  dtype: Any = jnp.float32
  size: ClassVar[str] = 'hidden'  # the option that says how large the stage is

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]."""
    width = tokens.shape[-1]
    activation = choose('activation', self.activation, ACTIVATIONS)
    hidden = nn.Dense(self.hidden, dtype=self.dtype, name='hidden')(tokens.reshape(-1, width))
    return nn.Dense(width, dtype=self.dtype, name='out')(activation(hidden)).reshape(tokens.shape)
