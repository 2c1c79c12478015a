"""Mixtures of training images with others of their batch: mixup and CutMix."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hbf.data.augment.entries import Argument, Entry, read_entries
from hbf.errors import UserError

KEY = 'data.mix'


def mixup(key: jax.Array, size: tuple[int, int], share: jax.Array) -> jax.Array:
  """Return the same weight at every pixel, float32 [H, W] (Zhang et al. 2018)."""
  del key
  return jnp.full(size, share)


def cutmix(key: jax.Array, size: tuple[int, int], share: jax.Array) -> jax.Array:
  """Return 0 in a box with 1 − `share` of the image's area and its aspect, and 1 around it (Yun et al. 2019).

  The center of the box is any pixel. A box that reaches beyond the border is cut off there.
  """
  sides = jnp.array(size)
  half = (sides * jnp.sqrt(1 - share)).astype(jnp.int32) // 2
  center = jax.random.randint(key, (2,), 0, sides)
  rows, columns = (
    (jnp.arange(side) >= middle - by) & (jnp.arange(side) < middle + by)
    for side, middle, by in zip(size, center, half, strict=True)
  )
  return 1 - (rows[:, None] & columns).astype(jnp.float32)


# By name, what makes the weights of an image's own pixels from its share λ.
MIXES: dict[str, Callable[..., jax.Array]] = {'mixup': mixup, 'cutmix': cutmix}
_ARGUMENTS = (Argument('alpha', 0.01, math.inf), Argument('share'))


def read_mix(value: Any) -> tuple[Entry, ...]:
  """Read `data.mix`.

  Raises:
    UserError: it is wrong.
  """
  entries = read_entries(KEY, value, dict.fromkeys(MIXES, _ARGUMENTS))
  total = math.fsum(share for _, _, share in entries)
  if total > 1:
    raise UserError(f'{KEY}: the shares of the images that are mixed must sum to at most 1: they sum to {total:g}')
  return entries


def mix(
  key: jax.Array, images: jax.Array, targets: jax.Array, index: jax.Array, entries: Sequence[Entry]
) -> tuple[jax.Array, jax.Array]:
  """Mix images, and their targets likewise, each with one other of the batch.

  Random draws for example i depend on `key` and i only. The partner of an example is the next one in an order by
  random numbers; the partner of the last one is the first. So neither rows nor devices matter.

  Args:
    key: the key of this step.
    images: uint8 [B, H, W, C].
    targets: probabilities of the classes, float32 [B, classes].
    index: int32 [B], the number of each example in the data set.
    entries: the result of `read_mix`. A share of the images gets weight λ, drawn from Beta(alpha, alpha), and its
      partners get 1 − λ.

  Returns:
    float32 images, in 0 … 255, and targets.
  """
  if not entries:
    return images.astype(jnp.float32), targets
  size = (images.shape[1], images.shape[2])
  order_key, weights_key = jax.random.split(key)
  partner = partners(order_key, index)
  weights = jax.vmap(lambda number: _weights(jax.random.fold_in(weights_key, number), size, entries))(index)
  shares = weights.mean(axis=(1, 2))[:, None]
  weights = weights[..., None]
  mixed = weights * images + (1 - weights) * images[partner]
  return mixed, shares * targets + (1 - shares) * targets[partner]


def partners(key: jax.Array, index: jax.Array) -> jax.Array:
  """Return the row of each example's partner, int32 [B]. It is never the example's own row if there are two."""
  keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(index)
  numbers = jax.vmap(jax.random.bits)(keys)
  # The index decides between equal numbers.
  *_, order = jax.lax.sort((numbers, index, jnp.arange(len(index))), num_keys=2)
  return jnp.zeros_like(order).at[order].set(jnp.roll(order, -1))


def _weights(key: jax.Array, size: tuple[int, int], entries: Sequence[Entry]) -> jax.Array:
  """Return the weights of the pixels of one image, float32 [H, W]: 1 unless it is mixed."""
  which_key, *keys = jax.random.split(key, 1 + len(entries))
  drawn = jax.random.uniform(which_key)
  weights, begin = jnp.ones(size), 0.0
  for (name, alpha, share), key in zip(entries, keys, strict=True):
    share_key, box_key = jax.random.split(key)
    chosen = (begin <= drawn) & (drawn < begin + share)
    weights = jnp.where(chosen, MIXES[name](box_key, size, beta(share_key, alpha)), weights)
    begin += share
  return weights


def beta(key: jax.Array, alpha: float) -> jax.Array:
  """Draw from Beta(alpha, alpha).

  The draw is (1 + T/√(ν + T²))/2 of Student's T with ν = 2 alpha degrees of freedom, for which Bailey (1994) has a
  formula. `jax.random.beta` loops until all draws of the batch are accepted: it takes seconds to compile, and devices
  would wait for one another.
  """
  radius_key, angle_key = jax.random.split(key)
  log = jnp.log(jax.random.uniform(radius_key, minval=jnp.finfo(jnp.float32).tiny)) / alpha
  cosine = jnp.cos(jnp.pi * jax.random.uniform(angle_key))
  far = -jnp.expm1(log)
  return (1 + cosine * jnp.sqrt(far / (far * cosine**2 + jnp.exp(log)))) / 2
