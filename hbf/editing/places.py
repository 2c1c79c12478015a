"""Places: positions in texts at which a language model predicts the next token. Outputs of the model at places."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError
from hbf.models.build import unrolled
from hbf.models.edited import FEATURES, LAST, MIDDLE, Observed, layers_of_tokens
from hbf.models.language import LanguageModel

BATCH = 16  # windows
LAYERS = (MIDDLE, LAST)

# For the metric of copies: the number of line beginnings, the number of passages before each, and the indices of the
# tokens in a beginning whose points are used.
BEGINNINGS, PASSAGES, READ = 300, 10, (15, 21, 27, 33)
FULL, SHORTEST = 64, 8  # windows of fewer tokens than FULL read earlier tokens; fewer than SHORTEST are too few


class Places(NamedTuple):
  """m places in n texts. A place is the position of a token after which the model predicts the next token.

  Attributes:
    windows: the texts, int32 [n, T]. Zeros fill a window after its text. The answers of a causal model do not depend
      on these zeros.
    rows: index of each place's window, int [m], in ascending order.
    columns: index of each place's token in its window, int [m].
    following: the token that follows each place in its text, int [m].
  """

  windows: np.ndarray
  rows: np.ndarray
  columns: np.ndarray
  following: np.ndarray

  @classmethod
  def of(cls, texts: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> 'Places':
    """Return the places at which a model predicts the tokens of given continuations.

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
    """Return all places of windows [n, T + 1]. The last token of a window is not a place, but only a target."""
    rows, columns = np.indices((len(windows), windows.shape[1] - 1)).reshape(2, -1)
    return cls(windows[:, :-1], rows, columns, windows[:, 1:].ravel())


def spaced_windows(text: np.ndarray, length: int, most: int) -> np.ndarray:
  """Return n ≤ `most` windows of a text, evenly spaced, int32 [n, T + 1].

  A row has the T tokens of a window, and then the token after it, which a model predicts but does not read.

  Args:
    text: the tokens, int [L].
    length: T, tokens in a window.
    most: the largest number of windows.

  Raises:
    UserError: the text is shorter than one window.
  """
  whole = (len(text) - 1) // length
  if whole < 1:
    raise UserError(f'a text of {len(text)} tokens is shorter than a window of {length} and one more: give more text')
  starts = evenly_spaced(whole, most) * length
  return np.stack([np.asarray(text[start : start + length + 1], np.int32) for start in starts])


def read(model: LanguageModel, params: Any, places: Places) -> dict[str, Observed]:
  """Return the logits, the points and the inputs of the head at m places, by layer.

  The point of a place is the vector of its token in the layer, so the points are [m, D]. The keys of the result are
  those names in `LAYERS` whose layer the model has.
  """
  logits, layers = _at_places(functools.partial(_read, unrolled(model), params), places)
  features = layers.pop(FEATURES)
  return {layer: Observed(logits, points, features) for layer, points in layers.items()}


def _at_places(function: Callable[[np.ndarray], Any], places: Places) -> Any:
  """Apply a function to the windows of m places, in batches. Return its arrays at the places.

  Only the arrays at the places are kept, because the logits of whole windows may not fit into memory.

  Args:
    function: a function from windows [B, T] to a tree of arrays [B, T, …].
    places: the places.

  Returns:
    A tree with the structure of `function`'s result. Its leaves are NumPy arrays [m, …].
  """
  windows, parts = places.windows, []
  for start in range(0, len(windows), BATCH):
    batch = windows[np.minimum(np.arange(start, start + BATCH), len(windows) - 1)]  # one size, so one program
    own = slice(*np.searchsorted(places.rows, (start, start + BATCH)))
    chosen = operator.itemgetter((places.rows[own] - start, places.columns[own]))
    parts.append(jax.tree.map(chosen, jax.device_get(function(batch))))
  return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


@functools.partial(jax.jit, static_argnums=0)
def _read(model: LanguageModel, params: Any, windows: jax.Array) -> tuple[Any, dict[str, Any]]:
  return layers_of_tokens(model, lambda: model.apply({'params': params}, windows, train=False))


@functools.partial(jax.jit, static_argnums=0)
def _points(model: LanguageModel, params: Any, windows: jax.Array) -> dict[str, Any]:
  """Return the tokens of the layers in `LAYERS`. XLA drops the computation of the logits."""
  _, layers = _read(model, params, windows)
  return {layer: tokens for layer, tokens in layers.items() if layer in LAYERS}


class Passages:
  """Random passages of a text, to put before other texts.

  Every passage ends with a line break, unless no line break has enough text before and after it.
  """

  def __init__(self, text: np.ndarray, line_break: int, seed: int, longest: int = 0) -> None:
    """Find the positions at which passages may end.

    Args:
      text: the tokens, int [L].
      line_break: the token of a line break. −1: there is none.
      seed: the seed of the passages.
      longest: the greatest number of tokens that `draw` or `beginning` will return. If no line break has this many
        tokens before and after it, passages end anywhere.
    """
    self.text, self.rng = np.asarray(text, np.int32), np.random.default_rng(seed)
    self.ends = np.flatnonzero(self.text == line_break) + 1
    if not np.any((self.ends >= longest) & (self.ends <= len(self.text) - longest)):
      self.ends = np.arange(1, len(self.text) + 1)

  def draw(self, most: int) -> np.ndarray:
    """Return a passage of 1 to `most` tokens, int32."""
    length = self.rng.integers(1, most + 1)
    end = self.rng.choice(self.ends[self.ends >= length])
    return self.text[end - length : end]

  def beginning(self, length: int) -> np.ndarray:
    """Return `length` tokens, int32 [length], from a random position at which a passage may end.

    If passages end with line breaks, the tokens are the beginning of a line.
    """
    start = self.rng.choice(self.ends[self.ends <= len(self.text) - length])
    return self.text[start : start + length]


def points_of_copies(model: LanguageModel, params: Any, passages: Passages) -> dict[str, np.ndarray]:
  """Return the points of tokens that the model reads several times, each time after another passage.

  `hbf.editing.guard.metric_of` computes the metric of copies from these points. The tokens come from the first words
  of `BEGINNINGS` lines of the text. The model reads the first words of a line `PASSAGES` times.

  Returns:
    The points float32 [n, PASSAGES, D] of n tokens, by layer.

  Raises:
    UserError: the windows of the model are too short to hold a passage and a beginning.
  """
  length = model.length
  if length < SHORTEST:
    raise UserError(f'the model reads {length} tokens at most: expected {SHORTEST} or more (data.length)')
  columns = np.array(READ) * min(length, FULL) // FULL
  longest, texts = columns[-1] + 1, []
  for _ in range(BEGINNINGS):
    kept = passages.beginning(longest + 1)
    texts += [(np.concatenate([passages.draw(length - longest), kept[:1]]), kept[1:]) for _ in range(PASSAGES)]
  places = Places.of(texts, length)
  chosen = (np.arange(len(places.rows)).reshape(-1, longest)[:, columns]).ravel()
  places = places._replace(**{name: getattr(places, name)[chosen] for name in ('rows', 'columns', 'following')})
  return {
    layer: points.reshape(BEGINNINGS, PASSAGES, len(READ), -1).swapaxes(1, 2).reshape(-1, PASSAGES, model.width)
    for layer, points in _at_places(functools.partial(_points, unrolled(model), params), places).items()
  }
