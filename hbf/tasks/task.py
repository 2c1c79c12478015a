"""What a task is: all that training, evaluation and comparison have to know of images or texts."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from hbf.data.augment.copies import Copies
from hbf.data.pipeline.inputs import Batch, Input, Resident
from hbf.evaluation.scores import Score


class ModelBatch(NamedTuple):
  """A batch as a network and its loss see it.

  Attributes:
    inputs: what the network is called with, [B, …].
    goal: what its outputs are compared with: the task's own arrays, each [B, …].
  """

  inputs: jax.Array
  targets: Any


class Task(abc.ABC):
  """What networks are trained for, on a data set.

  All methods with arrays are pure, made to run inside jit.

  Attributes:
    figures: of a split; the first ranks checkpoints and arms.
    example: what examples are called: 'image' or 'text'.
    unit: what speed and cost are told of: 'image' or 'token'.
    shows: the command that shows what a trained run does, given its --workdir; '' if there is none.
    examples: names of what `count` keeps that is of the examples alone, whatever the network.
    consecutive: True if test examples follow one another in a text, so that neighbors are alike.
    dataset: where examples come from; it has a name.
    copies: makes the copies of a batch's inputs whose outputs are averaged (`hbf.data.augment.copies`), or None.
  """

  scores: ClassVar[tuple[Score, ...]]
  example: ClassVar[str]
  unit: ClassVar[str]
  shows: ClassVar[str]
  examples: ClassVar[tuple[str, ...]]
  consecutive: ClassVar[bool] = False
  dataset: Any
  copies: Copies | None = None

  @classmethod
  @abc.abstractmethod
  def of(cls, config: ConfigDict, dataset: Any) -> Self:
    """The task of a run's config, on a data set.

    Raises:
      UserError: something in the config can't be, or doesn't fit the data.
    """

  @classmethod
  @abc.abstractmethod
  def load(cls, config: ConfigDict) -> Any:
    """The data set that a config names.

    Raises:
      UserError: it isn't there, or isn't what it should be.
    """

  @property
  @abc.abstractmethod
  def shape(self) -> tuple[int, ...]:
    """Of an example, as the network takes it."""

  @property
  @abc.abstractmethod
  def units(self) -> int:
    """How many units an example has, each of which the network predicts something of."""

  @property
  @abc.abstractmethod
  def predictions(self) -> int:
    """How many predictions of an example count in training."""

  @property
  @abc.abstractmethod
  def about(self) -> str:
    """What is predicted, in words."""

  @abc.abstractmethod
  def identity(self) -> dict[str, Any]:
    """What tells the data from others, for JSON."""

  @abc.abstractmethod
  def network(self, model: ConfigDict) -> nn.Module:
    """The network that the `model` part of a config describes.

    Raises:
      UserError: it describes none.
    """

  @abc.abstractmethod
  def splits(self, validation: float) -> dict[str, Any]:
    """Sources of train, validation (if a part of train is held out) and test; they have lengths.

    Raises:
      UserError: nothing is left to train on, or the part isn't one.
    """

  @abc.abstractmethod
  def open(self, source: Any, sharding: NamedSharding) -> Input:
    """A source made ready for steps, whose batches lie as told.

    Raises:
      UserError: it can't be read.
    """

  @abc.abstractmethod
  def shapes(self, source: Any, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    """What steps would be given of a source that is never read: shapes with their shardings.

    Args:
      source: of the examples.
      sharding: of batches.
      *leading: B for a batch; S, B for a stack.
    """

  @abc.abstractmethod
  def measured(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """The config with all that is to be measured on the training data; of None with numbers that stand for it."""

  @abc.abstractmethod
  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """A batch as it is evaluated."""

  @abc.abstractmethod
  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """A batch as it is trained on: what is drawn of an example is a function of a key and the example's number.

    Args:
      keys: of what is drawn of examples by themselves, and of what is drawn of them together.
      resident: as `hbf.data.pipeline.inputs` has it.
      batch: likewise, with the number of the step, from 0, as 'step'.
    """

  @abc.abstractmethod
  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """The mean loss of a batch's predictions, in nats, and how many are right, int32."""

  @abc.abstractmethod
  def zeros(self) -> Any:
    """Counts of no examples."""

  @abc.abstractmethod
  def count(self, counts: Any, logits: jax.Array, targets: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Counts with an evaluated batch added, and what is kept of each example, by name [B]."""

  @abc.abstractmethod
  def summarize(self, counts: Any) -> dict[str, Any]:
    """Return the figures of a split from its counts, with n and correct, for JSON."""

  @abc.abstractmethod
  def detail(self, counts: Any) -> dict[str, Any]:
    """Return what else a report says of a split, from its counts, for JSON; it may be long."""

  @property
  def shown(self) -> tuple[str, ...]:
    """Names of what a run's end reports of `summarize`."""
    return ('n', 'correct', *(score.name for score in self.scores))

  @staticmethod
  @abc.abstractmethod
  def outcomes(kept: Mapping[str, np.ndarray]) -> np.ndarray:
    """Of each example, from what `count` kept of it, a number; their mean is the first figure."""
