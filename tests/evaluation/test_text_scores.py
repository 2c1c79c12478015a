"""Tests of the scores of texts against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.evaluation.language import TextCounts, detail_text, summarize_text


def test_scores_equal_a_naive_computation_in_float64():
  random = np.random.default_rng(0)
  nll, hits = random.gamma(2.0, 1.0, (40, 6, 5)).astype(np.float32), random.random((40, 6, 5)) < 0.4
  counted, sizes = random.random((40, 6, 5)) < 0.8, random.integers(1, 5, (40, 6, 5))
  counts, add = TextCounts.zeros(5), jax.jit(TextCounts.add)
  for batch in zip(nll, hits, counted, sizes, strict=True):
    counts = add(counts, *map(jnp.asarray, batch))
  found, total = summarize_text(counts), float(nll[counted].sum(dtype=np.float64))
  assert (found['n'], found['correct'], found['bytes']) == (
    counted.sum(),
    (hits & counted).sum(),
    sizes[counted].sum(),
  )
  assert found['token_nll'] == pytest.approx(total / counted.sum(), rel=1e-6)
  assert found['perplexity'] == pytest.approx(np.exp(total / counted.sum()), rel=1e-6)
  assert found['bits_per_byte'] == pytest.approx(total / sizes[counted].sum() / np.log(2), rel=1e-6)
  for row in detail_text(counts)['by_position']:
    at_position = counted[:, :, row['position']]
    assert row['n'] == at_position.sum()
    expected = nll[:, :, row['position']][at_position].mean(dtype=np.float64)
    assert row['token_nll'] == pytest.approx(expected, rel=1e-6)


def test_sums_over_millions_of_tokens_stay_exact():
  """Sums in float32 alone would be wrong by about a thousandth."""
  nll, steps = jnp.full((50, 4), 1.1), 20_000
  counted = jnp.ones((50, 4), bool)
  step = jax.jit(lambda i, counts: counts.add(nll, counted, counted, jnp.ones((50, 4), jnp.int32)))
  found = summarize_text(jax.lax.fori_loop(0, steps, step, TextCounts.zeros(4)))
  assert found['n'] == 200 * steps
  assert found['token_nll'] == pytest.approx(float(np.float32(1.1)), rel=1e-7)


def test_a_text_may_have_more_bytes_than_a_number_of_32_bits_holds():
  """A few tokens of many bytes stand for many tokens."""
  counted, sizes = np.ones((1, 4), bool), np.full((1, 4), 2**30, np.int32)
  counts = jax.jit(TextCounts.add)(TextCounts.zeros(4), np.float32(sizes), counted, counted, sizes)
  found = summarize_text(counts)
  assert found['bytes'] == 2**32 and found['bits_per_byte'] == pytest.approx(1 / np.log(2))
