"""Differences with their intervals."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95
RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Interval:
  """An estimate with the bounds of its 95% confidence interval, None where the data allow none."""

  estimate: float
  low: float | None
  high: float | None


def over_seeds(ours: Sequence[float], reference: Sequence[float]) -> Interval:
  """Mean difference of figures paired by seed, with Student's interval: would other seeds show it?

  Args:
    ours: [S], one figure a seed.
    reference: [S], of the same seeds.
  """
  differences = np.subtract(ours, reference)
  mean, n = float(differences.mean()), len(differences)
  if n < 2:
    return Interval(mean, None, None)
  half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * differences.std(ddof=1) / math.sqrt(n))
  return Interval(mean, mean - half, mean + half)


def over_examples(ours: np.ndarray, reference: np.ndarray) -> Interval:
  """Difference of mean outcomes with a paired bootstrap over the examples: would other test examples show it?

  An example counts with its mean over the seeds, so the seeds are taken as they are. Reference: Efron & Tibshirani
  1993, percentile intervals.

  Args:
    ours: [S, n], the outcome of each example with each seed's model, such as 100 where it was classified correctly.
    reference: [S, n], of the same seeds and examples.
  """
  differences = ours.mean(axis=0) - reference.mean(axis=0)
  # Of hits few different values occur: drawing n examples with replacement is drawing how often each value occurs.
  values, counts = np.unique(differences.round(9), return_counts=True)
  n = len(differences)
  drawn = np.random.default_rng(0).multinomial(n, counts / n, RESAMPLES) @ values / n
  low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return Interval(float(differences.mean()), float(low), float(high))
