"""The mask of a sum over centers, from a given mask and causality."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool


def joint_mask(
  mask: Bool[Array, '... #N #A'] | None, causal: bool, points: int, centers: int
) -> Bool[Array, '... #N #A'] | None:
  """Return one mask that combines `mask` and `causal`, True where a point sees a center.

  With causal=True, point i sees centers 0 to i only. None: all points see all centers.
  """
  if not causal:
    return mask
  triangle = jnp.asarray(np.tri(points, centers, dtype=bool))
  return triangle if mask is None else mask & triangle
