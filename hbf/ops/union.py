"""The HyperBF over two sets of centers, from one sum over each set.

    y₁ = Σ_a K_a c_a / Z₁ with Z₁ = Σ_a K_a       over the centers of the first set, and likewise y₂ and Z₂
    y  = (Z₁ y₁ + Z₂ y₂) / (Z₁ + Z₂)              over both sets

The weight of y₁ is Z₁ / (Z₁ + Z₂), the logistic function of log Z₁ − log Z₂. So a Z that is too large or too small
for a float32 number does no harm. Flash attention joins blocks of keys in this way (Dao et al. 2022).
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from hbf.ops.products import keep_short


class PartialSum(NamedTuple):
  """The HyperBF with normalization 'sum' over a part of the centers, and its normalizer.

  Attributes:
    values: Σ_a K_a c_a / Z with Z = Σ_a K_a, [..., N, V] in the type of the coefficients.
    log_normalizer: log Z, float32 [..., N, 1].
  """

  values: jax.Array
  log_normalizer: jax.Array


def unite(first: PartialSum, second: PartialSum) -> Float[Array, '... N V']:
  """Compute the HyperBF over the centers of both parts, in the type of the values."""

  def weighted(weight: jax.Array, one: jax.Array, other: jax.Array) -> jax.Array:
    return (weight * one + (1 - weight) * other).astype(one.dtype)

  weight = jax.nn.sigmoid(first.log_normalizer - second.log_normalizer)
  return keep_short(weighted, first.values.dtype)(weight, first.values, second.values)
