"""The prediction of K values of an image.

Here, a target is one of the K quantities that have a value for each image, such as a position in pixels.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.data.datasets import Dataset
from hbf.data.images import targets as kinds
from hbf.data.images.sources import labels as labels_of
from hbf.data.pipeline.inputs import Input
from hbf.errors import UserError
from hbf.evaluation.regression import detail, determination_terms, summarize
from hbf.evaluation.scores import REGRESSION, SQUARED_LOSS, Score
from hbf.tasks.answers import VALUES, AnswerForm
from hbf.tasks.images import ImageTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(ImageTask):
  """The prediction of K values.

  Here, a target is one of the K quantities, such as a position in pixels. The network predicts standardized values:
  from each value, the mean of its target is subtracted, and the difference is divided by the target's standard
  deviation. Data sets, answers and scores have values in the units of the data.

  Attributes:
    target_mean: the mean of each target over the training images. () before it is measured.
    target_std: the standard deviation of each target over the training images. () before it is measured.
    huber: the error in standard deviations from which Huber's loss is linear. 0: the loss is the squared error.
  """

  scores: ClassVar[tuple[Score, ...]] = REGRESSION
  training_score: ClassVar[Score | None] = None
  loss_score: ClassVar[Score] = SQUARED_LOSS
  label_names: ClassVar[tuple[str, ...]] = ('targets',)
  targets: ClassVar[str] = kinds.VALUES
  answers: ClassVar[AnswerForm] = VALUES

  target_mean: Sequence[float]
  target_std: Sequence[float]
  huber: float

  @classmethod
  @override
  def options(cls, config: ConfigDict, dataset: Dataset) -> dict[str, Any]:
    data, count = config.data, len(dataset.classes)
    if bool(data.target_mean) != bool(data.target_std):
      raise UserError('give both data.target_mean and data.target_std, or neither to have them measured')
    for key in ('target_mean', 'target_std'):
      if len(data[key]) not in (0, count):
        raise UserError(
          f'data.{key} is {tuple(data[key])}: expected a number for each of the {count} targets of {dataset.name}, '
          'or () to have them measured'
        )
    found = {
      'target_mean': tuple(data.target_mean),
      'target_std': tuple(data.target_std),
      'huber': config.train.huber,
    }
    return super().options(config, dataset) | found

  @override
  def about(self) -> dict[str, Any]:
    return {'target_mean': [*self.target_mean], 'target_std': [*self.target_std]}

  @staticmethod
  @override
  def outputs(logits: jax.Array, about: Mapping[str, Any]) -> jax.Array:
    return logits * jnp.asarray(about['target_std']) + jnp.asarray(about['target_mean'])

  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config with the mean and the standard deviation of each channel and each target.

    If the config has `data.target_mean` and `data.target_std` already, they are kept. Otherwise, if `train` is None,
    each target gets the mean 0 and the deviation 1. For the channels, see `ImageTask.measure`.

    Raises:
      UserError: a target has the same value in all training images.
    """
    resolved, count = super().measure(config, train), len(self.dataset.classes)
    if config.data.target_mean:
      return resolved
    if train is None:
      resolved.data.update(target_mean=(0.0,) * count, target_std=(1.0,) * count)
    else:
      values = np.asarray(labels_of(self.splits(self.validation)['train']), np.float64)
      mean, std = values.mean(axis=0), values.std(axis=0)
      for name, spread in zip(self.dataset.class_names, np.ptp(values, axis=0), strict=True):
        if not spread:
          raise UserError(f'target {name} has the same value in all training images: leave it out')
      resolved.data.update(target_mean=tuple(mean.tolist()), target_std=tuple(std.tolist()))
    return resolved

  def loss_targets(self, labels: jax.Array) -> jax.Array:
    """Return standardized values [B, K], from the values `labels` [B, K] in the units of the data."""
    return (labels - jnp.asarray(self.target_mean)) / jnp.asarray(self.target_std)

  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss of a batch, and 0 as the number of correct predictions, which regression does not have.

    The loss of an error e of a standardized value is e². If δ = `huber` is positive, the loss is e²/2 up to |e| = δ,
    and δ(|e| − δ/2) beyond (Huber 1964).
    """
    _, standardized = targets
    if self.huber:
      losses = optax.huber_loss(logits, standardized, delta=self.huber)
    else:
      losses = optax.squared_error(logits, standardized)
    return self.mean_of(losses, targets), jnp.zeros((), jnp.int32)

  def empty_counts(self) -> tuple[()]:
    """Return no counts. The scores are computed from the predictions for all images instead."""
    return ()

  def add_counts(self, counts: tuple[()], logits: jax.Array, targets: Any) -> tuple[tuple[()], dict[str, jax.Array]]:
    """Return the empty counts, and `targets` and `predictions`, float32 [B, K] each, in the units of the data."""
    return counts, {'targets': targets[0], 'predictions': self.outputs(logits.astype(jnp.float32), self.about())}

  @override
  def summarize(self, counts: tuple[()], per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return summarize(per_example['targets'], per_example['predictions'])

  @override
  def details(self, counts: tuple[()], per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return detail(per_example['targets'], per_example['predictions'], self.dataset.class_names)

  @property
  @override
  def result_names(self) -> tuple[str, ...]:
    return ('n', *(score.name for score in self.scores))

  @staticmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each image, [n]. The mean of these numbers is the mean of R² over the targets.

    See `hbf.evaluation.regression.determination_terms`.
    """
    return determination_terms(per_example['targets'], per_example['predictions'])
