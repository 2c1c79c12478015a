"""Table and picture of outlier scores, from `hbf.analysis.outlier_study`.

Outliers are images of data sets other than the training data, the outlier data sets. An outlier score is a number
for each image, which should be lower for outliers than for test images. AUROC is the probability, in percent, that a
random outlier has a lower score than a random test image.
"""

import pathlib

import numpy as np

from hbf import markdown
from hbf.analysis.report.names import network_name
from hbf.analysis.report.seeds import about_intervals, over_seeds, text
from hbf.analysis.report.stored import Measured, models
from hbf.comparison.figures import plt, write_png
from hbf.evaluation.outliers import Estimate


def _outside(measured: Measured) -> list[str]:
  """Return the names of the outlier data sets on which all runs were measured."""
  first, *others = (row['scores'] for row in measured['rows'])
  return [name for name in first if all(name in scores for scores in others)]


def _scores(measured: Measured) -> list[str]:
  """Return the names of the outlier scores that at least one model has. Scores of a single block are left out."""
  rows = measured['rows']
  names = dict.fromkeys(score for row in rows for found in row['scores'].values() for score in found)
  return [name for name in names if ', block' not in name]


def _estimate(measured: Measured, model: str, outside: str, score: str, measure: str = 'auroc') -> Estimate | None:
  """Return how well a model's outlier score separates test images from outliers, over the model's seeds.

  Return None if the model has no such score. `outside` is the name of the outlier data set. `measure` is 'auroc' or
  'fpr95' (`hbf.evaluation.outliers.Separation`).
  """
  found = [row['scores'][outside].get(score) for row in measured['rows'] if row['model'] == model]
  return over_seeds([Estimate(**values[measure]) for values in found]) if all(found) else None


def table(measured: Measured) -> str:
  """Return a Markdown table and a note below it.

  The table has a row for each model and score. A column has the AUROC for an outlier data set.
  """
  header = ('network', 'score', *(f'{name}: AUROC, %' for name in _outside(measured)))
  lines = []
  for model in models(measured):
    for score in _scores(measured):
      found = [_estimate(measured, model, outside, score) for outside in _outside(measured)]
      if all(found):
        lines.append((network_name(model), score, *(text(estimate) for estimate in found if estimate)))
  seeds = [sum(row['model'] == model for row in measured['rows']) for model in models(measured)]
  return markdown.table(header, lines) + '\n\n' + about_intervals(seeds)


def draw(measured: Measured, path: pathlib.Path) -> None:
  """Write a PNG with a panel for each outlier data set. A panel shows the AUROC of each score and model."""
  outside, scores = _outside(measured), _scores(measured)
  figure, axes = plt.subplots(1, len(outside), figsize=(3 + 2.4 * len(outside), 4), sharey=True, layout='constrained')
  for axis, name in zip(np.atleast_1d(axes), outside, strict=True):
    for number, model in enumerate(models(measured)):
      found = {place: _estimate(measured, model, name, score) for place, score in enumerate(scores)}
      kept = {place: z for place, z in found.items() if z}
      values = np.array([z.value for z in kept.values()])
      errors = np.array([(z.value - z.low, z.high - z.value) for z in kept.values()]).T
      places = np.array([*kept]) + 0.25 * number
      style = {'color': f'C{number}', 'marker': 'os^v'[number % 4], 'markersize': 5, 'capsize': 2, 'linestyle': ''}
      axis.errorbar(values, places, xerr=errors, label=network_name(model), **style)
    axis.axvline(50, color='gray', linestyle=':')
    axis.set(xlim=(-2, 102), xlabel='AUROC, %', title=name)
    axis.grid(alpha=0.3)
  first = np.atleast_1d(axes)[0]
  first.set_yticks(range(len(scores)), scores)
  first.invert_yaxis()
  first.legend(loc='lower left', fontsize=8)
  write_png(figure, path)
