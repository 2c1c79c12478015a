"""Relevance of patches and of centers for the answer to an image.

The patches of an image form a grid of rows and columns. The excess logit of a class is its logit minus the mean of
all logits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.unit_params import directions, silence
from hbf.errors import UserError

# A function from images uint8 [n, height, width, channels] to probabilities [n, classes].
Answers = Callable[[np.ndarray], np.ndarray]
STEPS = 16  # most steps of a curve of removals
TOGETHER = 3_000  # most images with a painted patch that are in memory at a time
DRAWS = 3  # number of random orders


def probabilities(logits: np.ndarray) -> np.ndarray:
  """Compute the softmax of logits [n, classes] in float64."""
  z = logits.astype(np.float64)
  e = np.exp(z - z.max(axis=1, keepdims=True))
  return e / e.sum(axis=1, keepdims=True)


def paint_over(images: np.ndarray, patch: int, gone: np.ndarray, fill: Sequence[int]) -> np.ndarray:
  """Return the images with some patches replaced by one color.

  Args:
    images: uint8 [n, height, width, channels].
    patch: side of a patch in pixels.
    gone: True for the patches to replace, bool [n, rows · columns].
    fill: the color, a value from 0 to 255 for each channel.
  """
  rows, columns = images.shape[1] // patch, images.shape[2] // patch
  pixels = gone.reshape(-1, rows, columns).repeat(patch, axis=1).repeat(patch, axis=2)[..., None]
  return np.where(pixels, np.asarray(fill, np.uint8), images)


def relevance(answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int]) -> np.ndarray:
  """Return, for each patch, the decrease of the answer's probability if only this patch is painted over.

  The result is an array [n, rows · columns]. The answer is the likeliest class for the whole image.

  Args:
    answers: the model, as a function from images to probabilities.
    images: uint8 [n, height, width, channels].
    patch: side of a patch in pixels.
    fill: the color that replaces a patch, a value from 0 to 255 for each channel.
  """
  patches = images.shape[1] // patch * (images.shape[2] // patch)
  size = max(1, TOGETHER // patches)
  parts = (images[start : start + size] for start in range(0, len(images), size))
  return np.concatenate([_relevance(answers, part, patch, fill, patches) for part in parts])


def _relevance(answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int], patches: int) -> np.ndarray:
  whole = answers(images)
  answer = whole.argmax(axis=1)
  each = np.tile(np.eye(patches, dtype=bool), (len(images), 1))
  left = answers(paint_over(images.repeat(patches, axis=0), patch, each, fill))
  remaining = np.take_along_axis(left, answer.repeat(patches)[:, None], axis=1).reshape(len(images), patches)
  return np.take_along_axis(whole, answer[:, None], axis=1) - remaining


def deletion(
  answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int], order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Compute the probability of the answer while more and more patches are removed (Petsiuk et al. 2018).

  Args:
    answers: the model, as a function from images to probabilities.
    images: uint8 [n, height, width, channels].
    patch: side of a patch in pixels.
    fill: the color that replaces a removed patch.
    order: the indices of each image's patches in the order in which they are removed, int [n, rows · columns].

  Returns:
    The fraction of removed patches at each of S points, from 0 to 1, [S], and the probability of the answer at each
    point, [n, S]. The answer is the likeliest class for the whole image. The mean probability over the points is
    taken as the area under the curve. A better order has a smaller area.
  """
  count = order.shape[1]
  numbers = removed_counts(count)
  rank = np.argsort(order, axis=1)
  answer = answers(images).argmax(axis=1)
  left = [answers(paint_over(images, patch, rank < number, fill)) for number in numbers]
  return numbers / count, np.stack([p[np.arange(len(images)), answer] for p in left], axis=1)


def removed_counts(count: int) -> np.ndarray:
  """Return the number of removed patches or units at each of the S points of a curve such as `deletion`'s, int [S].

  The numbers are evenly spaced from 0 to `count`, the number of all patches or units.
  """
  return np.unique(np.linspace(0, count, min(count, STEPS) + 1).round().astype(int))


def random_orders(count: int, parts: int) -> list[np.ndarray]:
  """Draw `DRAWS` arrays, int [count, parts]. Each row is a random order of the parts of one of `count` images.

  The parts are the patches of the image, or the units of the last block. Their removal in a random order is a control
  for their removal in the order of relevance.
  """
  random = np.random.default_rng(0)
  return [random.permuted(np.tile(np.arange(parts), (count, 1)), axis=1) for _ in range(DRAWS)]


def color(run: TrainedRun) -> list[int]:
  """Return the mean color of the training images, a value from 0 to 255 for each channel."""
  return [round(255 * mean) for mean in run.task.mean]


def votes(run: TrainedRun, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Compute the votes [n, N, U] of the last block's U centers for a class, through each of N tokens.

  A vote is a contribution to the excess logit of the class. The divisor of the final LayerNorm and the weights of the
  pooling are treated as constants. Then the excess logit is the sum of these terms:

  - the votes,
  - the contributions of stage 2's bias and of the tokens Y in Z = Y + stage2(LayerNorm(Y)),
  - a constant from the biases of the later layers.

  A vote is not the effect of removing a center, because LayerNorm and pooling would then change. `effects` computes
  this effect.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels]. Their number should be small, because all votes are in memory.
    classes: index of a class for each image, int [n].

  Raises:
    UserError: stage 2 of the last block is not a HyperBF.
  """
  tokens, responses = _last(run, images)
  return responses * (readout(run, tokens, classes) @ directions(run.params, run.last_block).T)


def tokens_of_votes(run: TrainedRun, cast: np.ndarray) -> np.ndarray:
  """Return the index of the token through which each center votes most, among those that the head reads, int [n, U].

  With a class token that is read alone, it is the class token for every center.

  Args:
    run: the run.
    cast: the votes, [n, N, U], as returned by `votes`.
  """
  read = np.arange(cast.shape[1])[run.model.embed.read]
  return read[cast[:, read].argmax(axis=1)]


def effects(run: TrainedRun, images: np.ndarray, classes: np.ndarray, centers: np.ndarray) -> np.ndarray:
  """Compute the decrease [n, k] of a class's excess logit if one center of the last block is removed.

  The center's coefficients are set to 0, and the other centers respond as before.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
    classes: index of a class for each image, int [n].
    centers: indices of k centers for each image, int [n, k]. Only one center at a time is removed.
  """
  whole = _excess(run.logits(images), classes)
  drop = np.empty(centers.shape)
  for center in np.unique(centers):
    image, column = np.nonzero(centers == center)
    params = silence(run.params, run.last_block, [center])
    drop[image, column] = whole[image] - _excess(run.logits(images[image], params), classes[image])
  return drop


def _excess(logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Return the excess logit of each image's class, float64 [n]."""
  logits = logits.astype(np.float64)
  return np.take_along_axis(logits, classes[:, None], axis=1)[:, 0] - logits.mean(axis=1)


def _last(run: TrainedRun, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return the tokens [n, N, D] after the last block and the responses [n, N, U] of its centers, float64."""
  parts, block = [], run.last_block
  for number, activations in run.capture_batches(images):
    if block not in activations.responses:
      raise UserError(
        'stage 2 of the last block is not a HyperBF, so it has no centers: give a run with stage 2 hyperbf'
      )
    last = activations.tokens[-1], activations.responses[block]
    parts.append([np.asarray(z, np.float64)[number >= 0] for z in last])
  tokens, responses = (np.concatenate(kind) for kind in zip(*parts, strict=True))
  return tokens, responses


def readout(run: TrainedRun, tokens: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Return the derivative [n, N, D] of a class's excess logit with respect to the tokens after the last block.

  The divisor of the final LayerNorm and the weights of the pooling are treated as constants.

  Args:
    run: the run.
    tokens: tokens after the last block, float64 [n, N, D].
    classes: index of a class for each image, int [n].
  """
  params: Any = run.params
  size = np.sqrt(tokens.var(axis=-1, keepdims=True) + run.model.trunk.norm_epsilon)
  scale, bias = (np.asarray(params['norm'][name], np.float64) for name in ('scale', 'bias'))
  weights = np.zeros(tokens.shape[:2])
  if run.model.embed.pool == 'sequence':
    normed = (tokens - tokens.mean(axis=-1, keepdims=True)) / size * scale + bias
    weights[:] = probabilities((normed @ np.asarray(params['pool']['kernel'], np.float64))[..., 0])
  else:
    which = run.model.embed.read
    weights[:, which] = 1 / weights[:, which].shape[1]
  kernel = np.asarray(params['head']['kernel'], np.float64)
  through = (kernel - kernel.mean(axis=1, keepdims=True)).T[classes] * scale
  through -= through.mean(axis=1, keepdims=True)  # the norm subtracts the mean over the coordinates
  return weights[..., None] * through[:, None] / size
