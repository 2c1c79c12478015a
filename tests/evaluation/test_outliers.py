"""Tests of AUROC against scikit-learn and pair counts, and of how often its intervals contain the true value."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from hbf.errors import UserError
from hbf.evaluation.outliers import auroc_difference, energy_score, separation, softmax_score

RANDOM = np.random.default_rng(0)


def draw_scores(n, m, apart, random=RANDOM):
  return random.normal(apart, 1, n), random.normal(0, 1, m)


@pytest.mark.parametrize('digits', [0, 1, 12])  # few digits make ties
def test_auroc_and_fpr_are_those_of_scikit_learn(digits):
  inside, outside = (z.round(digits) for z in draw_scores(300, 200, 1.0))
  found = separation(inside, outside)
  labels, scores = np.r_[np.ones(300), np.zeros(200)], np.r_[inside, outside]
  assert found.auroc.value == pytest.approx(100 * roc_auc_score(labels, scores))
  pairs = (inside[:, None] > outside).mean() + (inside[:, None] == outside).mean() / 2
  assert found.auroc.value == pytest.approx(100 * pairs)
  false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
  assert found.fpr95.value == pytest.approx(100 * false[np.argmax(true >= 0.95)])


def test_scores_are_greater_for_surer_answers():
  logits = np.array([[5.0, 0.0, 0.0], [1.0, 1.0, 1.0], [500.0, 0.0, 0.0]])
  np.testing.assert_allclose(softmax_score(logits), [np.exp(5) / (np.exp(5) + 2), 1 / 3, 1])
  np.testing.assert_allclose(energy_score(logits), [np.log(np.exp(5) + 2), 1 + np.log(3), 500])


def test_intervals_hold_the_truth_as_often_as_they_say():
  random, apart, hits, paired = np.random.default_rng(1), 1.5, 0, 0
  truth = 100 * stats.norm.cdf(apart / np.sqrt(2))
  for _ in range(400):
    inside, outside = draw_scores(80, 60, apart, random)
    found = separation(inside, outside).auroc
    hits += found.low <= truth <= found.high
    noisier = inside + random.normal(0, 0.5, 80), outside + random.normal(0, 0.5, 60)
    difference = auroc_difference((inside, outside), noisier)
    expected = truth - 100 * stats.norm.cdf(apart / np.sqrt(2 * 1.25))
    paired += difference.low <= expected <= difference.high
  assert 0.92 <= hits / 400 <= 0.98
  assert 0.92 <= paired / 400 <= 0.98


@pytest.mark.parametrize(('n', 'm', 'apart'), [(80, 60, 1.5), (1000, 300, 1.5), (300, 1000, 3.0)])
def test_the_interval_of_the_fpr_knows_that_the_threshold_is_estimated(n, m, apart):
  """Wilson's interval for a known threshold contains the truth in about 70 of 100 cases."""
  random, truth = np.random.default_rng(2), 100 * stats.norm.sf(apart + stats.norm.ppf(0.05))
  intervals = [separation(*draw_scores(n, m, apart, random)).fpr95 for _ in range(400)]
  assert 0.92 <= np.mean([z.low <= truth <= z.high for z in intervals]) <= 0.99
  assert all(z.low <= z.value <= z.high for z in intervals)


def test_where_all_are_told_apart_the_intervals_are_not_points():
  random, apart = np.random.default_rng(3), 3.5
  truth = 100 * stats.norm.cdf(apart / np.sqrt(2)), 100 * stats.norm.sf(apart + stats.norm.ppf(0.05))
  found = [separation(*draw_scores(12, 10, apart, random)) for _ in range(400)]
  perfect = [z for z in found if z.auroc.value == 100]
  assert len(perfect) > 100
  assert all(z.auroc.low < truth[0] < z.auroc.high == 100 for z in perfect)
  assert all(z.fpr95.low == z.fpr95.value == 0 and truth[1] < z.fpr95.high < 100 for z in perfect)


def test_perfect_and_no_separation():
  low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
  best, worst = separation(high, low), separation(low, high)
  assert best.auroc.value == 100 and best.fpr95.value == 0
  assert worst.auroc.value == 0 and worst.fpr95.value == 100
  assert worst.auroc.high == pytest.approx(100 - best.auroc.low)
  same = np.arange(50.0)
  found = separation(same, same)
  assert found.auroc.value == pytest.approx(50) and found.auroc.low < 50 < found.auroc.high
  assert auroc_difference((same, same), (same, same)).value == 0


def test_too_few_or_invalid_scores_are_refused():
  with pytest.raises(UserError, match='1 examples outside'):
    separation(np.zeros(3), np.zeros(1))
  with pytest.raises(UserError, match='1 of the 2 scores inside are NaN'):
    separation(np.array([0.0, np.nan]), np.zeros(3))
  with pytest.raises(UserError, match='same examples'):
    auroc_difference((np.zeros(3), np.zeros(3)), (np.zeros(4), np.zeros(3)))
