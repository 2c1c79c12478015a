"""Combination of the estimates from several seeds of one model into one estimate."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from hbf.comparison.statistics import SEEDS, student_half
from hbf.evaluation.outliers import Estimate


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
  """Return the mean of the estimates of a model's seeds, in percent, with its 95% confidence interval.

  All seeds are measured on the same images, so the images' part of the interval does not shrink with more seeds. If
  there are fewer than three seeds, the interval is over images alone. Otherwise it is over seeds and images, and its
  half length is √(a² + b²). Here a is the half length over images, as a mean over the seeds, and b is the half length
  of Student's interval over seeds. The finite number of images already adds to b, so the interval is a bit too long.

  Args:
    estimates: an estimate for each seed, with an interval over images.
  """
  values = np.array([estimate.value for estimate in estimates])
  below = float(np.mean([estimate.value - estimate.low for estimate in estimates]))
  above = float(np.mean([estimate.high - estimate.value for estimate in estimates]))
  mean, count = float(values.mean()), len(values)
  if count < SEEDS:
    return Estimate(mean, mean - below, mean + above)
  half = student_half(values)
  return Estimate(mean, max(0.0, mean - math.hypot(below, half)), min(100.0, mean + math.hypot(above, half)))


def about_intervals(counts: Collection[int]) -> str:
  """Return a note on the intervals in tables and pictures. `counts` has the number of seeds of each network."""
  fewest, most = min(counts), max(counts)
  if most == 1:
    return 'One seed of each network. Intervals are over images and say nothing about other seeds.'
  means = f'Means of {fewest} seeds of each network.' if fewest == most else f'Means of {fewest} to {most} seeds.'
  if most < SEEDS:
    return f'{means} Intervals are over images alone.'
  if fewest < SEEDS:
    return f'{means} Intervals are over seeds and images, or over images alone for fewer than {SEEDS} seeds.'
  return f'{means} Intervals are over seeds and images.'


def text(estimate: Estimate) -> str:
  """Return an estimate as the text of a table cell."""
  return f'{estimate.value:.1f} ({estimate.low:.1f}–{estimate.high:.1f})'
