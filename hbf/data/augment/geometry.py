"""Geometric transforms. They are affine maps, which are composed into one map, so that an image is resampled once.

A position is (x, y) in pixels from the top left corner. The pixel in column j and row i has its center at
(j + ½, i + ½). A map is a matrix, float32 [2, 3]. For a position (x, y) in the new image, map · (x, y, 1) is the
position in the original image.
"""

import functools

import jax
import jax.numpy as jnp

from hbf.data.pipeline.memory import keep

Size = tuple[int, int]  # height, width

ASPECTS = (3 / 4, 4 / 3)  # range of a crop's width over its height (Szegedy et al. 2015)


def compose(first: jax.Array, second: jax.Array) -> jax.Array:
  """Return the affine map [2, 3] that applies the map `first` to an image and then the map `second`."""
  # Some devices round the factors of a matrix product to bfloat16, so this is a sum.
  return jnp.sum(first[:, :2, None] * second, axis=1) + first * jnp.array([0.0, 0.0, 1.0])


def affine(linear: jax.Array, offset: jax.Array) -> jax.Array:
  """Return the affine map x → `linear` · x + `offset` as a matrix [2, 3]."""
  return jnp.concatenate([linear, offset[:, None]], axis=1)


def flip(key: jax.Array, size: Size, rate: float) -> jax.Array:
  """Return an affine map [2, 3] that mirrors left to right with probability `rate`, and else changes nothing."""
  return _mirror_if(jax.random.bernoulli(key, rate), size)


def flip_exactly(key: jax.Array, image: jax.Array, rate: float) -> jax.Array:
  """Mirror an image, without resampling, if the map `flip(key, size, rate)` mirrors it."""
  return jnp.where(jax.random.bernoulli(key, rate), image[:, ::-1], image)


def flip_alternately(key: jax.Array, size: Size, fixed_key: jax.Array, epoch: jax.Array) -> jax.Array:
  """Return an affine map [2, 3] that mirrors left to right in every other epoch (Jordan 2024).

  The random key `fixed_key` of the example is the same in all epochs. It decides if the image is mirrored in the even
  or in the odd epochs. The argument `key` is not used.
  """
  del key
  return _mirror_if(_is_mirrored(fixed_key, epoch), size)


def flip_alternately_exactly(key: jax.Array, image: jax.Array, fixed_key: jax.Array, epoch: jax.Array) -> jax.Array:
  """Mirror an image, without resampling, if the map of `flip_alternately` for the same arguments mirrors it."""
  del key
  return jnp.where(_is_mirrored(fixed_key, epoch), image[:, ::-1], image)


def _is_mirrored(fixed_key: jax.Array, epoch: jax.Array) -> jax.Array:
  return jax.random.bernoulli(fixed_key) ^ (epoch % 2 == 1)


def _mirror_if(condition: jax.Array, size: Size) -> jax.Array:
  mirror = jnp.array([[-1.0, 0.0, size[1]], [0.0, 1.0, 0.0]])
  return jnp.where(condition, mirror, jnp.eye(2, 3))


def shift(key: jax.Array, size: Size, most: int) -> jax.Array:
  """Return an affine map [2, 3] that moves an image by random whole pixels, −most … most on each axis."""
  return affine(jnp.eye(2), (_corner(key, most)[::-1] - most).astype(jnp.float32))


def shift_exactly(key: jax.Array, image: jax.Array, most: int) -> jax.Array:
  """Move an image, without resampling, as the map `shift(key, size, most)` moves it."""
  padded = jnp.pad(image, ((most, most), (most, most), (0, 0)))  # The result is a slice of it.
  dynamic_slice = functools.partial(_slice_dynamically, shape=image.shape)
  # Every image has its own corner of the slice. For dynamic slices a TPU's compiler makes a loop over the images.
  select = functools.partial(_slice_by_selection, most=most)
  return jax.lax.platform_dependent(padded, _corner(key, most), tpu=select, default=dynamic_slice)


def _corner(key: jax.Array, most: int) -> jax.Array:
  return jax.random.randint(key, (2,), 0, 2 * most + 1)


def _slice_dynamically(padded: jax.Array, corner: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return jax.lax.dynamic_slice(padded, (*corner, 0), shape)


def _slice_by_selection(padded: jax.Array, corner: jax.Array, most: int) -> jax.Array:
  for axis in range(2):
    length = padded.shape[axis] - 2 * most
    cuts = (jax.lax.slice_in_dim(padded, i, i + length, axis=axis) for i in range(2 * most + 1))
    padded = jax.lax.select_n(corner[axis], *cuts)
  return padded


def resized_crop(key: jax.Array, size: Size, least: float, most: float) -> jax.Array:
  """Return an affine map [2, 3] that cuts out a random box and resizes it to the image's size.

  The area of the box, divided by the area of the image, is uniform in `least` … `most`. The ratio of width to height
  is in the range `ASPECTS` if such a box fits into the image; see `draw_box`.
  """
  corner, box = draw_box(key, size, (least, most), ASPECTS)
  return affine(jnp.diag(box / jnp.array(size[::-1])), corner)


def draw_box(
  key: jax.Array, size: Size, areas: tuple[float, float], aspects: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
  """Draw a box within an image, at a uniform position.

  The area of the box is uniform in the range `areas`. The aspect of the box, its width divided by its height, is in
  the range `aspects`. Within the part of this range for which a box of the drawn area fits into the image, the
  logarithm of the aspect is uniform. If no aspect of the range fits, the box gets the nearest aspect that fits.

  Args:
    key: random key.
    size: height and width of the image.
    areas: smallest and largest area of the box, divided by the area of the image.
    aspects: smallest and largest aspect.

  Returns:
    The top left corner and the size of the box, float32 [2] each, x first.
  """
  # Common code instead draws area and aspect again if the box does not fit, so that large areas become rarer.
  height, width = size
  area_key, aspect_key, corner_key = jax.random.split(key, 3)
  area = height * width * jax.random.uniform(area_key, minval=areas[0], maxval=areas[1])
  low, high = (jnp.log(jnp.clip(aspect, area / height**2, width**2 / area)) for aspect in aspects)
  aspect = jnp.exp(low + (high - low) * jax.random.uniform(aspect_key))
  most = jnp.array([width, height], jnp.float32)
  box = jnp.minimum(jnp.sqrt(area * jnp.stack([aspect, 1 / aspect])), most)
  return (most - box) * jax.random.uniform(corner_key, (2,)), box


def inside(positions: jax.Array, corner: jax.Array, box: jax.Array) -> jax.Array:
  """Return booleans [...], True for positions [..., 2] in the box of size `box` with the top left corner `corner`."""
  return jnp.all((positions >= corner) & (positions < corner + box), axis=-1)


def centers(size: Size) -> jax.Array:
  """Return the positions (x, y) of the pixels' centers, in pixels, float32 [height, width, 2]."""
  rows, columns = jnp.meshgrid(jnp.arange(size[0]), jnp.arange(size[1]), indexing='ij')
  return jnp.stack([columns, rows], axis=-1) + jnp.float32(0.5)


def warp(image: jax.Array, mapping: jax.Array) -> jax.Array:
  """Resample an image under an affine map, bilinearly.

  Positions outside the original image are black. Between its edge and the centers of its outermost pixels, the levels
  of these pixels are used. Pillow's `Image.transform` has the same rules.

  Args:
    image: the original image, uint8 [H, W, C].
    mapping: the map from positions in the new image to positions in the original image, float32 [2, 3].

  Returns:
    The new image, uint8 [H, W, C], rounded to the nearest integer.
  """
  height, width, channels = image.shape
  shown = centers((height, width))
  source = jnp.sum(mapping[:, :2] * shown[..., None, :], axis=-1) + mapping[:, 2]
  is_inside = inside(source, jnp.zeros(2), jnp.array([width, height]))
  before = jnp.floor(source - 0.5)
  share = source - 0.5 - before
  pixels = image.reshape(-1, channels)

  def row(step: int) -> jax.Array:
    y = jnp.clip(before[..., 1].astype(jnp.int32) + step, 0, height - 1)
    x = [jnp.clip(before[..., 0].astype(jnp.int32) + step, 0, width - 1) for step in (0, 1)]
    left, right = (pixels.at[y * width + z].get(mode='promise_in_bounds').astype(jnp.float32) for z in x)
    return left + share[..., :1] * (right - left)

  top, bottom = row(0), row(1)
  mixed = top + share[..., 1:] * (bottom - top)
  return keep(jnp.where(is_inside[..., None], jnp.floor(mixed + 0.5), 0.0).astype(jnp.uint8))
