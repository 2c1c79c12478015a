"""Exact scores of a language model on a text, in total and for each position in a window."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation import exact
from hbf.evaluation.scores import ACCURACY, BITS_PER_BYTE, PERPLEXITY, TOKEN_NLL


class TextCounts(flax.struct.PyTreeNode):
  """Sums over all windows of a text, with a separate sum for each of the T positions in a window.

  Attributes:
    nll: float32 [2, T], the sum of the negative log-likelihoods in nats of the tokens at each position, and the
      rounding error of this sum; see `exact.add`.
    correct: int32 [T], number of tokens at each position to which the model gave the greatest probability.
    tokens: int32 [T], number of tokens at each position.
    bytes: int32 [T], number of bytes of the tokens at each position. The sum over all positions may exceed int32.
  """

  nll: jax.Array
  correct: jax.Array
  tokens: jax.Array
  bytes: jax.Array

  @classmethod
  def zeros(cls, length: int) -> 'TextCounts':
    """Return counts that are all 0, for windows of `length` tokens."""
    correct, tokens, size = (jnp.zeros(length, jnp.int32) for _ in range(3))  # separate arrays, as in `Counts`
    return cls(jnp.zeros((2, length)), correct, tokens, size)

  def add(self, nll: jax.Array, correct: jax.Array, counted: jax.Array, sizes: jax.Array) -> 'TextCounts':
    """Return these counts plus the counts of a batch.

    Args:
      nll: negative log-likelihood of each token in nats, [B, T].
      correct: booleans [B, T]. True where the token had the greatest probability.
      counted: booleans [B, T]. True for the tokens that count.
      sizes: number of bytes of each token, [B, T].
    """
    return TextCounts(
      nll=exact.add(self.nll, jnp.sum(nll, axis=0, where=counted)),
      correct=self.correct + jnp.sum(correct & counted, axis=0, dtype=jnp.int32),
      tokens=self.tokens + jnp.sum(counted, axis=0, dtype=jnp.int32),
      bytes=self.bytes + jnp.sum(sizes, axis=0, where=counted, dtype=jnp.int32),
    )


def summarize_text(counts: TextCounts) -> dict[str, Any]:
  """Return the scores of a text.

  Returns:
    A dictionary. `n` is the number of tokens, `correct` the number of correctly predicted tokens, and `bytes` the
    number of bytes. The other keys are the scores in `hbf.evaluation.scores.NEXT_TOKEN`.
  """
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll, n = exact.value(c.nll), int(c.tokens.sum(dtype=np.int64))
  total, (correct, size) = float(nll.sum()), (int(count.sum(dtype=np.int64)) for count in (c.correct, c.bytes))
  return {
    'n': n,
    'correct': correct,
    'bytes': size,
    TOKEN_NLL.name: total / n,
    PERPLEXITY.name: float(np.exp(total / n)),
    BITS_PER_BYTE.name: total / size / float(np.log(2)),
    ACCURACY.name: 100 * correct / n,
  }


def detail_text(counts: TextCounts) -> dict[str, Any]:
  """Return the scores for each position in a window.

  Returns:
    A dictionary with the key `by_position`, a list. It has an entry for each position at which tokens were counted.
    The entry has the index of the position, the number `n` of tokens, `token_nll` in nats, and `accuracy` in percent.
  """
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll = exact.value(c.nll)
  return {
    'by_position': [
      {'position': i, 'n': int(n), TOKEN_NLL.name: float(total) / int(n), ACCURACY.name: 100 * int(correct) / int(n)}
      for i, (total, correct, n) in enumerate(zip(nll, c.correct, c.tokens, strict=True))
      if n
    ],
  }
