"""Coverage of the 95% intervals: the share of simulated comparisons whose intervals hold the true differences.

python -m benchmarks.coverage

Images: an answer is right if a sum of normal effects is positive. The effects are those of the arm, of the image,
of each pair of an arm and an image, of the seed, and of each pair of a seed and an image. Arms differ by up to two
points. Texts: outcomes are white noise plus a slow part, which is similar in neighboring windows. All arms have the
same mean.
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.signal import lfilter
from scipy.stats import norm

from benchmarks.common import launch, report
from hbf.comparison.statistics import Difference, block_length, difference_of_pairs, differences

IMAGE, OWN, BOTH = 1.0, 0.4, 0.6  # standard deviations: effect of an image; of arm and image; of seed and image
ARMS = 0.05  # greatest shift of an arm, in the same units
SLOW = 0.3  # share of the slow part in a text's variance

Drawn = tuple[list[np.ndarray], np.ndarray]  # outcomes of the arms, true differences from the first arm


def images(
  random: np.random.Generator, arms: int, seeds: int, n: int, deviation: float, first: float | None = None
) -> Drawn:
  """Draw outcomes [S, n] of arms in percent. Return them with the true differences from the first arm.

  Args:
    random: generator.
    arms: number of arms.
    seeds: number of seeds of each arm.
    n: number of images.
    deviation: standard deviation of an arm's accuracy over seeds, in points, on infinitely many images.
    first: deviation of the first arm. None: the same as `deviation`.
  """
  shifts = 0.25 + ARMS * np.linspace(0, 1, arms)
  total = np.sqrt(IMAGE**2 + OWN**2 + BOTH**2)
  deviations = np.array([deviation if first is None else first] + [deviation] * (arms - 1))
  effects = deviations / 100 / norm.pdf(0.25 / total) * total
  image = IMAGE * random.standard_normal(n)
  outcomes = []
  for shift, effect in zip(shifts, effects, strict=True):
    own = shift + image + OWN * random.standard_normal(n) + effect * random.standard_normal((seeds, 1))
    outcomes.append(100.0 * (own + BOTH * random.standard_normal((seeds, n)) > 0))
  true = 100 * norm.cdf(shifts / np.sqrt(total**2 + effects**2))
  return outcomes, true[1:] - true[0]


def texts(random: np.random.Generator, arms: int, n: int, memory: float) -> Drawn:
  """Draw outcomes [1, n] of consecutive windows. Return them with the true differences.

  Args:
    random: generator.
    arms: number of arms.
    n: number of windows.
    memory: correlation of the slow parts of neighboring windows.
  """
  before = 500  # windows after which the start of the slow part no longer matters
  drawn = random.standard_normal((arms, before + n))
  slow = lfilter([np.sqrt(1 - memory**2)], [1, -memory], drawn)[:, before:]
  fast = random.standard_normal((arms, n))
  outcomes = np.sqrt(SLOW) * slow + np.sqrt(1 - SLOW) * fast
  return list(outcomes[:, None]), np.zeros(arms - 1)


def share(
  times: int, draw: Callable[[np.random.Generator], Drawn], length: int = 1, over_seeds: bool = True
) -> dict[str, float]:
  """Return how often one interval contains its true difference, and how often all of a comparison do, in percent.

  Args:
    times: number of comparisons.
    draw: function of a generator that returns outcomes and true differences.
    length: number of consecutive examples in a block of dependent examples. 1: examples are independent.
    over_seeds: False to treat the mean over the seeds as one seed.
  """

  def compare(outcomes: list[np.ndarray]) -> list[Difference]:
    arms = outcomes if over_seeds else [arm.mean(axis=0, keepdims=True) for arm in outcomes]
    return differences(arms, length, draws=4000)

  return _share(times, draw, compare)


def share_of_pairs(times: int, draw: Callable[[np.random.Generator], Drawn]) -> dict[str, float]:
  """Return how often the interval of a table of pairs contains the true difference of two arms, in percent."""
  return _share(times, draw, lambda arms: [difference_of_pairs(arms[1] - arms[0])])


def _share(
  times: int,
  draw: Callable[[np.random.Generator], Drawn],
  compare: Callable[[list[np.ndarray]], list[Difference]],
) -> dict[str, float]:
  held = []
  for time in range(times):
    outcomes, true = draw(np.random.default_rng(time))
    held.append(list(map(_holds, compare(outcomes), true)))
  return {'one, %': 100 * float(np.mean(held)), 'all, %': 100 * float(np.mean(np.all(held, axis=1)))}


def _holds(difference: Difference, true: float) -> bool:
  return difference.low is not None and difference.high is not None and difference.low <= true <= difference.high


def rows(times: int) -> Iterator[dict[str, Any]]:
  """Yield the row of every case."""
  cases = [(arms, 3, deviation, None) for arms in (2, 3, 6) for deviation in (0.0, 0.5, 1.0)]
  for arms, seeds, deviation, first in (*cases, (6, 5, 0.5, None), (3, 3, 0.25, 1.0)):

    def draw(random: np.random.Generator, case: tuple = (arms, seeds, 2000, deviation, first)) -> Drawn:
      return images(random, *case)

    spread = f'{deviation} points' + (f', of the first {first}' if first else '')
    for over_seeds in (True, False):
      about = {'examples': '2,000 images', 'arms': arms, 'seeds': seeds, 'sd of seeds': spread}
      how = 'images and seeds' if over_seeds else 'images alone'
      yield about | {'interval': how} | share(times, draw, over_seeds=over_seeds)
  for seeds in (2, 3, 5):
    for deviation in (0.0, 0.5, 1.0):

      def draw_pairs(random: np.random.Generator, case: tuple = (2, seeds, 2000, deviation)) -> Drawn:
        return images(random, *case)

      about = {'examples': '2,000 images', 'arms': 2, 'seeds': seeds, 'sd of seeds': f'{deviation} points'}
      yield about | {'interval': 'pairs of runs'} | share_of_pairs(times, draw_pairs)
  for n, memory in ((436, 0.0), (436, 0.9), (436, 0.98), (1743, 0.98)):

    def draw_text(random: np.random.Generator, case: tuple = (3, n, memory)) -> Drawn:
      return texts(random, *case)

    for length in (block_length(n), 1):
      about = {'examples': f'{n:,} windows', 'arms': 3, 'seeds': 1, 'sd of seeds': ''}
      how = f'blocks of {length}, slow part {memory}'
      yield about | {'interval': how} | share(times, draw_text, length)


def main() -> None:
  """Print a row for every case."""
  flags = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
  flags.add_argument('--times', type=int, default=2000, help='number of comparisons in every case')
  flags.add_argument('--out', type=pathlib.Path, help='JSON file; default runs/benchmarks/coverage.json')
  options = flags.parse_args()
  title = f'Share of 95% intervals that contain the true difference, in {options.times:,} simulated comparisons'
  report('coverage', title, list(rows(options.times)), options.out)


if __name__ == '__main__':
  launch(main)
