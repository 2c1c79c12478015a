"""Table and picture of the accuracy after the attacks APGD and Square, from `hbf.analysis.attack_study`.

An attack changes the value of a pixel, from 0 to 255, by at most `levels`. If `levels` is 0, there is no attack. The
stored numbers have a row for each run, attack and value of `levels`.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from scipy import stats

from hbf import markdown
from hbf.analysis.report.names import network_name
from hbf.analysis.report.seeds import about_intervals, over_seeds, text
from hbf.analysis.report.stored import Measured, Row, models, rows_of_runs
from hbf.comparison.figures import plt, write_png
from hbf.comparison.statistics import differences
from hbf.evaluation.outliers import Estimate


def table(measured: Measured) -> str:
  """Return a Markdown table with a row for each model and each number of `levels`, and notes below the table."""
  images = measured['rows'][0]['images']  # all attacks change the same images
  header = (
    'network',
    'greatest change of a pixel',
    f'right of {images:,} after APGD, %',
    'after Square, %',
    'after both, %',
    'fooled by Square, not by APGD',
    'queries of Square, median',
  )
  lines = [_line(measured, model, levels) for levels in _levels(measured) for model in models(measured)]
  seeds = [len(_rights(measured, model, 0, ('APGD',))) for model in models(measured)]
  notes = [about_intervals(seeds), *_differences(measured)]
  return markdown.table(header, lines) + '\n\n' + '\n'.join(notes)


def _line(measured: Measured, model: str, levels: int) -> tuple[str, ...]:
  """Return the cells of the row for a model and `levels`, the greatest change of a pixel."""
  name, change = network_name(model), f'{levels}/255' if levels else 'no attack'
  after_apgd = text(_accuracy(_rights(measured, model, levels, ('APGD',))))
  if levels not in _levels(measured, model=model, attack='Square'):
    return name, change, after_apgd, '', '', '', ''
  if not levels:
    return name, change, after_apgd, after_apgd, after_apgd, '', ''
  both, apgd, square = (
    _rights(measured, model, levels, attacks) for attacks in (('APGD', 'Square'), ('APGD',), ('Square',))
  )
  alone = sum(int((one & ~other).sum()) for one, other in zip(apgd, square, strict=True))
  queries = [row['median_queries'] for (row,) in _rows(measured, model, ('Square',), levels)]
  median = f'{np.mean(queries):.0f}' if None not in queries else ''
  return name, change, after_apgd, *(text(_accuracy(z)) for z in (square, both)), str(alone), median


def _levels(measured: Measured, **wanted: str) -> list[int]:
  """Return 0, for no attack, and the values of `levels` in the rows with values such as attack='Square'.

  Return [] if there is no such row.
  """
  found = sorted({row['levels'] for row in measured['rows'] if wanted.items() <= row.items()})
  return [0, *found] if found else []


def _name(attack: str, levels: int) -> str:
  return f'{attack} at {levels}/255'


def _rows(measured: Measured, model: str, attacks: Sequence[str], levels: int) -> list[list[Row]]:
  """Return a list for each of a model's runs: the stored rows of `attacks`, which change a pixel by at most `levels`.

  Raises:
    UserError: a run lacks one of the attacks.
  """
  wanted = [_name(attack, levels) for attack in attacks]
  return rows_of_runs(measured, model, lambda row: _name(row['attack'], row['levels']), wanted)


def _right(row: Row) -> np.ndarray:
  return np.array([character == '0' for character in row['fooled']])


def _rights(measured: Measured, model: str, levels: int, attacks: Sequence[str]) -> list[np.ndarray]:
  """Return an array for each run, bool [images]: True for an image that is classified right after each of `attacks`.

  An attack changes a pixel by at most `levels`. If `levels` is 0, only the number of right answers is stored. Then an
  array has that many True at its beginning, and its order does not say which images are right.

  Raises:
    UserError: a run lacks one of the attacks.
  """
  if not levels:
    rows = _rows(measured, model, attacks[:1], _levels(measured)[1])
    return [np.arange(row['images']) < row['right'] for (row,) in rows]
  return [np.logical_and.reduce([*map(_right, of_run)]) for of_run in _rows(measured, model, attacks, levels)]


def _accuracy(rights: Sequence[np.ndarray]) -> Estimate:
  """Return the accuracy in percent, with a 95% interval.

  For each seed, the interval over images is Wilson's. `over_seeds` joins the accuracies and intervals of the seeds.

  Args:
    rights: an array for each seed, with True for an image with a right answer, bool [images].
  """
  estimates = []
  for right in rights:
    interval = stats.binomtest(int(right.sum()), len(right)).proportion_ci(method='wilson')
    estimates.append(Estimate(100 * right.mean(), 100 * interval.low, 100 * interval.high))
  return over_seeds(estimates)


def _differences(measured: Measured) -> list[str]:
  """Return a sentence for each strength of APGD and each model but the first.

  It states the model's accuracy after APGD minus the first model's accuracy after APGD. The strength is the greatest
  change of a pixel.
  """
  first, *others = models(measured)
  lines = []
  for levels in _levels(measured)[1:]:
    arms = [100.0 * np.array(_rights(measured, model, levels, ('APGD',))) for model in (first, *others)]
    for other, found in zip(others, differences(arms), strict=True):
      names = f'{network_name(other)} − {network_name(first)}'
      interval = f'{found.estimate:+.1f} ({found.low:+.1f} to {found.high:+.1f})'
      lines.append(f'{names} after APGD at {levels}/255: {interval} points, paired over images.')
  return lines


def draw(measured: Measured, path: pathlib.Path) -> None:
  """Write a PNG: the share of right answers against the greatest change of a pixel, for each model and attack."""
  figure, axis = plt.subplots(figsize=(6, 4), layout='constrained')
  for number, model in enumerate(models(measured)):
    for attack, style, shift in (('APGD', 'o-', 0.0), ('Square', 's--', 0.12)):
      levels = _levels(measured, model=model, attack=attack)
      if not levels:
        continue
      found = [_accuracy(_rights(measured, model, z, (attack,))) for z in levels]
      values = np.array([estimate.value for estimate in found])
      errors = np.array([[e.value - e.low, e.high - e.value] for e in found]).T
      places = np.arange(len(levels)) + shift + 0.06 * number
      label = f'{network_name(model)}, {attack}'
      axis.errorbar(places, values, errors, fmt=style, color=f'C{number}', label=label, capsize=2, markersize=4)
  labels = [f'{levels}/255' if levels else 'no attack' for levels in _levels(measured)]
  axis.set_xticks(range(len(labels)), labels)
  axis.set(xlabel='greatest change of a pixel', ylabel='right answers, %', ylim=(-3, 100))
  axis.grid(alpha=0.3)
  axis.legend(loc='lower left')
  write_png(figure, path)
