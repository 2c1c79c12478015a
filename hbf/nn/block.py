"""The homogeneous block: any stage 1 with any stage 2, pre-norm and residual."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.registry import Stage


class Block(nn.Module):
  """Y = X + stage1(LayerNorm(X)), Z = Y + stage2(LayerNorm(Y)) (memo eq. 1 and Figure 1).

  Attributes:
    stage1: makes the module that mixes tokens, [B, N, D] to [B, N, D].
    stage2: makes the module that works on every token, [B, N, D] to [B, N, D].
    dropout: rate, on the output of each stage.
    dtype: of the products; parameters are float32.
    norm_epsilon: added to the variance in each LayerNorm.
  """

  stage1: Stage
  stage2: Stage
  dropout: float
  dtype: Any = jnp.float32
  norm_epsilon: float = 1e-6

  @nn.compact
  def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D]; with train=True it needs a 'dropout' key if the rate isn't 0."""
    for name, stage in (('stage1', self.stage1), ('stage2', self.stage2)):
      normed = nn.LayerNorm(epsilon=self.norm_epsilon, dtype=self.dtype, name=f'norm_{name}')(tokens)
      update = stage(dtype=self.dtype, name=name)(normed)
      tokens += nn.Dropout(self.dropout, deterministic=not train)(update)
    return tokens
