"""The classification of images."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.data.datasets import Dataset
from hbf.data.images.sources import Source
from hbf.data.images.sources import labels as labels_of
from hbf.data.images.targets import CLASSES
from hbf.data.pipeline.host import Order
from hbf.data.pipeline.order import BalancedOrder
from hbf.errors import UserError
from hbf.evaluation.classification import Counts, detail, summarize
from hbf.evaluation.scores import ACCURACY, CLASSIFICATION, Score
from hbf.tasks.answers import LIKELIEST_CLASSES, AnswerForm
from hbf.tasks.images import ImageTask, needs_epochs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(ImageTask):
  """The classification of images.

  The targets of a batch's images are class numbers, int32 [B]. For the loss they become class probabilities
  [B, classes].

  Attributes:
    label_smoothing: the part of the target probability that training spreads evenly over all classes.
    balance: the treatment of rare classes. 'weights': their images weigh more in the loss. 'sampling': their images
      come more often, so that all classes are equally frequent. '': all images have the same weight and frequency.
  """

  scores: ClassVar[tuple[Score, ...]] = CLASSIFICATION
  demo_command: ClassVar[str] = 'python -m hbf explain'
  targets: ClassVar[str] = CLASSES
  answers: ClassVar[AnswerForm] = LIKELIEST_CLASSES

  label_smoothing: float
  balance: str

  @classmethod
  @override
  def options(cls, config: ConfigDict, dataset: Dataset) -> dict[str, Any]:
    found, balance = super().options(config, dataset), config.data.balance
    if balance == 'sampling' and needs_epochs(found['transforms']):
      raise UserError(
        'data.balance=sampling has no epochs, which the transform alternate_flip needs: use flip, or '
        'data.balance=weights'
      )
    return found | {'label_smoothing': config.train.label_smoothing, 'balance': balance}

  # Data.

  def train_order(self, source: Source, seed: int, batch_size: int) -> Order:
    """Return the order of the training images. With balance 'sampling', it is a `BalancedOrder`.

    See `TaskData.train_order`.
    """
    if self.balance == 'sampling':
      return BalancedOrder.from_labels(seed, labels_of(source), batch_size)
    return super().train_order(source, seed, batch_size)

  @override
  def drawn_numbers(self, index: jax.Array) -> jax.Array:
    """Return a number for each image of a batch, int32 [B], which decides its random numbers.

    With balance 'sampling', images of a rare class can come several times in a batch. Their copies have different
    numbers, so that they are not transformed alike, and are not mixed with themselves.
    """
    if self.balance != 'sampling':
      return index
    earlier = jnp.tri(len(index), k=-1, dtype=bool)
    turns = jnp.sum((index[:, None] == index) & earlier, axis=1, dtype=jnp.int32)
    return index + turns * len(self.dataset.splits['train'])

  @functools.cached_property
  def class_weights(self) -> np.ndarray:
    """The weight of each class in the loss with balance 'weights', float32 [classes].

    The weight is N/(C·n), where n of the N training images are of the class. C is the number of classes with images.
    So the mean weight of an image is 1. A class without images has weight 0.
    """
    counts = np.bincount(labels_of(self.splits(self.validation)['train']), minlength=len(self.dataset.classes))
    weights = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return np.where(counts > 0, weights, 0).astype(np.float32)

  # Loss.

  def loss_targets(self, labels: jax.Array) -> jax.Array:
    """Return class probabilities [B, classes] from class numbers `labels` [B]: 1 for the true class, else 0."""
    return jax.nn.one_hot(labels, len(self.dataset.classes))

  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy of a batch, and the number of images whose likeliest class is right.

    With balance 'weights', each cross-entropy is multiplied by the weight of the image's class. For a mixed image,
    this is the mean of the weights of its two classes, in the proportion of the mixture.
    """
    labels, probabilities = targets
    correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=jnp.int32)
    smooth = optax.smooth_labels(probabilities, self.label_smoothing)
    losses = optax.softmax_cross_entropy(logits, smooth)
    if self.balance == 'weights':
      losses = losses * (probabilities @ self.class_weights)
    return self.mean_of(losses, targets), correct

  # Scores.

  @override
  def empty_counts(self) -> Counts:
    return Counts.zeros(len(self.dataset.classes))

  def add_counts(self, counts: Counts, logits: jax.Array, targets: Any) -> tuple[Counts, dict[str, jax.Array]]:
    """Add an evaluated batch to the counts. Also return each image's true and predicted class numbers, int32 [B]."""
    labels, mask = targets
    per_example = {'labels': labels, 'predictions': jnp.argmax(logits, axis=-1).astype(jnp.int32)}
    return counts.add(logits, labels, mask), per_example

  @override
  def summarize(self, counts: Counts, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    del per_example
    return summarize(counts)

  @override
  def details(self, counts: Counts, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    del per_example
    return detail(counts)

  @staticmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each image, [n]: 100 if its predicted class is right, else 0. The mean is the accuracy."""
    return 100.0 * (per_example['labels'] == per_example['predictions'])


assert Classification.scores[0] is ACCURACY  # `example_scores` has the mean `accuracy`
