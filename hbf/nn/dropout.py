"""Dropout of arrays that may be split over explicit mesh axes, which `flax.linen.Dropout` refuses."""

from typing import Annotated

import flax.linen as nn
import jax

from hbf.ops.layout import explicit_split, laid_out_by_xla
from hbf.options import FLAG, RATE


class Dropout(nn.Module):
  """Dropout (Srivastava et al. 2014) with the random numbers of `flax.linen.Dropout`.

  Attributes:
    rate: share of the elements that become 0.
    deterministic: True to return the inputs. Otherwise a random key named 'dropout' is needed, if rate is above 0.
  """

  rate: Annotated[float, RATE]
  deterministic: Annotated[bool, FLAG]

  @nn.compact
  def __call__(self, z: jax.Array) -> jax.Array:
    """Set random elements of an array to 0, and multiply the others by 1 / (1 − rate). Its layout stays."""
    if self.deterministic or self.rate == 0:
      return z
    key = self.make_rng('dropout')  # outside of the call below, because keys may lie on the mesh too
    drop = nn.Dropout(self.rate, deterministic=False, parent=None)
    return laid_out_by_xla(lambda z, key: drop.apply({}, z, rng=key), explicit_split(z), z, key)
