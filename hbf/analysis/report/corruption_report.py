"""Table and picture of the accuracy on corrupted images, from `hbf.analysis.corruption_study`.

The stored numbers have a row for each run and corruption, such as fog. A row covers all strengths of the corruption.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from hbf import markdown
from hbf.analysis.report.names import network_name
from hbf.analysis.report.seeds import about_intervals, over_seeds, text
from hbf.analysis.report.stored import Measured, Row, models, rows_of_runs
from hbf.comparison.figures import plt, write_png
from hbf.comparison.statistics import LEVEL, differences
from hbf.data.augment.corruptions import CORRUPTIONS, GROUPS, STRENGTHS
from hbf.evaluation.outliers import Estimate

NONE, ALL = 'none', 'mean of all corruptions'


def table(measured: Measured) -> str:
  """Return a Markdown table, and a note below it.

  For each corruption and each group of corruptions, such as weather, the table has a row for each model. The last
  column is the first model's accuracy minus the accuracy of the row's model, with a 95% interval that is paired over
  images.

  Raises:
    UserError: a run lacks a corruption.
  """
  first, *others = models(measured)
  strengths = [f'strength {strength}' for strength in STRENGTHS]
  header = ('corruption', 'network', *strengths, 'mean', f'{network_name(first)} − network')
  lines = [
    _line(measured, label, names, model, first) for label, names in _labeled().items() for model in (first, *others)
  ]
  seeds = [len(_outcomes(measured, model, [NONE])) for model in (first, *others)]
  return markdown.table(header, lines) + '\n\n' + about_intervals(seeds)


def _line(measured: Measured, label: str, names: Sequence[str], model: str, first: str) -> tuple[str, ...]:
  """Return the cells of a row: a model's accuracy under the corruptions `names`.

  The last cell compares the model with the model `first`.
  """
  curve = [f'{value:.1f}' for value in _by_strength(measured, model, names)] if names != (NONE,) else []
  ahead = '' if model == first else _signed(_ahead(measured, first, model, names))
  mean = text(_accuracy(_outcomes(measured, model, names)))
  return label, network_name(model), *(curve or [''] * len(STRENGTHS)), mean, ahead


def _labeled() -> dict[str, tuple[str, ...]]:
  """Return the names of the corruptions that a row of the table is about, by the row's label."""
  singles = {name.replace('_', ' '): (name,) for name in (NONE, *CORRUPTIONS)}
  return singles | {f'mean of {group}': names for group, names in GROUPS.items()} | {ALL: tuple(CORRUPTIONS)}


def _rows(measured: Measured, model: str, names: Sequence[str]) -> list[list[Row]]:
  """Return a list for each of a model's runs: the stored rows of the corruptions `names`.

  Raises:
    UserError: a run lacks a corruption.
  """
  said = [f'the corruption {name}' for name in names]
  return rows_of_runs(measured, model, lambda row: f'the corruption {row["corruption"]}', said)


def _outcomes(measured: Measured, model: str, names: Sequence[str]) -> np.ndarray:
  """Return an array [runs, images]: the percentage of right answers to the corrupted versions of each image.

  There is a version for each of the corruptions `names` at each strength.
  """

  def shares(row: Row) -> np.ndarray:
    return 100 * np.array([*map(int, row['right'])]) / len(row['accuracy'])

  return np.array([np.mean([shares(row) for row in rows], axis=0) for rows in _rows(measured, model, names)])


def _by_strength(measured: Measured, model: str, names: Sequence[str]) -> np.ndarray:
  """Return the accuracies [strengths] in percent, as means over the corruptions `names` and the model's runs."""
  return np.mean([[row['accuracy'] for row in rows] for rows in _rows(measured, model, names)], axis=(0, 1))


def _accuracy(outcomes: np.ndarray) -> Estimate:
  """Return the mean of the outcomes [runs, images] (`_outcomes`), with its 95% interval (`over_seeds`)."""
  quantile = float(stats.norm.ppf((1 + LEVEL) / 2))
  halves = quantile * outcomes.std(axis=1, ddof=1) / np.sqrt(outcomes.shape[1])
  means = map(float, outcomes.mean(axis=1))
  return over_seeds([Estimate(mean, mean - half, mean + half) for mean, half in zip(means, halves, strict=True)])


def _ahead(measured: Measured, first: str, other: str, names: Sequence[str]) -> Estimate:
  """Return model `first`'s accuracy minus model `other`'s, under the corruptions `names`, paired over images."""
  [found] = differences([_outcomes(measured, model, names) for model in (other, first)])
  assert found.low is not None and found.high is not None  # there are at least two images
  return Estimate(found.estimate, found.low, found.high)


def _signed(difference: Estimate) -> str:
  return f'{difference.value:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})'


def draw(measured: Measured, path: pathlib.Path) -> None:
  """Write a PNG of two halves.

  The left half shows the models' accuracies by strength, for each group of corruptions. The right half shows the
  first model's accuracy minus each other model's accuracy, for each corruption and each group.
  """
  figure = plt.figure(figsize=(11, 6), layout='constrained')
  halves: Any = figure.subfigures(1, 2, width_ratios=(1.25, 1))
  left, right = halves
  panels = left.subplots(2, 2, sharex=True, sharey=True)
  for axis, (group, names) in zip(panels.flat, GROUPS.items(), strict=True):
    _draw_group(axis, measured, names)
    axis.set(title=group, xticks=range(len(STRENGTHS) + 1))
    axis.grid(alpha=0.3)
  panels[0, 0].legend(loc='lower left')
  left.supxlabel('strength of the corruption (0: none)', fontsize='medium')
  left.supylabel('accuracy, %', fontsize='medium')
  _draw_differences(right.subplots(), measured)
  write_png(figure, path)


def _draw_group(axis: Any, measured: Measured, names: Sequence[str]) -> None:
  for number, model in enumerate(models(measured)):
    clean = _outcomes(measured, model, [NONE]).mean()
    curve = [clean, *_by_strength(measured, model, names)]
    axis.plot(curve, 'os^v'[number % 4] + '-', color=f'C{number}', label=network_name(model), markersize=4)


def _draw_differences(axis: Any, measured: Measured) -> None:
  """Draw the first model's accuracy minus each other model's accuracy, for each corruption and each group of them."""
  first, *others = models(measured)
  labels = _labeled()
  for number, other in enumerate(others):
    found = [_ahead(measured, first, other, names) for names in labels.values()]
    values = [z.value for z in found]
    errors = np.array([[z.value - z.low, z.high - z.value] for z in found]).T
    places = np.arange(len(labels)) + 0.2 * number
    label = f'{network_name(first)} − {network_name(other)}'
    axis.errorbar(values, places, xerr=errors, fmt='o', color=f'C{number + 2}', label=label, capsize=2, markersize=4)
    axis.legend(loc='best', fontsize=8)
  axis.axvline(0, color='gray', linestyle=':')
  axis.set_yticks(range(len(labels)), labels)
  axis.invert_yaxis()
  axis.set(xlabel='difference of accuracies, points', title='differences, paired over images')
  axis.grid(alpha=0.3)
