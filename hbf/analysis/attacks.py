"""Attacks on a classifier: small changes of an image's pixels that change the answer.

Pixels are on a scale from 0 (black) to 1 (white). A changed pixel differs from the given one by at most ε, and stays
from 0 to 1. A query is one run of the network on a changed image. An image is fooled once an answer to it is wrong.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.evaluation.batches import in_batches

# Logits [B, classes] from images [B, H, W, C] with pixels from 0 to 1.
Logits = Callable[[jax.Array], jax.Array]

PART = 5  # steps after which images that are fooled are left out
BATCH = 50  # images
MOMENTUM, RISES = 0.75, 0.75  # α and ρ of APGD
FIRST_SHARE = 0.8  # share of an image's pixels in the first square (Croce & Hein 2020)
# Steps of 10,000 after which the square's area is halved (Andriushchenko et al. 2020).
HALVED = (10, 50, 200, 1_000, 2_000, 4_000, 6_000, 8_000)


class Attacked(NamedTuple):
  """Result of an attack on n images.

  Attributes:
    images: a changed image for each given image, float32 [n, H, W, C]. It is the first one with a wrong answer. If
      all answers were right, it is the one with the greatest loss (APGD) or the smallest margin (Square Attack). The
      margin is the true class's logit minus the greatest other logit.
    fooled: True if the answer to the changed image is wrong, bool [n].
    queries: number of changed images that were tried for each image, int [n]. The count ends when the image is
      fooled. The given image itself is not counted.
  """

  images: np.ndarray
  fooled: np.ndarray
  queries: np.ndarray


def apgd(
  logits: Logits, images: np.ndarray, labels: np.ndarray, epsilon: float, steps: int = 100, seed: int = 0
) -> Attacked:
  """Attack images by Auto-PGD with the cross-entropy loss (APGD-CE, Croce & Hein 2020, algorithm 1).

  A step follows the sign of the loss's gradient and has momentum 0.75. The step size starts at 2ε. Some steps are
  checkpoints. At a checkpoint, the step size is halved if the loss rose in fewer than 75% of the steps since the last
  checkpoint. It is also halved if the greatest loss has not risen since the last checkpoint, unless the step size was
  halved there. After a halving, the attack goes on from the image with the greatest loss so far. The start is a
  random image within ε of the given one. An image gets no more steps once it is fooled.

  Args:
    logits: the classifier, a function from images to logits. JAX compiles the attack once for each function object.
    images: [n, H, W, C], pixels from 0 to 1.
    labels: the true classes, int [n]. An image whose answer is wrong before the attack counts as fooled.
    epsilon: ε, the greatest change of a pixel.
    steps: number of steps.
    seed: seed of the starts.
  """
  return _attack(functools.partial(_advance_apgd, logits), _start_apgd, logits, images, labels, epsilon, steps, seed)


def square(
  logits: Logits, images: np.ndarray, labels: np.ndarray, epsilon: float, steps: int = 1_000, seed: int = 0
) -> Attacked:
  """Attack images by random squares, without gradients (Square Attack, Andriushchenko et al. 2020, algorithm 1).

  The start adds ε or −ε to every column of every channel at random. A step replaces a random square of the changed
  image by the given pixels plus ε or −ε, with a random sign for each channel. The step is kept if it makes the margin
  smaller. The margin is the true class's logit minus the greatest other logit. The first square has 80% of the
  image's area. `HALVED` lists the steps at which this area is halved if there are 10,000 steps. For another number of
  steps, the list is scaled in proportion.

  The arguments are those of `apgd`. `steps` is the greatest number of queries for an image.
  """
  return _attack(
    functools.partial(_advance_square, logits), _start_square, logits, images, labels, epsilon, steps, seed
  )


def checkpoints(steps: int) -> np.ndarray:
  """Return the steps after which APGD may halve its step size, int [m]. Steps are counted from 1 to `steps`.

  They are w_j = ⌈p_j · steps⌉ for j = 1, 2, …, where p_0 = 0, p_1 = 0.22 and
  p_{j+1} = p_j + max(p_j − p_{j−1} − 0.03, 0.06).
  """
  shares = [0.0, 0.22]
  while shares[-1] < 1:
    shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
  found = np.unique(np.ceil(np.round(np.array(shares[1:]) * steps, 6)).astype(int))
  return found[found <= steps]


def side_of_square(step: int | jax.Array, steps: int | jax.Array, pixels: int) -> jax.Array:
  """Return the side of the square at a step of the Square Attack, in pixels.

  Args:
    step: the step, from 0.
    steps: number of all steps.
    pixels: number of pixels of the image.
  """
  halvings = jnp.sum(step * 10_000 / steps >= jnp.asarray(HALVED))
  return jnp.maximum(1, jnp.round(jnp.sqrt(FIRST_SHARE * 0.5**halvings * pixels))).astype(int)


class _State(NamedTuple):
  """State of an attack on B images.

  Attributes:
    image: the given images, [B, H, W, C].
    label: the true classes, [B].
    key: a random key for each image.
    changed: `Attacked.images` after the queries so far, [B, H, W, C].
    fooled: True if the answer to the changed image is wrong, [B].
    queries: number of queries so far, [B].
    own: further arrays [B, …] that only APGD or only the Square Attack has.
  """

  image: Any
  label: Any
  key: Any
  changed: Any
  fooled: Any
  queries: Any
  own: Any


class _Climb(NamedTuple):
  """The arrays that only APGD has (`_State.own`).

  A checkpoint is a step after which APGD may halve its step size (`checkpoints`).

  Attributes:
    x: the changed images, [B, H, W, C].
    before: the changed images one step before.
    gradient: the gradient of the loss at x.
    loss: the loss at x, [B].
    best: the changed images with the greatest loss so far.
    best_gradient: the gradient at these images.
    best_loss: the loss at these images, [B].
    size: the step size, [B].
    rises: number of steps since the last checkpoint in which the loss rose, [B].
    at_check: `best_loss` at the last checkpoint.
    halved: True if the step size was halved at the last checkpoint, [B].
  """

  x: Any
  before: Any
  gradient: Any
  loss: Any
  best: Any
  best_gradient: Any
  best_loss: Any
  size: Any
  rises: Any
  at_check: Any
  halved: Any


def _attack(
  advance: Any,
  start: Any,
  logits: Logits,
  images: np.ndarray,
  labels: np.ndarray,
  epsilon: float,
  steps: int,
  seed: int,
) -> Attacked:
  """Attack the images. After every `PART` steps, leave out the images that are fooled.

  `start` makes the first changed images, and `advance` applies steps.
  """
  keys = np.asarray(jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(seed), jnp.arange(len(images))))
  images, labels = images.astype(np.float32), labels.astype(np.int32)

  def begin(rows: np.ndarray) -> _State:
    return _begin(start, logits, images[rows], labels[rows], keys[rows], epsilon)

  state = in_batches(begin, np.arange(len(images)), BATCH)
  for first in range(0, steps, PART):
    left = np.flatnonzero(~state.fooled)
    if len(left):
      steps_of_part = (first, min(first + PART, steps), steps)
      go_on = functools.partial(_go_on, advance, state, epsilon, steps_of_part)
      part = in_batches(go_on, left, BATCH)
      state = jax.tree.map(functools.partial(_with_rows, left), state, part)
  return Attacked(state.changed, state.fooled, state.queries)


def _go_on(advance: Any, state: _State, epsilon: float, steps: tuple[int, int, int], rows: np.ndarray) -> _State:
  """Apply steps of an attack to some of the images, and return the new state of these images.

  Args:
    advance: the function that applies steps.
    state: the state of all images.
    epsilon: the greatest change of a pixel.
    steps: the first step, the last step plus 1, and the number of all steps of the attack.
    rows: the indices of the images.
  """
  return advance(jax.tree.map(lambda z: z[rows], state), epsilon, *steps)


def _with_rows(rows: np.ndarray, whole: np.ndarray, new: np.ndarray) -> np.ndarray:
  whole = np.array(whole)
  whole[rows] = new
  return whole


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(start: Any, logits: Logits, images: Any, labels: Any, keys: Any, epsilon: Any) -> _State:
  """Return the state after the first query, for the changed images that `start` makes."""
  wrong = logits(images).argmax(axis=-1) != labels
  x, own, outputs = start(logits, images, labels, keys, epsilon)
  fooled = outputs.argmax(axis=-1) != labels
  changed = jnp.where(_each(wrong, images), images, x)
  return _State(images, labels, keys, changed, wrong | fooled, jnp.where(wrong, 0, 1), own)


def _each(values: jax.Array, images: jax.Array) -> jax.Array:
  """Reshape values [B] to [B, 1, …], so that they broadcast over images [B, …]."""
  return values.reshape(-1, *[1] * (images.ndim - 1))


def _within(x: jax.Array, images: jax.Array, epsilon: Any) -> jax.Array:
  """Clip the pixels of changed images x to within ε of the given images' pixels, and to 0 … 1."""
  return jnp.clip(jnp.clip(x, images - epsilon, images + epsilon), 0, 1)


def _after_query(state: _State, x: jax.Array, outputs: jax.Array, best: jax.Array, own: Any) -> _State:
  """Return the state after one query with the images x. Images that were fooled before keep their state.

  Args:
    state: the state before.
    x: the images of this query.
    outputs: their logits.
    best: the best images so far: those with the greatest loss (APGD) or the smallest margin (Square Attack).
    own: the new arrays `_State.own`.
  """
  wrong = outputs.argmax(axis=-1) != state.label
  now = jnp.where(_each(wrong, x), x, best)
  changed = jnp.where(_each(state.fooled, x), state.changed, now)
  return state._replace(changed=changed, fooled=state.fooled | wrong, queries=state.queries + ~state.fooled, own=own)


def _loss_and_gradient(logits: Logits, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return the cross-entropy of each image, the logits, and the gradient of the loss with respect to the images."""

  def total(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    outputs = logits(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    return losses.sum(), (losses, outputs)

  gradient, (losses, outputs) = jax.grad(total, has_aux=True)(x)
  return losses, outputs, gradient


def _start_apgd(logits: Logits, images: Any, labels: Any, keys: Any, epsilon: Any) -> tuple[Any, _Climb, Any]:
  noise = jax.vmap(lambda key: jax.random.uniform(key, images.shape[1:], minval=-1, maxval=1))(keys)
  x = _within(images + epsilon * noise, images, epsilon)
  loss, outputs, gradient = _loss_and_gradient(logits, x, labels)
  size, rises = jnp.full(len(x), 2.0 * epsilon), jnp.zeros(len(x), int)
  return x, _Climb(x, x, gradient, loss, x, gradient, loss, size, rises, loss, rises > 0), outputs


@functools.partial(jax.jit, static_argnums=(0, 5))
def _advance_apgd(logits: Logits, state: _State, epsilon: Any, first: Any, last: Any, steps: int) -> _State:
  """Apply the steps first, …, last − 1 of an APGD attack with `steps` steps in all."""
  checks = checkpoints(steps)
  lengths = np.zeros(steps + 1, np.int32)  # number of steps since the last checkpoint, at the checkpoints
  lengths[checks] = np.diff(checks, prepend=0)

  def step(i: jax.Array, state: _State) -> _State:
    own, images = state.own, state.image
    ahead = _within(own.x + _each(own.size, images) * jnp.sign(own.gradient), images, epsilon)
    share = jnp.where(i == 0, 1.0, MOMENTUM)
    x = _within(own.x + share * (ahead - own.x) + (1 - share) * (own.x - own.before), images, epsilon)
    loss, outputs, gradient = _loss_and_gradient(logits, x, state.label)
    better = loss > own.best_loss
    climbed = own._replace(
      x=x,
      before=own.x,
      gradient=gradient,
      loss=loss,
      best=jnp.where(_each(better, x), x, own.best),
      best_gradient=jnp.where(_each(better, x), gradient, own.best_gradient),
      best_loss=jnp.maximum(loss, own.best_loss),
      rises=own.rises + (loss > own.loss),
    )
    return _after_query(state, x, outputs, climbed.best, _checked(climbed, jnp.asarray(lengths)[i + 1]))

  return jax.lax.fori_loop(first, last, step, state)


def _checked(own: _Climb, length: jax.Array) -> _Climb:
  """Return the arrays of APGD after a step. If the step is a checkpoint, halve step sizes as in `apgd`.

  `length` is the number of steps since the last checkpoint if this step is a checkpoint, else 0.
  """
  few = own.rises < RISES * length
  stuck = ~own.halved & (own.at_check == own.best_loss)
  halve = (few | stuck) & (length > 0)
  image = _each(halve, own.x)
  return own._replace(
    x=jnp.where(image, own.best, own.x),
    gradient=jnp.where(image, own.best_gradient, own.gradient),
    loss=jnp.where(halve, own.best_loss, own.loss),
    size=jnp.where(halve, own.size / 2, own.size),
    rises=jnp.where(length > 0, 0, own.rises),
    at_check=jnp.where(length > 0, own.best_loss, own.at_check),
    halved=jnp.where(length > 0, halve, own.halved),
  )


def _margin(outputs: jax.Array, labels: jax.Array) -> jax.Array:
  """Return the true class's logit minus the greatest other logit, [B]."""
  true = jax.nn.one_hot(labels, outputs.shape[-1], dtype=bool)
  others = jnp.max(outputs, axis=-1, where=~true, initial=-jnp.inf)
  return jnp.sum(outputs, axis=-1, where=true) - others


def _start_square(logits: Logits, images: Any, labels: Any, keys: Any, epsilon: Any) -> tuple[Any, Any, Any]:
  columns = (1, *images.shape[2:])
  signs = jax.vmap(lambda key: jax.random.rademacher(jax.random.fold_in(key, 0), columns, images.dtype))(keys)
  x = _within(images + epsilon * signs, images, epsilon)
  outputs = logits(x)
  return x, (x, _margin(outputs, labels)), outputs


@functools.partial(jax.jit, static_argnums=0)
def _advance_square(logits: Logits, state: _State, epsilon: Any, first: Any, last: Any, steps: Any) -> _State:
  """Apply the steps first, …, last − 1 of a Square Attack with `steps` steps in all.

  Step 0 is left out: `_begin` has already made its query.
  """
  height, width, channels = state.image.shape[1:]

  def propose(key: jax.Array, image: jax.Array, best: jax.Array, side: jax.Array) -> jax.Array:
    place, colors = jax.random.split(key)
    top, left = jax.random.randint(place, (2,), 0, jnp.array([height, width]) - jnp.minimum(side, height) + 1)
    rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
    inside = (rows >= top) & (rows < top + side) & (columns >= left) & (columns < left + side)
    signs = jax.random.rademacher(colors, (channels,), image.dtype)
    return jnp.where(inside[..., None], _within(image + epsilon * signs, image, epsilon), best)

  def step(i: jax.Array, state: _State) -> _State:
    best, margin = state.own
    side = side_of_square(i, steps, height * width)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.key, i)
    x = jax.vmap(propose, (0, 0, 0, None))(keys, state.image, best, side)
    outputs = logits(x)
    now = _margin(outputs, state.label)
    best = jnp.where(_each(now < margin, x), x, best)
    return _after_query(state, x, outputs, best, (best, jnp.minimum(now, margin)))

  return jax.lax.fori_loop(jnp.maximum(first, 1), last, step, state)
