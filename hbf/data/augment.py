"""Augmentation and normalisation of uint8 images: pure functions, made to run inside jit."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def normalise(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
  """Returns (images / 255 − mean) / std, float32 [B, H, W, C].

  Args:
    images: uint8 [B, H, W, C].
    mean: of each channel, in units of 1 = white.
    std: of each channel, in the same units.
  """
  scaled = images.astype(jnp.float32) / 255
  return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def augment(key: jax.Array, images: jax.Array, index: jax.Array, *, flip: bool, crop: int) -> jax.Array:
  """Flips and shifts images at random.

  Example i draws from `fold_in(key, index[i])`, so with a key made from (seed, step) its augmentation is a function
  of (seed, step, index): neither its row in the batch nor the number of devices matters.

  Args:
    key: the key of this step.
    images: uint8 [B, H, W, C].
    index: int32 [B], which example of the data set each image is.
    flip: mirror left to right with probability 1/2.
    crop: pad by this many black pixels on each side and cut an image of the old size out at random; 0: don't.

  Returns:
    uint8 [B, H, W, C].
  """

  def augment_one(image: jax.Array, number: jax.Array) -> jax.Array:
    flip_key, crop_key = jax.random.split(jax.random.fold_in(key, number))
    if flip:
      image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
    if crop:
      image = _shift(crop_key, image, crop)
    return image

  return jax.vmap(augment_one)(images, index)


def _shift(key: jax.Array, image: jax.Array, most: int) -> jax.Array:
  """Moves an image [H, W, C] by −most … most pixels each way, drawn evenly; zeros move in."""
  padded = jnp.pad(image, ((most, most), (most, most), (0, 0)))
  corner = jax.random.randint(key, (2,), 0, 2 * most + 1)
  cut = functools.partial(_cut, shape=image.shape)
  # Of a slice that begins elsewhere in every image a TPU's compiler makes a loop over the images.
  return jax.lax.platform_dependent(padded, corner, tpu=functools.partial(_choose, most=most), default=cut)


def _cut(padded: jax.Array, corner: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return jax.lax.dynamic_slice(padded, (*corner, 0), shape)


def _choose(padded: jax.Array, corner: jax.Array, most: int) -> jax.Array:
  """`_cut` as a choice among all places where the slice may begin, one axis after the other."""
  for axis in range(2):
    length = padded.shape[axis] - 2 * most
    cuts = (jax.lax.slice_in_dim(padded, i, i + length, axis=axis) for i in range(2 * most + 1))
    padded = jax.lax.select_n(corner[axis], *cuts)
  return padded
