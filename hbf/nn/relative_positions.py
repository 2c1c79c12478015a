"""Relative positions of tokens in attention: distances between positions, or rotations of queries and keys."""

import itertools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hbf.nn.cache import new_tokens
from hbf.nn.context import Context
from hbf.ops.fast.attention import short_parts
from hbf.ops.layout import as_rows_of
from hbf.ops.products import is_short, row_dots
from hbf.options import OptionError

RELATIVE_POSITIONS = {name: name for name in ('none', 'gaussian', 'adaptive', 'rotary')}
GAUSSIAN = ('gaussian', 'adaptive')  # kinds that use `relative_coordinates`

_SIGMA = 0.5  # s at init, in patches: a patch beside the one that a head looks at has e⁻² of its weight
# For positions of 1 and of 2 dimensions, a number in tokens or patches. A full turn of the slowest rotation takes
# about 2π times this number. For texts it is the published number. For images, which are a few patches wide, it is as
# in Heo et al. 2024.
_SLOWEST = {1: 10_000.0, 2: 100.0}
_FEW = 32  # up to this many positions along an axis, two short numbers are enough for a coordinate (see `_in_short`)


def relative_coordinates(
  module: nn.Module,
  kind: str,
  queries: Float[Array, 'B H n d'],
  context: Context,
  sigma: Float[Array, '#H 1 1'] | float = 1.0,
) -> tuple[Float[Array, '... H n C'], Float[Array, 'H N C']]:
  """Return coordinates of queries and keys whose product is −‖(p_q − p_k − o)/s‖²/2.

  p_q and p_k are the positions of a query and a key, with P dimensions. Every head learns an offset o and a scale s.
  The parameters are `position_offset` [H, 1, P], which is o, and `position_log_sigma` [H, 1, 1], which is log s. If a
  token has no position, its coordinates are 0, and so are its products with all tokens.

  For images, each head starts with an offset of its own, to one of the nearest patches, and with a scale s of half a
  patch. So the heads start like the taps of a convolution (after ConViT, d'Ascoli et al. 2021). For texts, half of
  the heads start like this. The other heads start without an offset and with s of 4, 16, 64, … tokens, so that they
  see far (after ALiBi's slopes, Press et al. 2022).

  With kind 'adaptive' the offset and the scale also depend on the query q: U q/√d is added to o, and 2 tanh(u·q/2√d)
  is added to log s. U and u are the parameter `position_slopes` [H, d, P + 1], which starts at 0. Each token costs 2
  D (P + 1) more operations.

  With a = p_q − o, the coordinates of a query are a/s², −‖a‖²/2s² and −1/s². Those of a key are p_k, 1 and ‖p_k‖²/2.
  So the coordinates of keys do not depend on parameters. There are C = P + 2 coordinates. If queries have a short
  type, such as bfloat16, there are six times as many, or three times if positions are few (see `_in_short`).

  Args:
    module: the module that gets the parameters.
    kind: 'gaussian' or 'adaptive'.
    queries: queries of the new tokens, [B, H, n, d]. The coordinates have the type of the queries.
    context: the context of the call.
    sigma: the number by which the given queries are divided. Kind 'adaptive' uses the query before this division.

  Returns:
    Coordinates of the queries, [H, n, C], or [B, H, n, C] if adaptive, and of all keys, [H, N, C].

  Raises:
    OptionError: the context has no positions.
  """
  if context.positions is None:
    raise _without_positions(kind)
  placed, positions = _from_the_middle(context.positions)
  heads, count, d = queries.shape[1:]
  axes = positions.shape[-1]
  offset, log_sigma = _parameters(module, heads, axes, context.causal)
  if kind == 'adaptive':
    slopes = module.param('position_slopes', nn.initializers.zeros_init(), (heads, d, axes + 1), jnp.float32)
    moved = jnp.einsum('bhnd,hdk->bhnk', queries.astype(jnp.float32), sigma * slopes) / d**0.5
    offset, log_sigma = offset + moved[..., :axes], log_sigma + 2 * jnp.tanh(moved[..., axes:] / 2)
  own, own_placed = (new_tokens(z, context, count, 0) for z in (positions, placed))
  x, t = _coordinates(own, positions, offset, log_sigma)
  return _in_type(own_placed * x, placed * t, queries.dtype, len(positions) ** (1 / axes))


def grid_coordinates(
  module: nn.Module, heads: int, grid: tuple[int, int], dtype: Any
) -> list[tuple[Float[Array, 'H n 3'], Float[Array, 'H n 3']]]:
  """Return coordinates of queries and keys for the rows, and for the columns, of a grid of positions.

  The two products x·t are the two terms of −‖(p_q − p_k − o)/s‖²/2 in `relative_coordinates` with kind 'gaussian',
  which has the same parameters. So the Gaussian of a grid is the product of two Gaussians, and its sum over the grid
  is the product of two sums.
  """
  offset, log_sigma = _parameters(module, heads, 2, causal=False)
  found = []
  for axis, count in enumerate(grid):
    positions = jnp.arange(count, dtype=jnp.float32)[:, None] - (count - 1) / 2
    x, t = _coordinates(positions, positions, offset[..., axis : axis + 1], log_sigma)
    found.append(_in_type(x, t, dtype, count))
  return found


def _parameters(module: nn.Module, heads: int, axes: int, causal: bool) -> tuple[jax.Array, jax.Array]:
  """Return the offsets o [H, 1, P] and log s [H, 1, 1] of a module, see `relative_coordinates`."""
  offsets, sigmas = initial_gaussians(heads, axes, causal)
  offset = module.param('position_offset', lambda _: jnp.asarray(offsets))
  return offset, module.param('position_log_sigma', lambda _: jnp.asarray(np.log(sigmas)))


def _coordinates(
  own: Float[Array, 'n P'], positions: Float[Array, 'N P'], offset: Float[Array, '... P'], log_sigma: jax.Array
) -> tuple[Float[Array, '... H n C'], Float[Array, 'H N C']]:
  """Return coordinates of queries at `own` and keys at `positions`, see `relative_coordinates`."""
  around = own - offset
  middle, last = -0.5 * row_dots(around, around), -jnp.ones_like(around[..., :1])
  x = jnp.exp(-2 * log_sigma) * jnp.concatenate([around, middle, last], axis=-1)
  t = jnp.concatenate([positions, jnp.ones((len(positions), 1)), 0.5 * row_dots(positions, positions)], axis=-1)
  return x, jnp.broadcast_to(t, (offset.shape[-3], *t.shape))


def rotate(z: Float[Array, '... N d'], context: Context) -> Float[Array, '... N d']:
  """Rotate queries or keys [..., N, d] by their positions, so that dot products depend on relative positions.

  These are rotary positions (Su et al. 2021, eq. 34). A rotation keeps the norms. For positions in two dimensions,
  one half of the pairs of coordinates is rotated according to the row, and the other half according to the column. A
  token without a position is not rotated.

  Args:
    z: queries or keys. The rotation is computed in float32.
    context: the context of the call.

  Raises:
    OptionError: the context has no positions, or positions of more than two dimensions. Or d is not divisible by 2P
      for positions of P dimensions.
  """
  if context.positions is None:
    raise _without_positions('rotary')
  positions = new_tokens(context.positions, context, z.shape[-2], 0)
  length, axes = positions.shape
  if axes not in _SLOWEST:
    raise OptionError(
      f'relative_positions rotary needs positions of 1 or 2 dimensions, and these have {axes}: use gaussian',
      relative_positions='rotary',
    )
  d = z.shape[-1]
  if d % (2 * axes):
    raise OptionError(
      f'relative_positions rotary needs heads of a multiple of {2 * axes} dimensions, and here are {d}: change the '
      'width or the heads',
      relative_positions='rotary',
    )
  pairs = d // (2 * axes)
  speeds = _SLOWEST[axes] ** -(np.arange(pairs, dtype=np.float32) / pairs)
  angles = (jnp.nan_to_num(positions)[..., None] * speeds).reshape(length, -1)
  x, y = jnp.split(z.astype(jnp.float32), 2, axis=-1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], axis=-1).astype(z.dtype)


def _without_positions(kind: str) -> OptionError:
  return OptionError(
    f'relative_positions {kind} needs tokens that have positions, and these have none: use relative_positions none',
    relative_positions=kind,
  )


def append_coordinates(z: Float[Array, 'B ... d'], coordinates: Float[Array, '... C']) -> Float[Array, 'B ... e']:
  """Append C coordinates to queries or keys [B, ..., d]. Return [B, ..., d + C].

  Coordinates [..., C] are the same for all examples. Coordinates [B, ..., C] differ between examples.
  """
  # Coordinates are float32 until here, so that their gradient is summed over the batch in float32.
  everywhere = as_rows_of(z, coordinates.astype(jnp.float32))
  return jnp.concatenate([z, everywhere.astype(z.dtype)], axis=-1)


def _from_the_middle(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return floats [N, 1], 1 for tokens with a position and else 0, and the positions [N, P] minus their mean.

  Differences of positions stay the same. The numbers become smaller, and so do their rounding errors.
  """
  placed = ~jnp.isnan(positions).any(axis=-1, keepdims=True)
  middle = jnp.where(placed, positions, 0).sum(axis=0) / jnp.maximum(placed.sum(), 1)
  return placed.astype(jnp.float32), jnp.where(placed, positions - middle, 0)


def _in_type(x: jax.Array, t: jax.Array, dtype: Any, wide: float) -> tuple[jax.Array, jax.Array]:
  """Return coordinates of a type, see `_in_short` for a short one."""
  return _in_short(x, t, dtype, wide) if is_short(dtype) else (x.astype(dtype), t.astype(dtype))


def _in_short(x: jax.Array, t: jax.Array, dtype: jnp.dtype, wide: float) -> tuple[jax.Array, jax.Array]:
  """Return coordinates of a short type, such as bfloat16. Their dot product is nearly as exact as x·t in float32.

  Each number is split into a sum of three short numbers, x ≈ x₁ + x₂ + x₃ and t ≈ t₁ + t₂ + t₃. The dot product is
  the sum of all xᵢ·tⱼ with i + j ≤ 4. The others are negligible. So there are six times as many coordinates. If
  positions are few, two short numbers are enough. The dot product is then x₁·t₁ + x₂·t₁ + x₁·t₂, and there are three
  times as many coordinates.

  Args:
    x: coordinates of the queries [..., P + 2].
    t: coordinates of the keys [..., P + 2].
    dtype: the short type.
    wide: number of positions along an axis, if all positions fill a grid.
  """
  # The dot product is a small difference of large numbers, which grow like the square of `wide`. For a narrow head
  # they are in the hundreds in the corners of 16×16 patches, and a million at the ends of a text of 1,024
  # tokens. The error of two bfloat16 numbers is 0.02 or less up to `_FEW` positions, but 14 for this text. Three are
  # as exact as float32.
  parts, moved = (2, 0) if wide <= _FEW else (3, round(math.log2(wide / 2)))
  pairs = [(i, j) for j in range(parts) for i in range(parts - j)]
  # Squares of many positions would overflow in float16. A power of two moves some of their size to the other factor.
  factors = np.array([1.0] * (x.shape[-1] - 2) + [2.0**-moved, 2.0**moved], np.float32)
  xs, ts = short_parts(x * factors, dtype, parts), short_parts(t / factors, dtype, parts)
  return jnp.concatenate([xs[i] for i, _ in pairs], axis=-1), jnp.concatenate([ts[j] for _, j in pairs], axis=-1)


def initial_gaussians(heads: int, axes: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
  """Return the initial offsets o [H, 1, P] and scales s [H, 1, 1], see `relative_coordinates`."""
  near = heads if axes > 1 else -(-heads // 2)
  offsets, sigmas = np.zeros((heads, 1, axes), np.float32), np.full((heads, 1, 1), _SIGMA, np.float32)
  offsets[:near, 0] = _nearest(near, axes, causal)
  sigmas[near:, 0, 0] = 4.0 ** np.arange(1, heads - near + 1)
  return offsets, sigmas


def _nearest(count: int, axes: int, causal: bool) -> np.ndarray:
  """Return offsets [count, axes] to the nearest other positions, nearest first. If causal, only to earlier ones."""
  reach = count if axes == 1 else math.isqrt(count) + 1
  offsets = [offset for offset in itertools.product(range(-reach, reach + 1), repeat=axes) if any(offset)]
  if causal:
    offsets = [offset for offset in offsets if offset > (0,) * axes]
  offsets.sort(key=lambda offset: (math.hypot(*offset), math.atan2(*offset) if axes == 2 else offset))
  return np.array(offsets[:count], np.float32)
