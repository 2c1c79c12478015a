"""Augmentation of whole batches: pure functions from the stored bytes of images to the inputs of a network."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.augment.entries import Entry
from hbf.data.augment.transforms import NO_FACTS, Facts, transform


def normalize(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
  """Return (images / 255 − mean) / std, float32 [B, H, W, C].

  Args:
    images: in 0 … 255, [B, H, W, C].
    mean: of each channel, in units of 1 = white.
    std: of each channel, in the same units.
  """
  scaled = images.astype(jnp.float32) / 255
  return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def augment(
  key: jax.Array,
  images: jax.Array,
  index: jax.Array,
  transforms: Sequence[Entry],
  mean: Sequence[float] = (),
  fixed_key: jax.Array | None = None,
  epochs: jax.Array | None = None,
) -> jax.Array:
  """Transform images at random, see `hbf.data.augment.transforms.transform`.

  Example i draws from `fold_in(key, index[i])`, so with a key made from (seed, step) its augmentation is a function
  of (seed, step, index): neither its row in the batch nor the number of devices matters.

  Args:
    key: the key of this step.
    images: uint8 [B, H, W, C].
    index: int32 [B], which example of the data set each image is.
    transforms: as `hbf.data.augment.transforms.read_transforms` gives them.
    mean: of each channel, in units of 1 = white; () is middle gray.
    fixed_key: the key of the run, the same in every step; alternate_flip alone needs it.
    epochs: int32 [B], the epoch that shows each image; likewise.

  Returns:
    uint8 [B, H, W, C].
  """
  gray = np.round(255 * np.asarray(mean)).astype(np.uint8) if mean else NO_FACTS.mean

  def augment_one(image: jax.Array, number: jax.Array, epoch: jax.Array | None) -> jax.Array:
    fixed = None if fixed_key is None else jax.random.fold_in(fixed_key, number)
    return transform(jax.random.fold_in(key, number), image, transforms, Facts(gray, fixed, epoch))

  return jax.vmap(augment_one)(images, index, epochs)
