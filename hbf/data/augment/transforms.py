"""Random transforms of training images, by their names in the config's `data.transforms`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hbf.data.augment import color, geometry, policies
from hbf.data.augment.entries import Argument, Entry, read_entries
from hbf.errors import UserError

KEY = 'data.transforms'
# The defaults of torchvision. Zhong et al. 2020 erase areas of up to 0.4.
ERASED_AREAS, ERASED_ASPECTS = (0.02, 0.33), (0.3, 3.3)


class Facts(NamedTuple):
  """Facts about an example that some transforms need beside the random key.

  Attributes:
    mean: mean level of each channel, uint8 [C], or one number for all channels.
    fixed_key: random key of this example, the same in every epoch.
    epoch: index of the current epoch, int32 [].
  """

  mean: Any = 128
  fixed_key: Any = None
  epoch: Any = None


NO_FACTS = Facts()


class Transform(NamedTuple):
  """A kind of transform. Its functions take their arguments by position.

  Attributes:
    arguments: the numbers that follow the name in a config.
    geometry: function (key, (H, W), *needs, *arguments) → the map that moves the image, float32 [2, 3]; see
      `hbf.data.augment.geometry`. None: the transform does not move the image.
    exact: function (key, image, *needs, *arguments) → the image, moved as the map from `geometry` moves it, but
      without resampling. None: this is not possible.
    pixels: function (key, image, *needs, *arguments) → the image with changed colors or an erased part, uint8
      [H, W, C]. None: the transform only moves the image.
    needs: names of those fields of `Facts` that the functions get as arguments, in this order.
  """

  arguments: tuple[Argument, ...] = ()
  geometry: Callable[..., jax.Array] | None = None
  exact: Callable[..., jax.Array] | None = None
  pixels: Callable[..., jax.Array] | None = None
  needs: tuple[str, ...] = ()


def _rand_move(key: jax.Array, size: geometry.Size, count: int, magnitude: int) -> jax.Array:
  return policies.move(policies.draw_rand(key, count, magnitude), size, policies.RAND)


def _rand_recolor(key: jax.Array, image: jax.Array, count: int, magnitude: int) -> jax.Array:
  return policies.recolor(policies.draw_rand(key, count, magnitude), image, policies.RAND)


def _trivial_move(key: jax.Array, size: geometry.Size) -> jax.Array:
  return policies.move(policies.draw_trivial(key), size, policies.WIDE)


def _trivial_recolor(key: jax.Array, image: jax.Array) -> jax.Array:
  return policies.recolor(policies.draw_trivial(key), image, policies.WIDE)


def erase(key: jax.Array, image: jax.Array, rate: float) -> jax.Array:
  """With probability `rate`, fill a random box with uniform noise, 0 … 255 (random erasing)."""
  rate_key, box_key, noise_key = jax.random.split(key, 3)
  size = (image.shape[0], image.shape[1])
  erased = geometry.inside(geometry.centers(size), *geometry.draw_box(box_key, size, ERASED_AREAS, ERASED_ASPECTS))
  # Drawing words is much faster than drawing bytes.
  words = jax.random.bits(noise_key, (-(-image.size // 4),), jnp.uint32)
  noise = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: image.size].reshape(image.shape)
  return jnp.where((erased & jax.random.bernoulli(rate_key, rate))[..., None], noise, image)


def cutout(key: jax.Array, image: jax.Array, mean: jax.Array, side: int) -> jax.Array:
  """Fill a square with the mean of each channel. Its center is a random pixel, and its sides have `side` pixels.

  The image's edges clip the square.
  """
  center = jax.random.randint(key, (2,), 0, jnp.array(image.shape[:2]))
  rows, columns = (
    (jnp.arange(length) >= start) & (jnp.arange(length) < start + side)
    for length, start in zip(image.shape, center - side // 2, strict=False)
  )
  return jnp.where((rows[:, None] & columns)[..., None], jnp.asarray(mean, jnp.uint8), image)


_AREAS = (Argument('least area', 0.01), Argument('most area', 0.01, default=1.0))
_STRENGTHS = tuple(Argument(name) for name in ('brightness', 'contrast', 'saturation'))
# A transform's position in this dict selects its random key, so its draws do not depend on other transforms of a run.
# Append new transforms at the end.
TRANSFORMS = {
  'flip': Transform((Argument('rate', default=0.5),), geometry.flip, geometry.flip_exactly),
  'shift': Transform((Argument('pixels', most=math.inf, whole=True),), geometry.shift, geometry.shift_exactly),
  'resized_crop': Transform(_AREAS, geometry.resized_crop),
  'color_jitter': Transform(_STRENGTHS, pixels=color.jitter),
  'rand_augment': Transform(
    (Argument('count', 1, 14, whole=True), Argument('magnitude', 0, policies.MOST, whole=True)),
    _rand_move,
    pixels=_rand_recolor,
  ),
  'trivial_augment': Transform((), _trivial_move, pixels=_trivial_recolor),
  'erase': Transform((Argument('rate'),), pixels=erase),
  'cutout': Transform((Argument('side', 1, math.inf, whole=True),), pixels=cutout, needs=('mean',)),
  'alternate_flip': Transform(
    (), geometry.flip_alternately, geometry.flip_alternately_exactly, needs=('fixed_key', 'epoch')
  ),
}


def read_transforms(value: Any) -> tuple[Entry, ...]:
  """Check the config's `data.transforms`. Return an entry for each transform, with all its arguments.

  Raises:
    UserError: the value is wrong.
  """
  entries = read_entries(KEY, value, {name: kind.arguments for name, kind in TRANSFORMS.items()})
  names = [name for name, *_ in entries]
  if {'flip', 'alternate_flip'} <= {*names}:
    raise UserError(f'{KEY} has flip and alternate_flip: both mirror images; name one of them')
  for name, *arguments in entries:
    if names.count(name) > 1:
      raise UserError(f'{KEY} has {name} {names.count(name)} times: name each transform once')
    if name == 'resized_crop' and arguments[0] > arguments[1]:
      raise UserError(f'{KEY}: areas of resized_crop must be the least, then the most: they are {arguments}')
  return entries


def check_size(entries: Sequence[Entry], image_shape: Sequence[int]) -> None:
  """Raise UserError if a shift can move an image by its whole side or more."""
  side = min(image_shape[:2])
  for name, *arguments in entries:
    if name == 'shift' and arguments[0] >= side:
      raise UserError(f"{KEY}: shift must be less than an image's side of {side} pixels: it is {arguments[0]}")


def transform(key: jax.Array, image: jax.Array, entries: Sequence[Entry], facts: Facts = NO_FACTS) -> jax.Array:
  """Transform an image.

  Geometric transforms come first, in the order of the entries. If they are only flips and shifts, the image is not
  resampled. Otherwise, their maps are composed, and the image is resampled once. Transforms that change colors or
  erase come second, also in the order of the entries.

  Args:
    key: random key of this image.
    image: uint8 [H, W, C].
    entries: the transforms, from `read_transforms`.
    facts: facts about this image.

  Returns:
    uint8 [H, W, C].
  """
  keys = dict(zip(TRANSFORMS, jax.random.split(key, len(TRANSFORMS)), strict=True))
  drawn = []
  for name, *arguments in entries:
    needed = (getattr(facts, need) for need in TRANSFORMS[name].needs)
    drawn.append((TRANSFORMS[name], (keys[name], *needed, *arguments)))
  if all(kind.exact or not kind.geometry for kind, _ in drawn):
    for kind, (key, *arguments) in drawn:
      image = kind.exact(key, image, *arguments) if kind.exact else image
  else:
    mapping = jnp.eye(2, 3)
    for kind, (key, *arguments) in drawn:
      if kind.geometry:
        mapping = geometry.compose(mapping, kind.geometry(key, image.shape[:2], *arguments))
    image = geometry.warp(image, mapping)
  for kind, (key, *arguments) in drawn:
    image = kind.pixels(key, image, *arguments) if kind.pixels else image
  return image
