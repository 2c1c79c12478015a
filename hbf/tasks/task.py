"""The interface of a task: everything that training, evaluation and comparison know about images or texts.

A task is one class that satisfies three small interfaces. `TaskData` reads the examples, `TaskLoss` turns them into
batches and a loss, and `TaskScores` measures a network on a split. Code that needs only one of the three asks for it.
"""

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
  """A batch for a network and its loss.

  Attributes:
    inputs: the inputs of the network, [B, …].
    targets: the task's own arrays, each [B, …], to which the outputs are compared.
  """

  inputs: jax.Array
  targets: Any


class TaskData(abc.ABC):
  """The data of a task.

  Attributes:
    dataset: the data set, which has a `name`.
    example: the word for an example: 'image' or 'text'.
    unit: the word for the part of an example that speed and cost are told of: 'image' or 'token'.
    consecutive: True if neighboring test examples are alike, because they follow one another in a text.
  """

  dataset: Any
  example: ClassVar[str]
  unit: ClassVar[str]
  consecutive: ClassVar[bool] = False

  @classmethod
  @abc.abstractmethod
  def load_dataset(cls, config: ConfigDict) -> Any:
    """Load the data set that a config names.

    Raises:
      UserError: the data set is missing or damaged.
    """

  @property
  @abc.abstractmethod
  def shape(self) -> tuple[int, ...]:
    """The shape of an example, as the network takes it."""

  @property
  @abc.abstractmethod
  def units(self) -> int:
    """The number of units in an example. The network predicts something of each."""

  @abc.abstractmethod
  def identity(self) -> dict[str, Any]:
    """Return facts that tell the data from other data, for JSON."""

  @abc.abstractmethod
  def splits(self, validation: float) -> dict[str, Any]:
    """Return the sources of train, validation (if a part of train is held out) and test.

    Raises:
      UserError: nothing is left to train on, or the part is impossible.
    """

  @abc.abstractmethod
  def open(self, source: Any, sharding: NamedSharding) -> Input:
    """Open a source for steps whose batches have this sharding.

    Raises:
      UserError: the source can't be read.
    """

  @abc.abstractmethod
  def abstract_inputs(self, source: Any, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    """Return the shapes and shardings of a step's arrays, without reading the source.

    Args:
      source: the examples.
      sharding: the sharding of batches.
      *leading: the leading axes of the batch: B for a batch, S and B for a stack.
    """

  @abc.abstractmethod
  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config with all values that are measured on the training data.

    Args:
      config: the run's config.
      train: the training data. None: the config gets numbers that stand for the measured ones.
    """


class TaskLoss(abc.ABC):
  """The batches of a task, and the loss that training minimizes. Its methods are pure and run inside jit."""

  @property
  @abc.abstractmethod
  def predictions(self) -> int:
    """The number of predictions in an example that count in the loss."""

  @abc.abstractmethod
  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """Return a batch for training. All draws for an example are functions of a key and the example's number.

    Args:
      keys: the key of draws for one example, and the key of draws for several examples together.
      resident: the resident arrays of `hbf.data.pipeline.inputs`.
      batch: the batch of `hbf.data.pipeline.inputs`, with the number of the step, from 0, as 'step'.
    """

  @abc.abstractmethod
  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """Return a batch for evaluation; arguments as for `train_batch`."""

  @abc.abstractmethod
  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss of a batch's predictions, in nats, and the number of correct predictions, int32."""


class TaskScores(abc.ABC):
  """The scores of a task. `empty_counts` and `add_counts` are pure and run inside jit.

  Attributes:
    scores: the scores of a split. The first one ranks checkpoints and arms.
    label_names: names of the per-example values that are the same for every network, such as 'labels'.
  """

  scores: ClassVar[tuple[Score, ...]]
  label_names: ClassVar[tuple[str, ...]]

  @abc.abstractmethod
  def empty_counts(self) -> Any:
    """Return the counts of no examples."""

  @abc.abstractmethod
  def add_counts(self, counts: Any, logits: jax.Array, targets: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Add an evaluated batch to the counts; return the counts, and values of each example by name [B]."""

  @abc.abstractmethod
  def summarize(self, counts: Any) -> dict[str, Any]:
    """Return the scores of a split from its counts, with n and correct, for JSON."""

  @abc.abstractmethod
  def details(self, counts: Any) -> dict[str, Any]:
    """Return the rest of a report on a split from its counts, for JSON. It may be long."""

  @property
  def result_names(self) -> tuple[str, ...]:
    """The names of the entries of `summarize` that a run's result has."""
    return ('n', 'correct', *(score.name for score in self.scores))

  @staticmethod
  @abc.abstractmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each example, from its values of `add_counts`. Their mean is the first score."""


class Task(TaskData, TaskLoss, TaskScores):
  """A task on a data set: its data, its loss, its scores and its networks.

  Attributes:
    copies: makes copies of a batch's inputs, whose outputs are averaged (`hbf.data.augment.copies`). None: no copies.
    demo_command: a command that shows a trained run at work, without its --workdir. '': none.
  """

  copies: Copies | None = None
  demo_command: ClassVar[str]

  @classmethod
  @abc.abstractmethod
  def from_config(cls, config: ConfigDict, dataset: Any) -> Self:
    """Return the task of a run's config on a data set.

    Raises:
      UserError: a value in the config is impossible, or does not fit the data.
    """

  @property
  @abc.abstractmethod
  def description(self) -> str:
    """The predictions in words, such as '10 classes'."""

  @abc.abstractmethod
  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the network that the `model` part of a config describes.

    Raises:
      UserError: it describes none.
    """
