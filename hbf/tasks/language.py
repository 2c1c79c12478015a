"""The next token of a text, or those of its tokens that were masked."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from hbf.data.pipeline.inputs import Batch, Input, abstract_batch
from hbf.data.text.texts import Texts, identity_of, load_texts
from hbf.data.text.windows import Text, TextInput, Tokens, check_length, shifted_windows, windows
from hbf.errors import UserError
from hbf.evaluation.language import TextCounts, detail_text, summarize_text
from hbf.evaluation.scores import MASKED_TOKEN, NEXT_TOKEN, Score
from hbf.models.build import build_language_model
from hbf.tasks.task import ModelBatch, Task

MASKED = 0.15  # of a window's tokens, Devlin et al. 2019
_MASKS = 143  # seed of the masks of evaluation: always the same


@dataclasses.dataclass(frozen=True)
class Language(Task):
  """Windows of texts. The goal of a batch is (labels int32 [B, T], which of them count, bool [B, T]).

  Attributes:
    dataset: the texts.
    length: T, tokens of a window.
    label_smoothing: probability given to all tokens alike, in training.
  """

  example: ClassVar[str] = 'text'
  unit: ClassVar[str] = 'token'
  examples: ClassVar[tuple[str, ...]] = ('tokens',)
  consecutive: ClassVar[bool] = True

  dataset: Texts
  length: int
  label_smoothing: float

  @classmethod
  def of(cls, config: ConfigDict, dataset: Texts) -> Self:
    """See `Task.of`."""
    return cls(dataset, config.data.length, config.train.label_smoothing)

  @classmethod
  def load(cls, config: ConfigDict) -> Texts:
    """See `hbf.data.text.texts.load_texts`."""
    keys = ('name', 'dir', 'root', 'download', 'test_split', 'tokenizer', 'vocabulary')
    return load_texts(**{key: config.data[key] for key in keys})

  @property
  def shape(self) -> tuple[int, ...]:
    """Tokens of a window."""
    return (self.length,)

  @property
  def units(self) -> int:
    """Tokens."""
    return self.length

  @property
  def about(self) -> str:
    """See `Task.about`."""
    tokenizer = self.dataset.tokenizer
    return f'a vocabulary of {tokenizer.vocabulary} ({tokenizer.kind}), windows of {self.length}'

  def identity(self) -> dict[str, Any]:
    """See `hbf.data.text.texts.identity_of`."""
    return identity_of(self.dataset)

  def splits(self, validation: float) -> dict[str, Text]:
    """See `Task.splits`; held out is the end of train."""
    tokens = self.dataset.splits['train']
    held = len(tokens) - round(validation * len(tokens))
    found = {'train': tokens[:held], 'validation': tokens[held:], 'test': self.dataset.splits['test']}
    check_length('the text to train on', len(found['train']), self.length)
    if len(found['test']) < 2:
      raise UserError(f'{self.dataset.name} has no text to test on: take a longer text')
    # A token alone has no next one.
    return {name: Text(part, self.length) for name, part in found.items() if len(part) > 1}

  def open(self, source: Text, sharding: NamedSharding) -> Input:
    """See `Task.open`."""
    return TextInput(source, sharding)

  def shapes(self, source: Text, sharding: NamedSharding, *leading: int) -> tuple[Tokens, Batch]:
    """See `Task.shapes`."""
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    tokens: Any = jax.ShapeDtypeStruct(source.tokens.shape, source.tokens.dtype, sharding=whole)
    resident = Tokens(tokens, self.length)
    return resident, abstract_batch(resident, self.shape, sharding, *leading)

  def measured(self, config: ConfigDict, train: Input | None) -> ConfigDict:
    """The config: nothing is."""
    del train
    return config

  def eval_batch(self, resident: Tokens, batch: Batch) -> ModelBatch:
    """Windows one after another."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(_MASKS), batch['index'])
    return self._seen(keys, *windows(resident, batch['index']))

  def train_batch(self, keys: tuple[jax.Array, jax.Array], resident: Tokens, batch: Batch) -> ModelBatch:
    """Windows moved at random."""
    tokens = shifted_windows(keys[0], resident, batch['index'])
    of_text = jax.vmap(jax.random.fold_in, (None, 0))(keys[1], batch['index'])
    return self._seen(of_text, tokens, jnp.ones(tokens.shape, bool))

  @abc.abstractmethod
  def _seen(self, keys: jax.Array, tokens: jax.Array, there: jax.Array) -> ModelBatch:
    """Inputs and goal, of a key [B] for each of the windows [B, T + 1], and of which tokens there are such."""

  def loss(self, logits: jax.Array, goal: Any) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of the tokens that count, which are as many in all windows."""
    labels, counted = goal
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if self.label_smoothing:
      uniform = jax.nn.logsumexp(logits, axis=-1) - logits.mean(axis=-1)
      nll = (1 - self.label_smoothing) * nll + self.label_smoothing * uniform
    hits = (jnp.argmax(logits, axis=-1) == labels) & counted
    return jnp.sum(nll, where=counted) / (len(labels) * self.predictions), jnp.sum(hits, dtype=jnp.int32)

  def zeros(self) -> TextCounts:
    """See `Task.zeros`."""
    return TextCounts.zeros(self.length)

  def count(self, counts: TextCounts, logits: jax.Array, goal: Any) -> tuple[TextCounts, dict[str, jax.Array]]:
    """Keeps `nll`, float32, summed over a window's tokens, and `tokens`, int32, their number."""
    labels, counted = goal
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    sizes = jnp.asarray(self.dataset.tokenizer.sizes)[labels]
    kept = {'nll': jnp.sum(nll, axis=1, where=counted), 'tokens': jnp.sum(counted, axis=1, dtype=jnp.int32)}
    return counts.add(nll, jnp.argmax(logits, axis=-1) == labels, counted, sizes), kept

  def summarize(self, counts: TextCounts) -> dict[str, Any]:
    """See `hbf.evaluation.language.summarize_text`."""
    return summarize_text(counts)

  def detail(self, counts: TextCounts) -> dict[str, Any]:
    """See `hbf.evaluation.language.detail_text`."""
    return detail_text(counts)

  @staticmethod
  def outcomes(kept: Mapping[str, np.ndarray]) -> np.ndarray:
    """Nats of a window over the mean number of its tokens."""
    return kept['nll'] / kept['tokens'].mean()


@dataclasses.dataclass(frozen=True)
class NextToken(Language):
  """Every token is told from those before it."""

  scores: ClassVar[tuple[Score, ...]] = NEXT_TOKEN
  shows: ClassVar[str] = "python -m hbf generate --prompt='The '"

  @property
  def predictions(self) -> int:
    """Every token has a next one."""
    return self.length

  def network(self, model: ConfigDict) -> nn.Module:
    """See `hbf.models.build.build_language_model`."""
    return build_language_model(model, self.dataset.tokenizer.vocabulary, self.length, causal=True)

  def _seen(self, keys: jax.Array, tokens: jax.Array, there: jax.Array) -> ModelBatch:
    del keys
    return ModelBatch(tokens[:, :-1], (tokens[:, 1:], there[:, 1:]))


@dataclasses.dataclass(frozen=True)
class MaskedToken(Language):
  """Some tokens are hidden behind one that stands for all, and told from those around them (Devlin et al. 2019).

  As nobody fine-tunes the networks on texts without it, that token stands for all of those, not for four fifths.
  """

  scores: ClassVar[tuple[Score, ...]] = MASKED_TOKEN
  shows: ClassVar[str] = ''

  @property
  def predictions(self) -> int:
    """As many in every window, 15% of it."""
    return max(1, round(MASKED * self.length))

  def network(self, model: ConfigDict) -> nn.Module:
    """See `hbf.models.build.build_language_model`; the vocabulary has a token more, which hides others."""
    return build_language_model(model, self.dataset.tokenizer.vocabulary + 1, self.length, causal=False)

  def _seen(self, keys: jax.Array, tokens: jax.Array, there: jax.Array) -> ModelBatch:
    tokens, there = tokens[:, :-1], there[:, :-1]
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (self.length,)))(keys)
    hidden = jnp.argsort(jnp.argsort(drawn)) < self.predictions
    return ModelBatch(jnp.where(hidden, self.dataset.tokenizer.vocabulary, tokens), (tokens, hidden & there))
