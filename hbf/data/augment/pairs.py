"""Mixing training images with others of their batch: mixup and CutMix."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hbf.data.augment.entries import Argument, Entry, read_entries
from hbf.errors import UserError

KEY = 'data.mix'


def mixup(key: jax.Array, size: tuple[int, int], share: jax.Array) -> jax.Array:
  """The same weight at every pixel, float32 [H, W] (Zhang et al. 2018)."""
  del key
  return jnp.full(size, share)


def cutmix(key: jax.Array, size: tuple[int, int], share: jax.Array) -> jax.Array:
  """0 in a box of 1 − `share` of the image's area, of its aspect, and 1 around it (Yun et al. 2019).

  The box's center is any pixel, so that it may reach beyond the border, where it is cut off.
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
  """Reads `data.mix`.

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
  """Mixes images, and their targets likewise, each with one other of the batch.

  What is drawn for example i depends on `key` and i only; its partner is the next example in an order by random
  numbers, the last one's is the first. So neither rows nor devices matter.

  Args:
    key: of this step.
    images: uint8 [B, H, W, C].
    targets: probabilities of the classes, float32 [B, classes].
    index: int32 [B], which example of the data set each image is.
    entries: as `read_mix` gives them: for a share of the images, images weigh λ, drawn from Beta(alpha, alpha), and
      their partners 1 − λ.

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
  """The row of each example's partner, int32 [B]; never its own if there are two."""
  keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(index)
  numbers = jax.vmap(jax.random.bits)(keys)
  # The index decides between equal numbers.
  *_, order = jax.lax.sort((numbers, index, jnp.arange(len(index))), num_keys=2)
  return jnp.zeros_like(order).at[order].set(jnp.roll(order, -1))


def _weights(key: jax.Array, size: tuple[int, int], entries: Sequence[Entry]) -> jax.Array:
  """Weights of the pixels of one image, float32 [H, W]: 1 unless it is mixed."""
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
  """Draws from Beta(alpha, alpha).

  It is (1 + T/√(ν + T²))/2 of Student's T with ν = 2 alpha degrees of freedom, for which Bailey (1994) has a formula.
  (`jax.random.beta` loops until all of the batch's draws are accepted: seconds to compile, and devices would wait for
  one another.)
  """
  radius_key, angle_key = jax.random.split(key)
  log = jnp.log(jax.random.uniform(radius_key, minval=jnp.finfo(jnp.float32).tiny)) / alpha
  cosine = jnp.cos(jnp.pi * jax.random.uniform(angle_key))
  far = -jnp.expm1(log)
  return (1 + cosine * jnp.sqrt(far / (far * cosine**2 + jnp.exp(log)))) / 2
