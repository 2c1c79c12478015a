"""Tests of intervals: against scipy's where those are known, and of their coverage."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.coverage import images, share, share_of_pairs, texts
from hbf.comparison.statistics import block_length, difference_of_pairs, differences


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape)


def bounds(difference):
  return difference.low, difference.high


def test_of_two_models_with_a_seed_each_the_interval_is_students_over_paired_examples():
  reference, ours = normal(1, 30), normal(1, 30, seed=1)
  (found,) = differences([reference, ours])
  expected = stats.ttest_rel(ours[0], reference[0])
  width = np.ptp(expected.confidence_interval())
  assert found.estimate == pytest.approx((ours - reference).mean())
  assert bounds(found) == pytest.approx(tuple(expected.confidence_interval()), abs=0.01 * width)
  assert not found.seeds


def test_where_seeds_are_all_that_varies_the_intervals_are_dunnetts():
  arms = [normal(4, 1, seed=seed) * np.ones((1, 20)) for seed in range(4)]
  found = differences(arms)
  expected = stats.dunnett(*(arm[:, 0] for arm in arms[1:]), control=arms[0][:, 0]).confidence_interval()
  for difference, low, high in zip(found, expected.low, expected.high, strict=True):
    assert bounds(difference) == pytest.approx((low, high), abs=0.01 * (high - low))
    assert difference.seeds


def test_where_pairs_are_all_that_varies_their_interval_is_students():
  ahead = normal(4, 1) * np.ones((1, 50))
  found = difference_of_pairs(ahead)
  expected = stats.ttest_1samp(ahead[:, 0], 0).confidence_interval()
  assert bounds(found) == pytest.approx(tuple(expected)) and found.estimate == pytest.approx(ahead.mean())


def test_where_examples_are_all_that_varies_the_interval_of_pairs_is_over_examples():
  found = difference_of_pairs(normal(1, 50) * np.ones((4, 1)))
  half = 1.96 * stats.sem(normal(1, 50)[0])
  assert bounds(found) == pytest.approx((found.estimate - half, found.estimate + half), rel=1e-3)


def test_one_pair_has_no_interval():
  assert bounds(difference_of_pairs(normal(1, 50))) == (None, None)


@pytest.mark.parametrize('pairs', [2, 3])
def test_intervals_of_pairs_hold_the_true_difference_as_often_as_they_say(pairs):
  for deviation in (0.0, 1.0):
    held = share_of_pairs(200, lambda random, deviation=deviation: images(random, 2, pairs, 400, deviation))
    assert held['one, %'] >= 91  # 95% less 2.6 standard errors


def test_noise_that_the_examples_cause_is_counted_once():
  """Outcomes are noise that is independent for each seed and example. So the term for seeds must add nothing."""
  random = np.random.default_rng(0)
  widths = []
  for _ in range(40):
    (found,) = differences([random.normal(size=(20, 100)) for _ in range(2)], draws=2000)
    widths.append((found.high - found.low) / 2)
  assert np.mean(widths) == pytest.approx(1.96 * np.sqrt(2 / (20 * 100)), rel=0.15)  # twice the noise: 1.41 times


def test_seeds_widen_the_interval_and_below_three_are_left_out():
  arms = [normal(2, 200, seed=seed) + normal(2, 1, seed=9 + seed) for seed in range(2)]
  (few,) = differences(arms)
  (alone,) = differences([arm.mean(axis=0, keepdims=True) for arm in arms])
  assert (few.seeds, bounds(few)) == (False, pytest.approx(bounds(alone)))
  more = [np.concatenate([arm, arm[:1] + 0.1 * normal(1, 200)]) for arm in arms]
  (found,) = differences(more)
  (alone,) = differences([arm.mean(axis=0, keepdims=True) for arm in more])
  assert found.seeds
  assert found.high - found.low > 1.5 * (alone.high - alone.low)


def test_pairing_over_examples_narrows_the_interval():
  reference = normal(1, 400)
  ours = reference + 0.3 * normal(1, 400, seed=1)
  (paired,), (shuffled,) = (differences([other, ours]) for other in (reference, reference[:, ::-1]))
  assert paired.high - paired.low < 0.5 * (shuffled.high - shuffled.low)


def test_equal_models_differ_by_nothing():
  ours = normal(3, 100)
  (found,) = differences([ours, ours - ours.mean(axis=1, keepdims=True) + ours.mean()], draws=100)
  assert found.low < found.estimate < found.high
  assert bounds(differences([ours[:1], ours[:1]])[0]) == (0, 0)


@pytest.mark.parametrize('length', [1, 7])
def test_the_closed_form_is_the_variance_that_drawing_blocks_gives(length):
  ours, reference = np.cumsum(normal(1, 70)) % 3, normal(1, 70, seed=1)
  (found,) = differences([reference, ours[None]], length)
  blocks = 70 // length
  starts = np.random.default_rng(2).integers(70, size=(20_000, blocks, 1))
  drawn = (ours - reference[0])[(starts + np.arange(length)) % 70].mean(axis=(1, 2))
  half = stats.t.ppf(0.975, blocks - 1) * drawn.std() * np.sqrt(blocks / (blocks - 1))
  assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.03)


@pytest.mark.parametrize(('examples', 'expected'), [(1, 1), (9, 1), (436, 44), (1743, 175)])
def test_a_block_is_a_tenth_of_a_text(examples, expected):
  assert block_length(examples) == expected


def test_a_text_has_at_most_ten_blocks_and_a_long_text_about_ten():
  blocks = [examples / block_length(examples) for examples in range(1, 2000)]
  assert max(blocks) == 10 and min(blocks[80:]) == 9 and blocks[:11] == [*range(1, 11), 5.5]


def test_a_text_of_one_window_has_no_interval():
  (found,) = differences([normal(1, 1), normal(1, 1, seed=1)], block_length(1))
  assert bounds(found) == (None, None)
  assert differences([normal(1, 5)]) == []


def test_intervals_hold_the_truth_as_often_as_they_say():
  held = share(150, lambda random: images(random, arms=3, seeds=3, n=300, deviation=2.0))['all, %']
  assert 90 <= held <= 99  # 95 expected, with standard deviation 1.8
  alone = share(150, lambda random: images(random, arms=3, seeds=3, n=300, deviation=2.0), over_seeds=False)['all, %']
  assert alone < held - 5


def test_blocks_hold_what_single_windows_miss():
  blocks, single = (share(100, lambda random: texts(random, 2, 400, 0.9), length)['one, %'] for length in (40, 1))
  assert single < 80 < 87 <= blocks
