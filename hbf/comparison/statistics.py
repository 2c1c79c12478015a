"""Differences between arms, with confidence intervals over test examples and seeds.

An outcome is the score of a run for one test example, such as 100 for a right answer and 0 for a wrong one.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95
SEEDS = 3  # fewest seeds of an arm for an interval that covers the seeds
BLOCKS = 10  # largest number of blocks of consecutive examples into which a text is divided
DRAWS = 50_000


@dataclasses.dataclass(frozen=True)
class Difference:
  """The mean outcome of an arm minus the mean outcome of the reference arm, with a 95% confidence interval.

  An outcome is the score of a run for one test example.

  Attributes:
    estimate: the difference. Each mean is over all examples and all seeds of an arm.
    low: lower bound of the interval. None if there are fewer than two blocks of examples. In a text, a block has many
      consecutive examples (`block_length`). In other data, each example is a block.
    high: upper bound of the interval. None if `low` is None.
    seeds: True if the interval is over test examples and seeds. False if it is over the examples alone.
  """

  estimate: float
  low: float | None
  high: float | None
  seeds: bool


def differences(arms: Sequence[np.ndarray], length: int = 1, draws: int = DRAWS) -> list[Difference]:
  """Compare arms with the first arm. In 95% of comparisons, all intervals contain their true differences.

  The model is an analysis of variance. All arms see the same examples, but each arm has its own seeds, so seeds are
  not paired. The outcome, or score, of arm a with seed s for example i is

    y[a, s, i] = mean[a] + example[a, i] + seed[a, s] + both[a, s, i].

  All terms but the means are random and independent. The variance of `seed` is τ² for all arms. If arm a has S seeds,
  the reference r has R seeds, and both have n examples, their difference has the variance

    Var_i(mean over s of y[a, s, i] − mean over s of y[r, s, i]) / n + τ² (1/S + 1/R).

  The first term is paired over the examples, and already contains the variance of `both`. The mean outcome of a seed
  has the variance τ² + Var(both)/n. To estimate τ², Var(both)/n is subtracted from the variance of these means. The
  estimate is at least 0. If an arm or the reference has fewer than three seeds, the term with τ² is left out of their
  difference's variance.

  The half length of an interval is the estimated standard error of the difference times a factor. As in Dunnett 1955,
  each difference's error is divided by its estimated standard error, which is random too. The factor is the 95%
  quantile of the largest of these ratios over all differences. The quantile is computed from random draws of the
  model with the estimated variances. It is computed with and without the variation between seeds, and the greater
  value is used.

  References: Obuchowski & Rockette 1995 (the model, with readers in place of seeds); Searle, Casella & McCulloch 1992
  (estimates of variances); Dunnett 1955.

  Args:
    arms: outcomes of each arm, [S, n], for S seeds and n examples. S may differ between arms. The first arm is the
      reference.
    length: number of consecutive examples in a block (`block_length`). 1 for independent examples.
    draws: number of draws from the model.

  Returns:
    The differences from the first arm, one for each other arm.
  """
  n = arms[0].shape[1]
  counts = np.array([len(arm) for arm in arms])
  over_seeds = (counts[1:] >= SEEDS) & (counts[0] >= SEEDS)
  means = np.array([arm.mean(axis=0) for arm in arms])
  others = means[1:] - means[0]
  if n < 2 * length or not len(others):
    return [Difference(float(mean), None, None, False) for mean in others.mean(axis=1)]
  examples = _covariance(others, length)
  noise, within, freedom = _between_seeds(arms, length)
  shares = over_seeds[:, None] * (1 / counts[0] + np.diag(1 / counts[1:])) * over_seeds
  own = max(within - noise, 0.0)

  random = np.random.default_rng(0)
  example_draws = random.multivariate_normal(np.zeros(len(others)), examples, draws, method='eigh')
  seed_draws = random.multivariate_normal(np.zeros(len(others)), own * shares, draws, method='eigh')
  estimated = np.diag(examples) * _relative_variance(random, n / length - 1, draws)
  estimated_own = np.maximum(max(within, noise) * _relative_variance(random, freedom, draws) - noise, 0.0)
  factor = max(
    _quantile(example_draws, estimated),
    _quantile(example_draws + seed_draws, estimated + estimated_own * np.diag(shares)),
  )
  halves = factor * np.sqrt(np.diag(examples + own * shares))
  return [
    Difference(float(mean), float(mean - half), float(mean + half), bool(seeds))
    for mean, half, seeds in zip(others.mean(axis=1), halves, over_seeds, strict=True)
  ]


def difference_of_pairs(ahead: np.ndarray) -> Difference:
  """Return the mean difference of several pairs of runs on the same examples. The pairs may have different recipes.

  The half length of the 95% interval is √(a² + b²). Here a is the normal distribution's, over the examples, and b is
  Student's, over the pairs. The examples add to b too, so the interval is too long: `benchmarks.coverage`.

  Args:
    ahead: for each pair and example, the outcome of the first run minus that of the other, [P, n]. If there are fewer
      than two pairs or examples, the difference has no interval.
  """
  count, n = ahead.shape
  mean = float(ahead.mean())
  if min(count, n) < 2:
    return Difference(mean, None, None, False)
  images = stats.norm.ppf((1 + LEVEL) / 2) * ahead.mean(axis=0).std(ddof=1) / math.sqrt(n)
  half = math.hypot(images, student_half(ahead.mean(axis=1)))
  return Difference(mean, mean - half, mean + half, True)


def student_half(values: np.ndarray) -> float:
  """Return half of the length of Student's 95% confidence interval of a mean, for the values [S] of S seeds."""
  return float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def block_length(examples: int) -> int:
  """Return the number of examples in a block of a text: a tenth of the text, rounded up.

  Neighboring windows of a text are similar, so the differences between models are correlated over more than 60
  windows. So blocks must be long. But an interval needs several blocks: Schmeiser 1982 advises 10 to 30 for any
  correlation. The length is rounded up, so there are about ten blocks. A short text has fewer: 11 examples, 5.5.
  """
  return math.ceil(examples / BLOCKS)


def _covariance(outcomes: np.ndarray, length: int) -> np.ndarray:
  """Return the covariance [K, K] of the means of the K rows of outcomes [K, n], by a block bootstrap.

  The circular block bootstrap (Politis & Romano 1992) draws blocks of consecutive examples. Its covariance has a
  closed form, so no random numbers are needed. With B = n / length blocks, it is multiplied by B / (B − 1). For
  blocks of one example, the result is the ordinary unbiased covariance of the means.
  """
  n = outcomes.shape[1]
  centered = outcomes - outcomes.mean(axis=1, keepdims=True)
  sums = np.cumsum(np.concatenate([0 * centered[:, :1], centered, centered[:, : length - 1]], axis=1), axis=1)
  blocks = (sums[:, length:] - sums[:, :-length]) / length
  return blocks @ blocks.T / n / (n / length - 1)


def _between_seeds(arms: Sequence[np.ndarray], length: int) -> tuple[float, float, int]:
  """Return how much the mean outcomes of an arm's seeds vary, pooled over the arms. Symbols are as in `differences`.

  Returns:
    Three numbers. The first is Var(both)/n, the variance that is due to the finite number of examples. The second is
    the whole variance τ² + Var(both)/n. The third is the degrees of freedom of the whole variance.
  """
  repeated = [arm for arm in arms if len(arm) > 1]
  freedom = sum(len(arm) - 1 for arm in repeated)
  if not freedom:
    return 0.0, 0.0, 1
  within = sum((len(arm) - 1) * arm.mean(axis=1).var(ddof=1) for arm in repeated)
  noise = sum(np.trace(_covariance(arm - arm.mean(axis=0), length)) for arm in repeated)
  return float(noise) / freedom, float(within) / freedom, freedom


def _relative_variance(random: np.random.Generator, freedom: float, draws: int) -> np.ndarray:
  """Draw ratios [draws, 1]: a variance estimated with `freedom` degrees of freedom, divided by the true variance."""
  return random.chisquare(freedom, (draws, 1)) / freedom


def _quantile(drawn: np.ndarray, variances: np.ndarray) -> float:
  """Return the `LEVEL` quantile, over the draws, of the largest ratio |error| / standard error in a draw.

  Args:
    drawn: the errors of K differences in each draw, [draws, K].
    variances: the estimated variances of these errors, [draws, K]. A standard error is the root of a variance.
  """
  ratios = np.divide(np.abs(drawn), np.sqrt(variances), out=np.zeros_like(drawn), where=variances > 0)
  return float(np.quantile(ratios.max(axis=1), LEVEL))
