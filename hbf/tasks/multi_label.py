"""The prediction of K labels of an image, each of which is true or false by itself."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.data.datasets import Dataset
from hbf.data.images import targets as kinds
from hbf.evaluation.multi_label import detail, mean_precision_terms, summarize
from hbf.evaluation.scores import LABEL_ACCURACY, MULTI_LABEL, Score
from hbf.tasks.answers import LABELS, AnswerForm
from hbf.tasks.images import ImageTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabel(ImageTask):
  """The prediction of K labels, each by its own sigmoid.

  The targets of a batch's images are float32 [B, K], each 0 or 1. Mixed images have targets between 0 and 1.

  Attributes:
    label_smoothing: the part s of the target probability that training spreads evenly over true and false. In the
      loss, a target y becomes (1 − s) y + s/2.
  """

  scores: ClassVar[tuple[Score, ...]] = MULTI_LABEL
  training_score: ClassVar[Score | None] = LABEL_ACCURACY
  targets: ClassVar[str] = kinds.LABELS
  answers: ClassVar[AnswerForm] = LABELS

  label_smoothing: float

  @classmethod
  @override
  def options(cls, config: ConfigDict, dataset: Dataset) -> dict[str, Any]:
    return super().options(config, dataset) | {'label_smoothing': config.train.label_smoothing}

  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy over all images and labels of a batch, and the number of correct predictions."""
    labels, probabilities = targets
    correct = jnp.sum((logits > 0) == (labels > 0), dtype=jnp.int32)
    smooth = (1 - self.label_smoothing) * probabilities + self.label_smoothing / 2
    return self.mean_of(optax.sigmoid_binary_cross_entropy(logits, smooth), targets), correct

  def empty_counts(self) -> tuple[()]:
    """Return no counts. The scores are computed from the logits of all images instead."""
    return ()

  def add_counts(self, counts: tuple[()], logits: jax.Array, targets: Any) -> tuple[tuple[()], dict[str, jax.Array]]:
    """Return the empty counts and, for each image, the true `labels`, uint8 [B, K], and `logits`, float32 [B, K]."""
    return counts, {'labels': targets[0].astype(jnp.uint8), 'logits': logits.astype(jnp.float32)}

  @override
  def summarize(self, counts: tuple[()], per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return summarize(per_example['labels'], per_example['logits'])

  @override
  def details(self, counts: tuple[()], per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return detail(per_example['labels'], per_example['logits'], self.dataset.class_names)

  @staticmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each image, [n]. The mean of these numbers is the mean average precision in percent.

    See `hbf.evaluation.multi_label.mean_precision_terms`.
    """
    return 100 * mean_precision_terms(per_example['labels'], per_example['logits'])
