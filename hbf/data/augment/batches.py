"""Augmentation and normalization of a batch of images: pure functions that run inside jit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.augment.entries import Entry
from hbf.data.augment.transforms import NO_FACTS, Facts, transform


def normalize(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
  """Return (images / 255 − mean) / std, float32 [B, H, W, C].

  Args:
    images: levels 0 … 255, [B, H, W, C].
    mean: mean of each channel, on a scale from 0 (black) to 1 (white).
    std: standard deviation of each channel, on the same scale.
  """
  scaled = images.astype(jnp.float32) / 255
  return (scaled - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def renormalize(
  images: jax.Array, old: tuple[Sequence[float], Sequence[float]], new: tuple[Sequence[float], Sequence[float]]
) -> jax.Array:
  """Change the mean and the standard deviation that images [B, H, W, C] were normalized with.

  The teacher of a distillation gets the student's images this way, if the two have different means.

  Args:
    images: images from `normalize(…, *old)`.
    old: the mean and the standard deviation of each channel, as in `normalize`.
    new: another mean and standard deviation of each channel.

  Returns:
    The images that `normalize(…, *new)` would have returned.
  """
  (mean, std), (new_mean, new_std) = (np.asarray(pair, np.float32) for pair in (old, new))
  if np.array_equal(mean, new_mean) and np.array_equal(std, new_std):
    return images  # without rounding
  return images * (std / new_std) + (mean - new_mean) / new_std


def augment(
  key: jax.Array,
  images: jax.Array,
  index: jax.Array,
  transforms: Sequence[Entry],
  mean: Sequence[float] = (),
  fixed_key: jax.Array | None = None,
  epochs: jax.Array | None = None,
) -> jax.Array:
  """Transform images at random; see `hbf.data.augment.transforms.transform`.

  The random numbers of row i come from `fold_in(key, index[i])`. So the result for an example depends on the key and
  the example's index, not on its row in the batch or on the number of devices.

  Args:
    key: random key of the training step.
    images: uint8 [B, H, W, C].
    index: index of each image's example in the data set, int32 [B].
    transforms: the transforms, from `hbf.data.augment.transforms.read_transforms`.
    mean: mean of each channel, on a scale from 0 (black) to 1 (white). () stands for middle gray. Only `cutout` needs
      the mean.
    fixed_key: random key of the run, the same in every step. Only `alternate_flip` needs it.
    epochs: index of the epoch of each image, int32 [B]. Only `alternate_flip` needs it.

  Returns:
    uint8 [B, H, W, C].
  """
  gray = np.round(255 * np.asarray(mean)).astype(np.uint8) if mean else NO_FACTS.mean

  def augment_one(image: jax.Array, number: jax.Array, epoch: jax.Array | None) -> jax.Array:
    fixed = None if fixed_key is None else jax.random.fold_in(fixed_key, number)
    return transform(jax.random.fold_in(key, number), image, transforms, Facts(gray, fixed, epoch))

  return jax.vmap(augment_one)(images, index, epochs)
