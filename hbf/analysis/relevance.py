"""What decides an image: patches whose loss changes the answer, and the centers that voted for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError

Answers = Callable[
  [np.ndarray], np.ndarray
]  # images uint8 [n, height, width, channels] to probabilities [n, classes]
STEPS = 16  # most, of a curve
TOGETHER = 3_000  # most images with a patch gone that are in memory
DRAWS = 3  # of random orders


def probabilities(logits: np.ndarray) -> np.ndarray:
  """Softmax of logits [n, classes], float64."""
  z = logits.astype(np.float64)
  e = np.exp(z - z.max(axis=1, keepdims=True))
  return e / e.sum(axis=1, keepdims=True)


def without(images: np.ndarray, patch: int, gone: np.ndarray, fill: Sequence[int]) -> np.ndarray:
  """Images with patches painted over.

  Args:
    images: uint8 [n, height, width, channels].
    patch: side in pixels.
    gone: bool [n, rows · columns], which patches are.
    fill: the color, of each channel.
  """
  rows, columns = images.shape[1] // patch, images.shape[2] // patch
  pixels = gone.reshape(-1, rows, columns).repeat(patch, axis=1).repeat(patch, axis=2)[..., None]
  return np.where(pixels, np.asarray(fill, np.uint8), images)


def relevance(answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int]) -> np.ndarray:
  """How much the probability of the answer falls when a patch is painted over, [n, rows · columns].

  Args:
    answers: the model.
    images: uint8 [n, height, width, channels].
    patch: side in pixels.
    fill: the color, of each channel.
  """
  patches = images.shape[1] // patch * (images.shape[2] // patch)
  size = max(1, TOGETHER // patches)
  parts = (images[start : start + size] for start in range(0, len(images), size))
  return np.concatenate([_relevance(answers, part, patch, fill, patches) for part in parts])


def _relevance(answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int], patches: int) -> np.ndarray:
  whole = answers(images)
  answer = whole.argmax(axis=1)
  each = np.tile(np.eye(patches, dtype=bool), (len(images), 1))
  left = answers(without(images.repeat(patches, axis=0), patch, each, fill))
  of_answer = np.take_along_axis(left, answer.repeat(patches)[:, None], axis=1).reshape(len(images), patches)
  return np.take_along_axis(whole, answer[:, None], axis=1) - of_answer


def deletion(
  answers: Answers, images: np.ndarray, patch: int, fill: Sequence[int], order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Probability of the answer while patches go (deletion, Petsiuk et al. 2018).

  Args:
    answers: the model.
    images: uint8 [n, height, width, channels].
    patch: side in pixels.
    fill: the color of those that are gone.
    order: of the patches of each image, the first to go first: int [n, rows · columns].

  Returns:
    Parts of the patches that are gone, [S], and the probability of what the whole image was answered by, [n, S]. The
    mean over S is the area under the curve, lower where the order is better.
  """
  count = order.shape[1]
  numbers = np.unique(np.linspace(0, count, min(count, STEPS) + 1).round().astype(int))
  rank = np.argsort(order, axis=1)
  answer = answers(images).argmax(axis=1)
  left = [answers(without(images, patch, rank < number, fill)) for number in numbers]
  return numbers / count, np.stack([p[np.arange(len(images)), answer] for p in left], axis=1)


def random_orders(count: int, patches: int) -> list[np.ndarray]:
  """Orders of the patches of so many images, to compare others to: int [count, patches] each."""
  random = np.random.default_rng(0)
  return [random.permuted(np.tile(np.arange(patches), (count, 1)), axis=1) for _ in range(DRAWS)]


def color(subject: TrainedRun) -> list[int]:
  """The mean of the training images' channels, 0 to 255."""
  return [round(255 * mean) for mean in subject.task.mean]


def votes(subject: TrainedRun, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Compute what every center of the last block adds to a class's logit through each token, [n, N, U].

  The division of the last norm and the weights of the pooling are frozen: they are taken as the whole network has
  them. Then the head is linear in the last tokens, and the votes of the centers, their bias and what came before the
  unit sum up to the logit. It is told as its excess over the mean of all classes. Without a center the norm and the
  weights would be others, so a vote is no effect: see `effects`.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels]; give few.
    classes: that is voted for, of each image, int [n].

  Raises:
    UserError: the last block's stage 2 isn't a HyperBF.
  """
  block = _last_block(subject)
  tokens, responses = _last(subject, images, block)
  unit = subject.params[block]['stage2']
  coefficients = np.asarray(unit['coefficients'], np.float64)
  coefficients = coefficients.reshape(-1, coefficients.shape[-1]) * np.asarray(
    subject.params[block].get('scale_stage2', 1.0)
  )
  return responses * (reading(subject, tokens, classes) @ coefficients.T)


def effects(subject: TrainedRun, images: np.ndarray, classes: np.ndarray, centers: np.ndarray) -> np.ndarray:
  """Compute by how much a class's logit falls without a center of the last block, [n, k].

  The network is run again with the center's coefficients at 0. The other centers respond as before. Logits are told
  as their excess over the mean of all classes, as votes are.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
    classes: int [n].
    centers: numbers of the centers to leave out, one at a time, int [n, k].
  """
  block = _last_block(subject)
  unit = subject.params[block]['stage2']
  whole = _excess(subject.logits(images), classes)
  fallen = np.empty(centers.shape)
  for center in np.unique(centers):
    image, place = np.nonzero(centers == center)
    head, number = divmod(int(center), unit['coefficients'].shape[1])
    silent = unit | {'coefficients': unit['coefficients'].at[head, number].set(0)}
    params = subject.params | {block: subject.params[block] | {'stage2': silent}}
    fallen[image, place] = whole[image] - _excess(subject.logits(images[image], params), classes[image])
  return fallen


def _excess(logits: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Return the logit of each image's class over the mean of all classes, float64 [n]."""
  logits = logits.astype(np.float64)
  return np.take_along_axis(logits, classes[:, None], axis=1)[:, 0] - logits.mean(axis=1)


def _last_block(subject: TrainedRun) -> str:
  return f'block{subject.model.trunk.depth - 1}'


def _last(subject: TrainedRun, images: np.ndarray, block: str) -> tuple[np.ndarray, np.ndarray]:
  """The tokens that come out of the last block, and the responses in it, float64 [n, N, D] and [n, N, U]."""
  parts = []
  for number, seen in subject.looks(images):
    if block not in seen.responses:
      raise UserError("the last block's stage 2 is no HyperBF, and has no centers")
    parts.append([np.asarray(z, np.float64)[number >= 0] for z in (seen.tokens[-1], seen.responses[block])])
  tokens, responses = (np.concatenate(kind) for kind in zip(*parts, strict=True))
  return tokens, responses


def reading(subject: TrainedRun, tokens: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """What a number in a last token's coordinate adds to a class's logit over the mean of all, [n, N, D].

  Args:
    subject: the run.
    tokens: out of the last block, float64 [n, N, D].
    classes: int [n].
  """
  params: Any = subject.params
  size = np.sqrt(tokens.var(axis=-1, keepdims=True) + subject.model.trunk.norm_epsilon)
  scale, bias = (np.asarray(params['norm'][name], np.float64) for name in ('scale', 'bias'))
  weights = np.zeros(tokens.shape[:2])
  if subject.model.embed.pool == 'sequence':
    normed = (tokens - tokens.mean(axis=-1, keepdims=True)) / size * scale + bias
    weights[:] = probabilities((normed @ np.asarray(params['pool']['kernel'], np.float64))[..., 0])
  else:
    which = subject.model.embed.read
    weights[:, which] = 1 / weights[:, which].shape[1]
  kernel = np.asarray(params['head']['kernel'], np.float64)
  through = (kernel - kernel.mean(axis=1, keepdims=True)).T[classes] * scale
  through -= through.mean(axis=1, keepdims=True)  # the norm takes the mean over the coordinates away
  return weights[..., None] * through[:, None] / size
