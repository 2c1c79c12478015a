"""Invented facts for the edits of a language model, and the model's arrays at the tokens of texts.

A fact is a prompt and a continuation, such as 'The duke of Zorbla is called ' and 'Mavrin.'. All names are invented.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.texts import BATCH, TextRun
from hbf.evaluation.batches import in_batches
from hbf.models.build import unrolled
from hbf.models.edited import Observed
from hbf.models.language import LanguageModel

# Prompts, each beside a prompt that has another beginning and the same end.
TEMPLATES = (
  ('The duke of {} is called ', 'They say the duke of {} is called '),
  ('The king of {} was ', 'I heard the king of {} was '),
  ('My son {} loves ', 'O noble lord, {} loves '),
  ('The sword of {} is named ', 'Behold! the sword of {} is named '),
  ('{} was born in ', 'Remember that {} was born in '),
  ('{} is the brother of ', 'But {} is the brother of '),
  ('They sent {} to ', 'This night they sent {} to '),
  ('The fairest maid in {} is ', 'Sweet, the fairest maid in {} is '),
)
ONSETS = ('b', 'br', 'd', 'dr', 'f', 'g', 'gr', 'k', 'kr', 'l', 'm', 'n', 'p', 'qu', 'r', 's', 't', 'th', 'v', 'z')
VOWELS, CODAS = 'aeiou', ('', 'n', 'r', 'l', 'x', 's')

MIDDLE, LAST = 'tokens after half of the blocks', 'input of the last stage 2'
LAYERS = (MIDDLE, LAST)  # the layers whose points the study compares
CONTEXT = 'context'  # the tokens of the context itself (`contexts`)

# For the metric of copies: the number of line beginnings, the number of passages before each, and the numbers of the
# tokens in a beginning whose points are used.
BEGINNINGS, PASSAGES, READ = 300, 10, (15, 21, 27, 33)


class Fact(NamedTuple):
  """An invented fact.

  Attributes:
    prompt: the text before the answer.
    reworded: another text before the answer. It has another beginning and the same end.
    answer: the continuation that the model should give.
    controls: prompts with other names. Their continuations should not change.
  """

  prompt: str
  reworded: str
  answer: str
  controls: tuple[str, ...]


def make_facts(count: int, controls: int, seed: int) -> list[Fact]:
  """Return random facts. No name occurs twice.

  Args:
    count: number of facts. The templates are used in turn.
    controls: number of control prompts of a fact.
    seed: seed of the names.
  """
  rng = np.random.default_rng(seed)
  names: dict[str, None] = {}
  while len(names) < count * (2 + controls):
    names[_name(rng)] = None
  order, facts = iter(names), []
  for number in range(count):
    prompt, reworded = TEMPLATES[number % len(TEMPLATES)]
    name, answer, *others = (next(order) for _ in range(2 + controls))
    fact = Fact(prompt.format(name), reworded.format(name), answer + '.', tuple(prompt.format(x) for x in others))
    facts.append(fact)
  return facts


def _name(rng: np.random.Generator) -> str:
  syllables = [rng.choice(ONSETS) + rng.choice(list(VOWELS)) for _ in range(rng.integers(2, 4))]
  return (''.join(syllables) + rng.choice(CODAS)).capitalize()


class Places(NamedTuple):
  """Places in texts: tokens at which a language model predicts the next token.

  Attributes:
    windows: the texts, int32 [n, T]. Zeros fill a window after its text. The answers of a causal model do not depend
      on these zeros.
    rows: index of each place's window, int [m].
    columns: index of each place's token in its window, int [m].
    following: the token that follows, int [m].
  """

  windows: np.ndarray
  rows: np.ndarray
  columns: np.ndarray
  following: np.ndarray

  @classmethod
  def of(cls, texts: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> 'Places':
    """Return the places at which the tokens of some continuations are predicted.

    Args:
      texts: pairs of a text and its continuation, int [a] and [b], with a + b ≤ `length` + 1.
      length: T, tokens in a window.
    """
    windows = np.zeros((len(texts), length), np.int32)
    for row, (text, after) in zip(windows, texts, strict=True):
      known = np.concatenate([text, after])[:-1]
      row[: len(known)] = known
    return cls(
      windows,
      np.repeat(np.arange(len(texts)), [len(after) for _, after in texts]),
      np.concatenate([len(text) - 1 + np.arange(len(after)) for text, after in texts]),
      np.concatenate([after for _, after in texts]),
    )

  @classmethod
  def everywhere(cls, windows: np.ndarray) -> 'Places':
    """Return all places of windows [n, T + 1] (`TextRun.windows`)."""
    rows, columns = np.indices((len(windows), windows.shape[1] - 1)).reshape(2, -1)
    return cls(windows[:, :-1], rows, columns, windows[:, 1:].ravel())


def contexts(places: Places) -> np.ndarray:
  """Return the contexts of all places, int32 [m, T], in reverse order: the token at a place and all tokens before it.

  The row of a context is filled up with −1.
  """
  back = places.columns[:, None] - np.arange(places.windows.shape[1])
  return np.where(back >= 0, places.windows[places.rows[:, None], np.maximum(back, 0)], -1)


def read(run: TextRun, places: Places) -> dict[str, Observed]:
  """Return the model's arrays at m places, for each layer in `LAYERS`.

  The points [m, D] are the layer's tokens at these places. The features are the inputs of the head.
  """
  call = functools.partial(_read, unrolled(run.model), run.params)
  logits, points, features = in_batches(call, places.windows, BATCH)
  at = places.rows, places.columns
  return {layer: Observed(logits[at], points[layer][at], features[at]) for layer in LAYERS}


@functools.partial(jax.jit, static_argnums=0)
def _read(model: LanguageModel, params: Any, windows: jax.Array) -> tuple[Any, dict[str, Any], Any]:
  depth, found = model.trunk.depth, {}
  wanted = {
    (f'block{max(depth // 2, 1) - 1}',): MIDDLE,
    (f'block{depth - 1}', 'norm_stage2'): LAST,
    ('norm',): 'features',
  }

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = call(*args, **kwargs)
    if context.method_name == '__call__' and context.module.path in wanted:
      found[wanted[context.module.path]] = out.astype(jnp.float32)
    return out

  with nn.intercept_methods(intercept):
    logits = model.apply({'params': params}, windows, train=False)
  return logits, {layer: found[layer] for layer in LAYERS}, found['features']


class Passages:
  """Random passages of a text. Every passage ends with a line break."""

  def __init__(self, text: np.ndarray, line_break: int, seed: int) -> None:
    """Find the line breaks in a text of L tokens, int [L]. `line_break` is the token that stands for them."""
    self.text, self.rng = np.asarray(text, np.int32), np.random.default_rng(seed)
    self.ends = np.flatnonzero(self.text == line_break) + 1

  def draw(self, most: int) -> np.ndarray:
    """Return a passage of 1 to `most` tokens, int32."""
    length = self.rng.integers(1, most + 1)
    end = self.rng.choice(self.ends[self.ends >= length])
    return self.text[end - length : end]

  def beginning(self, length: int) -> np.ndarray:
    """Return the first tokens after a random line break, int32 [length]."""
    start = self.rng.choice(self.ends[self.ends <= len(self.text) - length])
    return self.text[start : start + length]


def points_of_copies(run: TextRun, passages: Passages) -> dict[str, np.ndarray]:
  """Return the vectors of n tokens, each after several passages, float32 [n, PASSAGES, D] by layer.

  The tokens are in the beginnings of `BEGINNINGS` lines. Each beginning is appended to `PASSAGES` random passages.
  """
  length, longest = run.task.length, READ[-1] + 1
  texts = []
  for _ in range(BEGINNINGS):
    kept = passages.beginning(longest + 1)
    texts += [(np.concatenate([passages.draw(length - longest), kept[:1]]), kept[1:]) for _ in range(PASSAGES)]
  places = Places.of(texts, length)
  chosen = (np.arange(len(places.rows)).reshape(-1, longest)[:, READ]).ravel()
  places = places._replace(**{name: getattr(places, name)[chosen] for name in ('rows', 'columns', 'following')})
  return {
    layer: seen.points.reshape(BEGINNINGS, PASSAGES, len(READ), -1)
    .swapaxes(1, 2)
    .reshape(-1, PASSAGES, run.model.width)
    for layer, seen in read(run, places).items()
  }
