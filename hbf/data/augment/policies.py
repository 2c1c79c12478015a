"""RandAugment and TrivialAugment, as in torchvision: random operations of a given or a random magnitude.

An operation has a magnitude of 0 … 30. Shears, translations and rotations are maps as in `hbf.data.augment.geometry`.
All other operations change colors. An image is moved first, by the composed maps of all drawn operations. Then its
colors are changed, in the order of the draws.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hbf.data.augment import color, geometry

MOST = 30  # the greatest magnitude
MOVES = ('identity', 'shear_x', 'shear_y', 'translate_x', 'translate_y', 'rotate')
OPERATIONS = (*MOVES, *color.OPERATIONS)


@dataclasses.dataclass(frozen=True)
class Space:
  """The strengths of the operations at the greatest magnitude.

  Attributes:
    shear: for `shear_x`, the shift of a row divided by its distance from the top. For `shear_y`, the shift of a
      column divided by its distance from the left.
    translate: shift in pixels. None: 150/331 of the image's side.
    rotate: angle in degrees.
    factor: brightness, contrast, saturation or sharpness gets the factor 1 minus or plus this number.
    posterize: number of bits of a level that are dropped.
  """

  shear: float
  translate: float | None
  rotate: float
  factor: float
  posterize: int


RAND = Space(shear=0.3, translate=None, rotate=30.0, factor=0.9, posterize=4)
WIDE = Space(shear=0.99, translate=32.0, rotate=135.0, factor=0.99, posterize=6)


class Drawn(NamedTuple):
  """The n random operations for an image. Each field is int32 [n].

  Attributes:
    number: index of the operation in `OPERATIONS`.
    magnitude: magnitude of the operation, 0 … 30.
    sign: direction, 1 or −1, for operations with two directions.
  """

  number: jax.Array
  magnitude: jax.Array
  sign: jax.Array


def draw_rand(key: jax.Array, count: int, magnitude: int) -> Drawn:
  """Draw `count` operations of RandAugment (Cubuk et al. 2020), all of the given magnitude.

  Each drawn operation is any of the 14 `OPERATIONS` with equal probability.
  """
  return _draw(key, count, magnitude, magnitude)


def draw_trivial(key: jax.Array) -> Drawn:
  """Draw one operation and one magnitude, both uniformly, for TrivialAugment (Müller & Hutter 2021)."""
  return _draw(key, 1, 0, MOST)


def _draw(key: jax.Array, count: int, least: int, most: int) -> Drawn:
  number_key, magnitude_key, sign_key = jax.random.split(key, 3)
  return Drawn(
    jax.random.randint(number_key, (count,), 0, len(OPERATIONS)),
    jax.random.randint(magnitude_key, (count,), least, most + 1),
    jax.random.rademacher(sign_key, (count,), jnp.int32),
  )


def move(drawn: Drawn, size: geometry.Size, space: Space) -> jax.Array:
  """Return the composed affine map [2, 3] of all drawn operations. Changes of colors have the identity map."""
  mapping = jnp.eye(2, 3)
  for number, magnitude, sign in zip(*drawn, strict=True):
    mapping = geometry.compose(mapping, _move(number, magnitude, sign, size, space))
  return mapping


def _move(number: jax.Array, magnitude: jax.Array, sign: jax.Array, size: geometry.Size, space: Space) -> jax.Array:
  # Shears keep the top left corner, translations are whole pixels, and rotations keep the center.
  def strength(name: str, most: float) -> jax.Array:
    return jnp.where(number == OPERATIONS.index(name), sign * jnp.float32(most) * magnitude / MOST, 0.0)

  sides = size[::-1]
  shears = [strength(name, space.shear) for name in ('shear_x', 'shear_y')]
  farthest = [150 / 331 * side if space.translate is None else space.translate for side in sides]
  translation = [jnp.trunc(strength(f'translate_{axis}', most)) for axis, most in zip('xy', farthest, strict=True)]
  angle = jnp.radians(strength('rotate', space.rotate))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  x, y = (side / 2 for side in sides)
  offset = jnp.stack([x - cos * x - sin * y, y + sin * x - cos * y])
  linear = jnp.array([[cos, sin + shears[0]], [shears[1] - sin, cos]])
  return geometry.affine(linear, offset + jnp.stack(translation))


def recolor(drawn: Drawn, image: jax.Array, space: Space) -> jax.Array:
  """Change the colors of an image by those drawn operations that change colors, one after another."""
  for number, magnitude, sign in zip(*drawn, strict=True):
    image = color.operate(
      image,
      number - len(MOVES),
      factor=color.to_factor(1 + sign * jnp.float32(space.factor) * magnitude / MOST),
      bits=8 - (2 * space.posterize * magnitude + MOST) // (2 * MOST),
      threshold=8.5 * (MOST - magnitude),
    )
  return image
