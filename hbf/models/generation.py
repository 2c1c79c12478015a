"""Generation of texts by a causal language model, one token at each step, with a cache of earlier tokens."""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hbf.errors import UserError
from hbf.models.build import unrolled
from hbf.models.language import LanguageModel
from hbf.options import NOT_NEGATIVE, Values, whole

_PROBABILITY = Values(numbers.Real, 'a probability above 0 and up to 1', lambda p: 0 < p <= 1)


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The way to draw the next token from logits.

  Attributes:
    temperature: divisor of the logits. 0: always the likeliest token.
    top_k: draw from the k likeliest tokens only. 0: from all.
    top_p: draw from the smallest set of likeliest tokens whose total probability is at least this number (Holtzman et
      al. 2020). 1: from all.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self) -> None:
    """Check the values.

    Raises:
      UserError: a value is outside its range.
    """
    NOT_NEGATIVE.check('temperature', self.temperature)
    whole(0).check('top_k', self.top_k, ' tokens; 0 is for all')
    _PROBABILITY.check('top_p', self.top_p)

  def draw(self, key: jax.Array, logits: Float[Array, ' V']) -> Int[Array, '']:
    """Draw a token, int32 [], from logits [V]."""
    if self.temperature == 0:
      return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / self.temperature
    if 0 < self.top_k < len(logits):
      logits = jnp.where(logits < jax.lax.top_k(logits, self.top_k)[0][-1], -jnp.inf, logits)
    if self.top_p < 1:
      ranked = jnp.sort(logits, descending=True)
      likelihood = jax.nn.softmax(ranked)
      likelier = jnp.cumsum(likelihood) - likelihood
      logits = jnp.where(logits < jnp.min(ranked, where=likelier < self.top_p, initial=jnp.inf), -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def generate(
  model: LanguageModel,
  variables: Any,
  prompts: Sequence[Sequence[int]],
  count: int,
  sampling: Sampling = Sampling(),
  seed: int = 0,
  stop: int | None = None,
) -> list[np.ndarray]:
  """Continue prompts, which may have different lengths.

  The tokens drawn for a prompt depend only on the seed, the prompt and its index in `prompts`.

  Args:
    model: a causal model.
    variables: variables of the model.
    prompts: tokens of each prompt. A prompt has at least one token.
    count: largest number of tokens to write after each prompt.
    sampling: the way to draw tokens.
    seed: seed of the draws.
    stop: a token that ends a text, and is not part of the text. None: no token ends a text.

  Returns:
    The tokens that follow each prompt, int32.

  Raises:
    UserError: the model is not causal, there is no prompt, `count` is below 1, or a prompt is wrong. A wrong prompt
      is empty, has tokens outside the vocabulary, or is longer than the model's length if `count` tokens are added.
  """
  _check(model, prompts, count)
  return _generate(model, variables, prompts, count, sampling, jax.random.key(seed), stop)


def generate_on(
  model: LanguageModel,
  variables: Any,
  prompts: Sequence[Sequence[int]],
  count: int,
  sampling: Sampling = Sampling(),
  seed: int = 0,
  stop: int | None = None,
) -> list[np.ndarray]:
  """Continue texts like `generate`, but also beyond the model's length.

  When a text has reached the model's length, the model forgets all but the last `length // 2` tokens. It reads these
  tokens again, as the beginning of a text, and continues this text.

  Raises:
    UserError: as in `generate`, but a prompt may be longer. A prompt plus one token, not plus `count` tokens, must
      fit into the model's length.
  """
  whole(1).check('count', count)
  _check(model, prompts, 1)
  texts, ended, part = [list(prompt) for prompt in prompts], [False] * len(prompts), 0
  while not all(ended):
    # In the first part, the model reads the prompts. After it, every text that has not ended has the model's length.
    read = [text[-(model.length // 2) :] if part else text for text in texts]
    rooms = [model.length - len(text) for text in read]
    key = jax.random.fold_in(jax.random.key(seed), part)
    room = max(room for room, end in zip(rooms, ended, strict=True) if not end)
    new = _generate(model, variables, read, min(count, room), sampling, key, stop)
    for i, more in enumerate(new):
      if not ended[i]:
        texts[i] += more.tolist()
        ended[i] = len(more) < rooms[i] or len(texts[i]) >= len(prompts[i]) + count
    part += 1
  return [np.array(text[len(p) :][:count], np.int32) for text, p in zip(texts, prompts, strict=True)]


def _check(model: LanguageModel, prompts: Sequence[Sequence[int]], count: int) -> None:
  if not model.causal:
    raise UserError('a model that is not causal cannot continue a text: train a causal one')
  if count < 1 or not len(prompts):
    raise UserError(f'nothing to write: {len(prompts)} prompts, {count} tokens each')
  for number, prompt in enumerate(prompts):
    if not len(prompt):
      raise UserError(f'prompt {number} is empty: give it at least one token')
    if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
      raise UserError(
        f'prompt {number} has tokens from {min(prompt)} to {max(prompt)}: 0 to {model.vocabulary - 1} are known'
      )
    if len(prompt) + count > model.length:
      raise UserError(
        f'prompt {number} has {len(prompt)} tokens, and {count} more are asked for: the model has room for '
        f'{model.length}; cut the prompt, or ask for fewer'
      )


def _generate(
  model: LanguageModel,
  variables: Any,
  prompts: Sequence[Sequence[int]],
  count: int,
  sampling: Sampling,
  key: jax.Array,
  stop: int | None,
) -> list[np.ndarray]:
  """Continue texts like `generate`, at most to the model's length."""
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  filled = np.zeros((len(prompts), lengths.max()), np.int32)
  for row, prompt in zip(filled, prompts, strict=True):
    row[: len(prompt)] = prompt
  written = np.asarray(_write(unrolled(model), count, sampling, stop, variables, filled, lengths, key))
  return [row[: np.argmax(row < 0)] if np.any(row < 0) else row for row in written]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _write(
  model: LanguageModel,
  count: int,
  sampling: Sampling,
  stop: int | None,
  variables: Any,
  prompts: jax.Array,
  lengths: jax.Array,
  key: jax.Array,
) -> jax.Array:
  """Return the tokens that follow prompts [B, P] of the given lengths, int32 [B, count]. −1: the text has ended."""

  def read(cache: Any, tokens: jax.Array, start: jax.Array, length: jax.Array) -> tuple[jax.Array, Any]:
    """Run the model on the first `length` of the tokens [T], which follow `start` tokens in the cache.

    Return the logits [V] of the token after these tokens, and the new cache.
    """
    mask = jnp.arange(len(tokens)) < length
    logits, cache = model.apply(
      {**variables, **cache}, tokens[None], train=False, mask=mask[None], start=start, mutable=['cache']
    )
    return logits[0, length - 1], cache

  def step(state: tuple[jax.Array, Any, jax.Array, jax.Array, jax.Array]) -> Any:
    i, cache, logits, written, going = state
    of_step = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
    tokens = jax.vmap(sampling.draw)(of_step, logits)
    going &= (lengths + i < model.length) & (tokens != (-1 if stop is None else stop))
    written = written.at[:, i].set(jnp.where(going, tokens, -1))
    logits, cache = jax.vmap(read, (0, 0, 0, None))(cache, tokens[:, None], lengths + i, one)
    return i + 1, cache, logits, written, going

  one = jnp.int32(1)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(prompts)))
  logits, cache = jax.vmap(read, (None, 0, None, 0))({}, prompts, jnp.int32(0), lengths)
  start = jnp.int32(0), cache, logits, jnp.full((len(prompts), count), -1, jnp.int32), jnp.ones(len(prompts), bool)
  return jax.lax.while_loop(lambda state: (state[0] < count) & state[-1].any(), step, start)[3]
