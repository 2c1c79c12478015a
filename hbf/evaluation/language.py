"""Exact scores of texts, by the position of a token within its window."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from hbf.evaluation import exact
from hbf.evaluation.scores import ACCURACY, BITS_PER_BYTE, PERPLEXITY, TOKEN_NLL


class TextCounts(flax.struct.PyTreeNode):
  """Sums over the batches of a text.

  Attributes:
    nll: float32 [2, T], summed negative log-likelihood in nats of the tokens at each position, see `exact.add`.
    correct: int32 [T], number of tokens to which the model gave the greatest probability.
    tokens: int32 [T], number of tokens.
    bytes: int32, number of bytes of these tokens.
  """

  nll: jax.Array
  correct: jax.Array
  tokens: jax.Array
  bytes: jax.Array

  @classmethod
  def zeros(cls, length: int) -> 'TextCounts':
    """Return the counts of no texts, for windows of T tokens."""
    correct, tokens = (jnp.zeros(length, jnp.int32) for _ in range(2))  # separate arrays, as in `Counts`
    return cls(jnp.zeros((2, length)), correct, tokens, jnp.zeros((), jnp.int32))

  def add(self, nll: jax.Array, correct: jax.Array, counted: jax.Array, sizes: jax.Array) -> 'TextCounts':
    """Add a batch.

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
      bytes=self.bytes + jnp.sum(sizes, where=counted, dtype=jnp.int32),
    )


def summarize_text(counts: TextCounts) -> dict[str, Any]:
  """Return the scores of a text: n and correct (tokens), bytes, and the scores in `NEXT_TOKEN`."""
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll, n = exact.value(c.nll), int(c.tokens.sum(dtype=np.int64))
  total, correct, size = float(nll.sum()), int(c.correct.sum(dtype=np.int64)), int(c.bytes)
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
  """Return `by_position`: the number of tokens, token_nll and accuracy at each position of a window with tokens."""
  c = jax.tree.map(np.asarray, jax.device_get(counts))
  nll = exact.value(c.nll)
  return {
    'by_position': [
      {'position': i, 'n': int(n), TOKEN_NLL.name: float(total) / int(n), ACCURACY.name: 100 * int(correct) / int(n)}
      for i, (total, correct, n) in enumerate(zip(nll, c.correct, c.tokens, strict=True))
      if n
    ],
  }
