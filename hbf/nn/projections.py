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
    normalize: points, and the weights of each output, have norm 1; one learned scale of all products starts at 2√D.
    dtype: of the product; parameters are float32.
  """

  parts: int
  width: int
  use_bias: bool = True
  normalize: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, points: jax.Array) -> list[jax.Array]:
    """Maps points [T, D] to [T, W] by each of the layers."""
    outputs = self.parts * self.width
    kernel = self.param('kernel', nn.initializers.lecun_normal(), (points.shape[-1], outputs))
    if self.normalize:
      # So σ² = 1/scale starts where that of a HyperBF on points of norm 1 does, at 0.5/√D.
      scale = self.param('scale', nn.initializers.constant(2 * points.shape[-1] ** 0.5), ())
      points, kernel = of_norm_1(points.astype(self.dtype)), scale * of_norm_1(kernel.mT).mT
    # XLA's CPU backend multiplies matrices faster than the same numbers with more axes.
    z = points.astype(self.dtype) @ by_share(kernel.astype(self.dtype), self.parts)
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros_init(), (outputs,))
      z += by_share(bias.astype(self.dtype), self.parts)
    return by_part(z, self.parts)


def of_norm_1(z: jax.Array) -> jax.Array:
  """Rows of norm 1, computed in float32."""
  rows = z.astype(jnp.float32)
  if z.shape[0] == 1:  # XLA's CPU backend takes 15 times as long for gradients of row sums below an axis of one
    rows = rows[0]
  return (rows * jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) + 1e-12)).reshape(z.shape).astype(z.dtype)
