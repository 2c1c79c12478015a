"""The interface of a task: everything that training, evaluation and comparison know about images or texts.

A task is one class that satisfies three small interfaces. `TaskData` reads the examples, `TaskLoss` turns them into
batches and a loss, and `TaskScores` measures a network on a split. A function that needs only one interface has an
argument of that type.
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
from hbf.data.pipeline.host import Order
from hbf.data.pipeline.inputs import Batch, Input, Resident
from hbf.data.pipeline.order import TrainOrder
from hbf.evaluation.scores import ACCURACY, LOSS, Score


class ModelBatch(NamedTuple):
  """A batch for a network and its loss.

  Attributes:
    inputs: the inputs of the network, [B, …].
    targets: arrays [B, …] from which the task computes loss and scores, such as classes and a mask.
  """

  inputs: jax.Array
  targets: Any


class TaskData(abc.ABC):
  """The data of a task.

  Attributes:
    dataset: the data set, which has a `name`.
    example: the word for an example: 'image' or 'text'.
    unit: the unit for which speed and cost are reported, 'image' or 'token'.
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
    """The shape of an example at the input of the network."""

  @property
  @abc.abstractmethod
  def units(self) -> int:
    """The number of units in an example: 1 if `unit` is 'image', or the tokens in a window if it is 'token'."""

  @abc.abstractmethod
  def identity(self) -> dict[str, Any]:
    """Return facts that identify the data, as values for JSON."""

  @abc.abstractmethod
  def splits(self, validation: float) -> dict[str, Any]:
    """Return the sources of the splits train, validation and test by name.

    If no examples are held out, there is no entry `validation`.

    Args:
      validation: the fraction of train that is held out, from 0 to below 1.

    Raises:
      UserError: nothing is left to train on, or `validation` is not valid.
    """

  @abc.abstractmethod
  def open(self, source: Any, sharding: NamedSharding) -> Input:
    """Open a source, one of `splits`, for steps whose batches have this sharding.

    Raises:
      UserError: the source can't be read.
    """

  @abc.abstractmethod
  def abstract_inputs(self, source: Any, sharding: NamedSharding, *leading: int) -> tuple[Resident, Batch]:
    """Return the shapes and shardings of a step's input arrays, without reading the source.

    Args:
      source: the examples.
      sharding: the sharding of batches.
      *leading: sizes of the leading axes: B for a batch, or S and B for a stack of S batches.
    """

  def train_order(self, source: Any, seed: int, batch_size: int) -> Order:
    """Return the order of the training examples. By default, the order is shuffled anew in every epoch.

    Args:
      source: the training examples.
      seed: the seed of the run.
      batch_size: the number of examples in a step.
    """
    return TrainOrder(seed, len(source), batch_size)

  def first_order(self, source: Any, seed: int, batch_size: int) -> Order:
    """Return the order of the batch from which parameters are initialized. The arguments are those of `train_order`.

    Its examples are those of `train_order`, but every input reads them as `eval_batch` returns them.
    """
    return self.train_order(source, seed, batch_size)

  @abc.abstractmethod
  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config with the values that are measured on the training data, such as the mean of each channel.

    Args:
      config: the run's config.
      train: the training data. None: nothing is measured, and the config gets placeholder numbers.
    """


class TaskLoss(abc.ABC):
  """The batches of a task, and the loss that training minimizes. Its methods are pure and run inside jit.

  Attributes:
    loss_score: the loss as a score, with its unit.
    training_score: the score whose value in training is the percentage of correct predictions. None if the task
      predicts values, which are not simply correct or wrong.
  """

  loss_score: ClassVar[Score] = LOSS
  training_score: ClassVar[Score | None] = ACCURACY

  @property
  @abc.abstractmethod
  def predictions(self) -> int:
    """The number of predictions in an example that count in the loss."""

  @abc.abstractmethod
  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Resident, batch: Batch) -> ModelBatch:
    """Return the inputs and the targets of a batch for training.

    The random draws for an example depend only on a key and on the example's index.

    Args:
      keys: two random keys. For images, the first is for augmentation, and the second for mixing. For texts, the
        first is for the positions of windows, and the second for the choice of masked tokens.
      resident: the arrays that stay in device memory, see `hbf.data.pipeline.inputs`.
      batch: a batch as in `hbf.data.pipeline.inputs`. Its entry 'step' is the index of the step.
    """

  @abc.abstractmethod
  def eval_batch(self, resident: Resident, batch: Batch) -> ModelBatch:
    """Return inputs and targets of a batch for evaluation. See `train_batch`; an entry 'step' is not needed."""

  @abc.abstractmethod
  def mean_of(self, values: jax.Array, targets: Any) -> jax.Array:
    """Return the mean of `values` over those predictions of a batch that count in the loss.

    Args:
      values: a number for each prediction, float32 [B], [B, K] or [B, T].
      targets: the targets of the batch, see `ModelBatch`.
    """

  @abc.abstractmethod
  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss of a batch, and the number of correct predictions, int32.

    Args:
      logits: outputs of the network.
      targets: the targets of the batch, see `ModelBatch`.
    """


class TaskScores(abc.ABC):
  """The scores of a task. `empty_counts` and `add_counts` are pure and run inside jit.

  Counts are sums over the batches of a split, such as a confusion matrix.

  Attributes:
    scores: the scores of a split. The first score ranks checkpoints, and the networks of a comparison.
    label_names: names of those arrays of `add_counts` that depend on the examples only, such as 'labels'. If these
      arrays differ for two runs, the runs were tested on different examples.
  """

  scores: ClassVar[tuple[Score, ...]]
  label_names: ClassVar[tuple[str, ...]]

  @abc.abstractmethod
  def empty_counts(self) -> Any:
    """Return the counts before the first example: sums that are zero."""

  @abc.abstractmethod
  def add_counts(self, counts: Any, logits: jax.Array, targets: Any) -> tuple[Any, dict[str, jax.Array]]:
    """Add an evaluated batch to the counts, which are sums over a split.

    Return the new counts, and arrays [B, …] by name, with a row for each example.
    """

  @abc.abstractmethod
  def summarize(self, counts: Any, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the scores of a split, as values for JSON. The keys include all `result_names`.

    Args:
      counts: the counts of the split.
      per_example: the arrays of `add_counts`, for all examples of the split.
    """

  @abc.abstractmethod
  def details(self, counts: Any, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return tables and curves of a split, such as a confusion matrix, as values for JSON.

    The arguments are those of `summarize`.
    """

  @property
  def result_names(self) -> tuple[str, ...]:
    """The names of the entries of `summarize` that are also in a run's result."""
    return ('n', 'correct', *(score.name for score in self.scores))

  @staticmethod
  @abc.abstractmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each example, [n]. The mean of these numbers is the first of `scores`.

    The argument `per_example` has the arrays of `add_counts`, for all n examples of the split.
    """


class Task(TaskData, TaskLoss, TaskScores):
  """A task on a data set: its data, its loss, its scores and its networks.

  Attributes:
    copies: a function that makes changed copies of a batch's inputs (`hbf.data.augment.copies`). Evaluation averages
      the outputs for the copies. None: no copies.
    demo_command: a command that shows what a trained run can do, without the flag --workdir. '': no command.
  """

  copies: Copies | None = None
  demo_command: ClassVar[str] = ''

  @classmethod
  @abc.abstractmethod
  def from_config(cls, config: ConfigDict, dataset: Any) -> Self:
    """Return the task of a run's config on a data set.

    Raises:
      UserError: a value in the config is not valid, or does not fit the data.
    """

  @property
  @abc.abstractmethod
  def description(self) -> str:
    """A few words about the outputs, such as '10 classes'. For texts, also the length of the windows."""

  @abc.abstractmethod
  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the network for the `model` part of a config.

    Raises:
      UserError: the `model` part is not valid.
    """
