"""Intervals against scipy's own and against their meaning."""

import numpy as np
import pytest
from scipy import stats

from hbf.comparison.statistics import over_examples, over_seeds


def test_interval_over_seeds_is_students():
  ours, reference = [57.1, 56.2, 58.0, 56.9], [56.0, 56.4, 57.1, 56.2]
  interval = over_seeds(ours, reference)
  expected = stats.ttest_rel(ours, reference).confidence_interval(0.95)
  assert interval.estimate == pytest.approx(0.625)
  assert (interval.low, interval.high) == pytest.approx(tuple(expected))


def test_one_seed_gives_a_difference_without_bounds():
  interval = over_seeds([57.0], [56.5])
  assert (interval.estimate, interval.low, interval.high) == (0.5, None, None)


def paired_outcomes(rng, n, seeds=2):
  """Two models that agree on most examples: the first right where the second is, but for a few of each kind."""
  reference = rng.random((seeds, n)) < 0.6
  flipped = rng.random((seeds, n)) < 0.1
  return np.where(flipped, ~reference, reference), reference


def test_bootstrap_over_examples_is_that_of_scipy():
  ours, reference = paired_outcomes(np.random.default_rng(0), 4000)
  interval = over_examples(100 * ours, 100 * reference)
  of_example = 100 * (ours.mean(axis=0) - reference.mean(axis=0))
  expected = stats.bootstrap((of_example,), np.mean, n_resamples=4000, method='percentile', rng=1, batch=100)
  assert interval.estimate == pytest.approx(100 * (ours.mean() - reference.mean()))
  width = interval.high - interval.low
  assert interval.low == pytest.approx(expected.confidence_interval.low, abs=0.05 * width)
  assert interval.high == pytest.approx(expected.confidence_interval.high, abs=0.05 * width)


def test_intervals_over_examples_cover_the_truth_as_often_as_they_say():
  rng = np.random.default_rng(2)
  covered = 0
  for _ in range(200):
    ours, reference = rng.random((1, 500)) < 0.65, rng.random((1, 500)) < 0.6
    interval = over_examples(100 * ours, 100 * reference)
    covered += interval.low <= 5.0 <= interval.high
  assert 180 <= covered <= 198  # 190 expected, of standard deviation 3


def test_pairing_narrows_the_interval():
  rng = np.random.default_rng(3)
  ours, reference = paired_outcomes(rng, 4000, seeds=1)
  paired, shuffled = (
    over_examples(100 * ours, 100 * other) for other in (reference, rng.permuted(reference, axis=1))
  )
  assert paired.high - paired.low < 0.7 * (shuffled.high - shuffled.low)


def test_equal_models_differ_by_nothing():
  ours, _ = paired_outcomes(np.random.default_rng(4), 100)
  interval = over_examples(ours, ours)
  assert (interval.estimate, interval.low, interval.high) == (0, 0, 0)
