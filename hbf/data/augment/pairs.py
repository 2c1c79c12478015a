"""Mixup and CutMix: mixtures of two training images of a batch.

Each pixel of a mixed image is w times the image's own pixel plus 1 − w times the same pixel of its partner, another
image of the batch. Mixup has the same random weight w = λ for all pixels. CutMix has w = 0 in a box, which shows the
partner, and w = 1 around it. The box has 1 − λ of the image's area, before the image's border clips it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hbf.data.augment.entries import Argument, Entry, read_entries
from hbf.errors import UserError

KEY = 'data.mix'


def mixup(key: jax.Array, size: tuple[int, int], lam: jax.Array) -> jax.Array:
  """Return the weights of an image's own pixels in a mixture, float32 [H, W]: all are `lam` (Zhang et al. 2018).

  The argument `key` is not used.
  """
  del key
  return jnp.full(size, lam)


def cutmix(key: jax.Array, size: tuple[int, int], lam: jax.Array) -> jax.Array:
  """Return the weights of an image's own pixels in a mixture, float32 [H, W]: 0 in a box, else 1 (Yun et al. 2019).

  The box is a copy of the image's outline, scaled by √(1 − `lam`). Its center is a random pixel. The image's border
  clips the box.
  """
  sides = jnp.array(size)
  half = (sides * jnp.sqrt(1 - lam)).astype(jnp.int32) // 2
  center = jax.random.randint(key, (2,), 0, sides)
  rows, columns = (
    (jnp.arange(side) >= middle - by) & (jnp.arange(side) < middle + by)
    for side, middle, by in zip(size, center, half, strict=True)
  )
  return 1 - (rows[:, None] & columns).astype(jnp.float32)


# The functions by name. A function computes the weights w from λ.
MIXES: dict[str, Callable[..., jax.Array]] = {'mixup': mixup, 'cutmix': cutmix}
_ARGUMENTS = (Argument('alpha', 0.01, math.inf), Argument('share'))


def read_mix(value: Any) -> tuple[Entry, ...]:
  """Check the config's `data.mix`, and return its entries (name, alpha, share).

  An entry mixes the fraction `share` of the images by the function `MIXES[name]`. Each of these images gets its own
  random λ, `lam`, from the distribution Beta(alpha, alpha).

  Raises:
    UserError: the value is wrong.
  """
  entries = read_entries(KEY, value, dict.fromkeys(MIXES, _ARGUMENTS))
  total = math.fsum(share for _, _, share in entries)
  if total > 1:
    raise UserError(f'{KEY}: the shares of mixed images must sum to at most 1: they sum to {total:g}')
  return entries


def mix(
  key: jax.Array, images: jax.Array, targets: jax.Array, index: jax.Array, entries: Sequence[Entry]
) -> tuple[jax.Array, jax.Array]:
  """Mix a random part of the images, and their targets, with those of partners in the batch.

  The random numbers of an example depend only on `key` and on the example's index. One of them is a sort key. The
  partner of an example is the next example in the sorted batch, and the partner of the last example is the first. So
  the result does not depend on the order of the rows or on the number of devices.

  Args:
    key: random key of the training step.
    images: uint8 [B, H, W, C].
    targets: targets of the loss, float32 [B, K], such as the probabilities of K classes.
    index: index of each image's example in the data set, int32 [B].
    entries: the kinds of mixtures, from `read_mix`.

  Returns:
    The mixed images, float32 [B, H, W, C] from 0 to 255, and the mixed targets, float32 [B, K].
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
  """Return for each example the row of the partner that it is mixed with, int32 [B]; see `mix`.

  In a batch of two or more, no example is its own partner.
  """
  keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(index)
  numbers = jax.vmap(jax.random.bits)(keys)
  # If two numbers are equal, the index decides.
  *_, order = jax.lax.sort((numbers, index, jnp.arange(len(index))), num_keys=2)
  return jnp.zeros_like(order).at[order].set(jnp.roll(order, -1))


def _weights(key: jax.Array, size: tuple[int, int], entries: Sequence[Entry]) -> jax.Array:
  """Draw one of the `entries`, or none, and return the weights of one image's own pixels, float32 [H, W].

  Without an entry, the image is not mixed, and all weights are 1.
  """
  which_key, *keys = jax.random.split(key, 1 + len(entries))
  drawn = jax.random.uniform(which_key)
  weights, begin = jnp.ones(size), 0.0
  for (name, alpha, share), key in zip(entries, keys, strict=True):
    lam_key, box_key = jax.random.split(key)
    chosen = (begin <= drawn) & (drawn < begin + share)
    weights = jnp.where(chosen, MIXES[name](box_key, size, beta(lam_key, alpha)), weights)
    begin += share
  return weights


def beta(key: jax.Array, alpha: float) -> jax.Array:
  """Draw a number from Beta(alpha, alpha) by a formula, without the slow loop of `jax.random.beta`."""
  # The number is (1 + T/√(ν + T²))/2, where T has Student's distribution with ν = 2 alpha degrees of freedom. Bailey
  # (1994) gives a formula for T. `jax.random.beta` loops until all draws of the batch are accepted. Such a loop is
  # slow to compile, and devices would wait for one another.
  radius_key, angle_key = jax.random.split(key)
  log = jnp.log(jax.random.uniform(radius_key, minval=jnp.finfo(jnp.float32).tiny)) / alpha
  cosine = jnp.cos(jnp.pi * jax.random.uniform(angle_key))
  far = -jnp.expm1(log)
  return (1 + cosine * jnp.sqrt(far / (far * cosine**2 + jnp.exp(log)))) / 2
