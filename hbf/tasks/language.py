"""Language modeling: the prediction of the next token of a text, or of masked tokens."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict
from typing_extensions import override

from hbf.data.pipeline.host import Order
from hbf.data.pipeline.inputs import Batch, Input
from hbf.data.pipeline.order import TrainOrder
from hbf.data.text.inputs import ShiftedOrder, abstract_text_input, make_text_input
from hbf.data.text.texts import Texts, identity_of, load_texts
from hbf.data.text.windows import Text, Tokens, check_length, shifted_windows, windows
from hbf.errors import UserError
from hbf.evaluation.language import TextCounts, detail_text, summarize_text
from hbf.evaluation.scores import MASKED_TOKEN, NEXT_TOKEN, Score
from hbf.models.build import build_language_model
from hbf.tasks.task import ModelBatch, Task

MASKED = 0.15  # the fraction of a window's tokens that is masked (Devlin et al. 2019)
_MASKS = 143  # the seed of the masks of evaluation, which are always the same


@dataclasses.dataclass(frozen=True)
class Language(Task):
  """A task on windows of texts.

  `ModelBatch.targets` are two arrays [B, T]. The first has the token to predict at each position, int32. The second
  has booleans, which are True for the predictions that count in the loss and in the scores.

  Attributes:
    dataset: the texts.
    length: T, the number of tokens in a window.
    input: the kind of input, see `hbf.data.text.inputs.make_text_input`.
    resident_bytes: the most bytes of text that input 'auto' puts on each device.
    label_smoothing: the part of the target probability that training spreads evenly over the vocabulary.
  """

  example: ClassVar[str] = 'text'
  unit: ClassVar[str] = 'token'
  consecutive: ClassVar[bool] = True
  label_names: ClassVar[tuple[str, ...]] = ('tokens',)

  dataset: Texts
  length: int
  input: str
  resident_bytes: int
  label_smoothing: float

  @classmethod
  @override
  def from_config(cls, config: ConfigDict, dataset: Texts) -> Self:
    data = config.data
    return cls(dataset, data.length, data.input, data.resident_bytes, config.train.label_smoothing)

  @property
  def description(self) -> str:
    """The vocabulary and the length of the windows, in words."""
    tokenizer = self.dataset.tokenizer
    return f'a vocabulary of {tokenizer.vocabulary} ({tokenizer.kind}), windows of {self.length}'

  # Data.

  @classmethod
  @override
  def load_dataset(cls, config: ConfigDict) -> Texts:
    keys = ('name', 'dir', 'root', 'download', 'test_split', 'tokenizer', 'vocabulary', 'cache')
    return load_texts(**{key: config.data[key] for key in keys})

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of an example: the number of tokens in a window."""
    return (self.length,)

  @property
  def units(self) -> int:
    """The number of tokens in a window."""
    return self.length

  @override
  def identity(self) -> dict[str, Any]:
    return identity_of(self.dataset)

  def splits(self, validation: float) -> dict[str, Text]:
    """Return the texts of the splits. The validation text is the fraction `validation` at the end of train."""
    tokens = self.dataset.splits['train']
    held = len(tokens) - round(validation * len(tokens))
    found = {'train': tokens[:held], 'validation': tokens[held:], 'test': self.dataset.splits['test']}
    check_length('the text to train on', len(found['train']), self.length)
    if len(found['test']) < self.least:
      raise UserError(
        f'the text to test on, of {self.dataset.name}, has {len(found["test"]):,} tokens: expected {self.least:,} or '
        'more; take a longer text, or set a smaller data.length'
      )
    return {name: Text(part, self.length) for name, part in found.items() if len(part) >= self.least}

  @property
  def least(self) -> int:
    """The least number of tokens of a text to evaluate. In a shorter text, no prediction counts."""
    return 2  # a single token has no next token

  @override
  def open(self, source: Text, sharding: NamedSharding) -> Input:
    return make_text_input(self.input, source, sharding, self.resident_bytes)

  @override
  def abstract_inputs(self, source: Text, sharding: NamedSharding, *leading: int) -> tuple[Tokens | None, Batch]:
    return abstract_text_input(self.input, source, sharding, self.resident_bytes, *leading)

  def train_order(self, source: Text, seed: int, batch_size: int) -> ShiftedOrder:
    """Return the order of the training windows, which begin at random positions; see `TaskData.train_order`."""
    return ShiftedOrder(seed, len(source), batch_size)

  @override
  def first_order(self, source: Text, seed: int, batch_size: int) -> Order:
    # A stream shifts the windows of a `ShiftedOrder`. Only `train_batch` shifts those of a text in device memory.
    return TrainOrder(seed, len(source), batch_size)

  def measure(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """Return the config as it is: nothing is measured on texts."""
    del train
    return config

  # Loss.

  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Tokens | None, batch: Batch) -> ModelBatch:
    """Return windows at random positions in the text. The keys choose the positions, then the masked tokens."""
    tokens = shifted_windows(keys[0], resident, batch)
    window_keys = jax.vmap(jax.random.fold_in, (None, 0))(keys[1], batch['index'])
    return self._model_batch(window_keys, tokens, jnp.ones(tokens.shape, bool))

  def eval_batch(self, resident: Tokens | None, batch: Batch) -> ModelBatch:
    """Return consecutive windows of the text."""
    return self._model_batch(_eval_keys(batch['index']), *windows(resident, batch))

  @abc.abstractmethod
  def _model_batch(self, keys: jax.Array, tokens: jax.Array, present: jax.Array) -> ModelBatch:
    """Return the batch for the network and its loss.

    Args:
      keys: a random key for each window, [B], that chooses its masked tokens.
      tokens: windows of T tokens, each followed by the next token of the text, [B, T + 1].
      present: booleans [B, T + 1]. False for padding and beyond the end of the text.
    """

  def mean_of(self, values: jax.Array, targets: Any) -> jax.Array:
    """Return the mean of `values` [B, T] over the predictions that count: those for which `targets[1]` is True.

    Every window must have the same number of predictions that count.
    """
    labels, counted = targets
    return jnp.sum(values, where=counted) / (len(labels) * self.predictions)

  def loss(self, logits: jax.Array, targets: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross-entropy of the predictions that count, and the number of correct predictions among them.

    Every window must have the same number of predictions that count.
    """
    labels, counted = targets
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if self.label_smoothing:
      uniform = jax.nn.logsumexp(logits, axis=-1) - logits.mean(axis=-1)
      nll = (1 - self.label_smoothing) * nll + self.label_smoothing * uniform
    hits = (jnp.argmax(logits, axis=-1) == labels) & counted
    return self.mean_of(nll, targets), jnp.sum(hits, dtype=jnp.int32)

  # Scores.

  @override
  def empty_counts(self) -> TextCounts:
    return TextCounts.zeros(self.length)

  def add_counts(
    self, counts: TextCounts, logits: jax.Array, targets: Any
  ) -> tuple[TextCounts, dict[str, jax.Array]]:
    """Add an evaluated batch to the counts. Also return two arrays with a number for each window.

    `nll` has the summed negative log-likelihoods of the predictions that count, float32 [B]. `tokens` has the number
    of these predictions, int32 [B].
    """
    labels, counted = targets
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    sizes = jnp.asarray(self.dataset.tokenizer.sizes)[labels]
    per_window = {'nll': jnp.sum(nll, axis=1, where=counted), 'tokens': jnp.sum(counted, axis=1, dtype=jnp.int32)}
    return counts.add(nll, jnp.argmax(logits, axis=-1) == labels, counted, sizes), per_window

  @override
  def summarize(self, counts: TextCounts, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    del per_example
    return summarize_text(counts)

  @override
  def details(self, counts: TextCounts, per_example: Mapping[str, np.ndarray]) -> dict[str, Any]:
    del per_example
    return detail_text(counts)

  @staticmethod
  def example_scores(per_example: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a number for each window, [n]. The mean of these numbers is the score `token_nll`.

    The number is the summed cross-entropy of the window, divided by the mean number of predictions in a window.
    """
    return per_example['nll'] / per_example['tokens'].mean()


@dataclasses.dataclass(frozen=True)
class NextToken(Language):
  """The prediction of every token from the tokens before it."""

  scores: ClassVar[tuple[Score, ...]] = NEXT_TOKEN
  demo_command: ClassVar[str] = "python -m hbf generate --prompt='The '"

  @property
  def predictions(self) -> int:
    """The number of tokens in a window. The next token is predicted for each of them."""
    return self.length

  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the causal language model that the `model` part of a config describes."""
    return build_language_model(model, self.dataset.tokenizer.vocabulary, self.length, causal=True)

  def _model_batch(self, keys: jax.Array, tokens: jax.Array, present: jax.Array) -> ModelBatch:
    del keys
    return ModelBatch(tokens[:, :-1], (tokens[:, 1:], present[:, 1:]))


@dataclasses.dataclass(frozen=True)
class MaskedToken(Language):
  """The prediction of masked tokens from the tokens around them (Devlin et al. 2019).

  All tokens to predict are masked. BERT masks only 80% of them, because its fine-tuning has no masks.
  """

  scores: ClassVar[tuple[Score, ...]] = MASKED_TOKEN

  @property
  def predictions(self) -> int:
    """The number of tokens that are masked in a window: 15% of its tokens, and at least one."""
    return max(1, round(MASKED * self.length))

  def make_model(self, model: ConfigDict) -> nn.Module:
    """Return the network that the `model` part of a config describes. Its vocabulary has one more token, the mask."""
    return build_language_model(model, self.dataset.tokenizer.vocabulary + 1, self.length, causal=False)

  def _model_batch(self, keys: jax.Array, tokens: jax.Array, present: jax.Array) -> ModelBatch:
    tokens, present = tokens[:, :-1], present[:, :-1]
    masked = self._masked(keys)
    # An incomplete window does not count: its tokens would see what fills it, which the network does not know.
    counted = masked & present.all(axis=1, keepdims=True)
    return ModelBatch(jnp.where(masked, self.dataset.tokenizer.vocabulary, tokens), (tokens, counted))

  def _masked(self, keys: jax.Array) -> jax.Array:
    """Return booleans [B, T], True for the masked tokens of a window, from a random key for each window, [B]."""
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (self.length,)))(keys)
    return jnp.argsort(jnp.argsort(drawn)) < self.predictions

  @property
  @override
  def least(self) -> int:
    """The number of tokens in a window. In a shorter text, no prediction counts."""
    return max(super().least, self.length)


def _eval_keys(index: jax.Array) -> jax.Array:
  """Return the random key of each window of an evaluation, [B], from the indices of the windows, int32 [B]."""
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(_MASKS), index)
