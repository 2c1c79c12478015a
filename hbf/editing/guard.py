"""Distances and metrics for edits and learned classes.

The guarded images are images whose answers edits should not change.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.data.augment.batches import normalize
from hbf.data.augment.entries import Entry
from hbf.data.augment.transforms import TRANSFORMS, transform
from hbf.errors import UserError
from hbf.evaluation.batches import in_batches
from hbf.models.classifier import ImageClassifier
from hbf.models.edited import Observed, observe
from hbf.tasks.classification import Classification
from hbf.tasks.task import Task

COPIED, COPIES = 1_000, 10  # number of images whose copies measure the metric; number of copies of each
PART = 100  # number of images whose copies are in memory at once
# Fraction of the mean variance that is added to every variance. It limits how far the metric stretches a direction.
RIDGE = 0.3


@dataclasses.dataclass(frozen=True)
class Reader:
  """A classifier as a function of uint8 images.

  Attributes:
    model: the classifier without edits.
    params: its parameters.
    mean: mean of each channel of the images, on a scale from 0 (black) to 1 (white).
    std: standard deviation of each channel, on the same scale.
  """

  model: ImageClassifier
  params: Any
  mean: Sequence[float]
  std: Sequence[float]

  @classmethod
  def of(cls, model: nn.Module, params: Any, task: Task) -> 'Reader':
    """Return the classifier of a run.

    Raises:
      UserError: the run is not of task classification.
    """
    if not (isinstance(task, Classification) and isinstance(model, ImageClassifier)):
      raise UserError('the run is not of task classification: edits correct the answers for images')
    return cls(model, params, task.mean, task.std)

  def __call__(self, images: np.ndarray) -> Observed:
    """Return the logits of uint8 images [n, H, W, C], their points, and the inputs of the head."""
    return in_batches(lambda batch: self._read(self.params, batch), images)

  @functools.cached_property
  def _read(self) -> Any:
    return jax.jit(lambda params, images: observe(self.model, params, normalize(images, self.mean, self.std)))


def distance_to_others(guard: Observed, point: np.ndarray, label: int, metric: np.ndarray) -> float:
  """Return the distance ‖W(x − x')‖ from a point x to the nearest guarded image whose answer is not `label`.

  x is the point of an edited image, W is `metric`, and x' is the point of a guarded image. Guarded images with x' = x
  are left out, because they are the edited image itself. The distance is infinite if no image is left.
  """
  others = guard.points[guard.logits.argmax(axis=-1) != label]
  away = np.linalg.norm((others - point) @ metric.T, axis=-1)
  return float(np.min(away, initial=np.inf, where=away > 1e-4 * np.linalg.norm(metric @ point)))


def measure_metric(reader: Reader, images: np.ndarray, entries: Sequence[Entry], seed: int = 0) -> np.ndarray:
  """Return a metric W [D, D] in which the points of copies of an image are near to each other (`metric_of`).

  The copies are moved and mirrored as in training.

  Args:
    reader: the classifier.
    images: uint8 [n, H, W, C]. At most `COPIED` of them are used.
    entries: the transforms of training. Only those that `moves` selects are used.
    seed: the seed of the random transforms.
  """
  copied, entries = images[:: -(-len(images) // COPIED)], moves(entries, images.shape[1])
  parts = [copied[start : start + PART] for start in range(0, len(copied), PART)]
  points = [points_of_copies(reader, part, entries, COPIES, seed + i) for i, part in enumerate(parts)]
  return metric_of(np.concatenate(points))


def metric_of(points: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
  """Return a metric W [D, D] in which the points of copies of an example are near to each other.

  W is Σ^(−1/2) S. The diagonal matrix S divides each of the D coordinates by its standard deviation over all copies.
  Σ is the mean of S(p − p̄)(p − p̄)ᵀS, plus a ridge. Here p is the point of a copy, and p̄ is the mean point of all
  copies of the same example.

  Args:
    points: the points of the copies, [n, copies, D].
    ridge: fraction of the mean variance that is added to every variance of Σ.
  """
  scale = points.std(axis=(0, 1)) + 1e-6
  around = ((points - points.mean(axis=1, keepdims=True)) / scale).reshape(-1, points.shape[-1]).astype(np.float64)
  covariance = around.T @ around / len(around)
  values, vectors = np.linalg.eigh(covariance)
  values = np.maximum(values, 0) + ridge * np.trace(covariance) / len(covariance)
  return ((vectors / np.sqrt(values)) @ vectors.T / scale).astype(np.float32)


def metric_of_classes(features: np.ndarray, labels: np.ndarray, ridge: float = RIDGE) -> np.ndarray:
  """Return a metric W [F, F] in which the features of images of the same class are near to each other (`metric_of`).

  From each class, equally many images are used: as many as the smallest class has. Classes without images are
  ignored.

  Args:
    features: the features of the images, [n, F].
    labels: the class of each image, int [n].
    ridge: see `metric_of`.
  """
  order, counts = np.argsort(labels, kind='stable'), np.bincount(labels)
  starts = (np.cumsum(counts) - counts)[counts > 0]
  return metric_of(features[order[starts[:, None] + np.arange(counts[counts > 0].min())]], ridge)


def moves(entries: Sequence[Entry], side: int) -> tuple[Entry, ...]:
  """Return the transforms in `entries` that only move pixels and do not change their colors.

  Copies of images are made with them. If there are none, return a shift by up to an eighth of the side. The transform
  `alternate_flip`, which flips in every other epoch, becomes a random flip.

  Args:
    entries: the transforms of training.
    side: the side of the images in pixels.
  """
  entries = [('flip', 0.5) if name == 'alternate_flip' else (name, *rest) for name, *rest in entries]
  kept = [entry for entry in entries if TRANSFORMS[entry[0]].geometry and not TRANSFORMS[entry[0]].pixels]
  return tuple(kept) or (('shift', max(1, side // 8)),)


def points_of_copies(
  reader: Reader, images: np.ndarray, entries: tuple[Entry, ...], count: int, seed: int
) -> np.ndarray:
  """Return the points [n, count, D] of `count` copies of each uint8 image [n, H, W, C], transformed by `entries`."""
  moved = copies(images, entries, count, seed)
  return reader(moved.reshape(-1, *images.shape[1:])).points.reshape(len(images), count, -1)


def copies(images: np.ndarray, entries: tuple[Entry, ...], count: int, seed: int) -> np.ndarray:
  """Return `count` copies [n, count, H, W, C] of each uint8 image [n, H, W, C], transformed by `entries`."""
  return np.asarray(_copies(jax.random.key(seed), jnp.asarray(images), entries, count))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _copies(key: jax.Array, images: jax.Array, entries: tuple[Entry, ...], count: int) -> jax.Array:
  keys = jax.random.split(key, (len(images), count))
  one = jax.vmap(lambda key, image: transform(key, image, entries), (0, None))
  return jax.vmap(one)(keys, images)
