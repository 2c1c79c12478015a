"""Several dense layers of one input, computed as one."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.ops.layout import by_part, by_share


class Projections(nn.Module):
  """`parts` dense layers side by side, with the parameters of one `flax.linen.Dense` of all their outputs.

  Under a mesh that splits units over devices, each device has its share of every part.

  Attributes:
    parts: number of layers.
    width: W, outputs of each.
    use_bias: whether they have a bias.
    dtype: of the product; parameters are float32.
  """

  parts: int
  width: int
  use_bias: bool = True
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, points: jax.Array) -> list[jax.Array]:
    """Maps points [T, D] to [T, W] by each of the layers."""
    outputs = self.parts * self.width
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (points.shape[-1], outputs))
    # XLA's CPU backend multiplies matrices faster than the same numbers with more axes.
    z = points.astype(self.dtype) @ by_share(kernel.astype(self.dtype), self.parts)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros_init(), (outputs,))
      z += by_share(bias.astype(self.dtype), self.parts)
    return by_part(z, self.parts)
