"""Table and picture of methods that correct answers to single images, from `hbf.analysis.edit_study`.

An edit corrects the answer to one image. Copies are transformed versions of this image. The edit should correct the
answers to them too.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.analysis.report.names import network_name
from hbf.comparison.figures import plt, write_png

AFTER = ('copies', 'others')  # scores after many edits in the picture


def _methods(measured: Mapping[str, Any]) -> list[str]:
  return [*dict.fromkeys(row['method'] for row in measured['rows'])]


def _rows(measured: Mapping[str, Any], model: str, method: str) -> list[Mapping[str, Any]]:
  return [row for row in measured['rows'] if (row['model'], row['method']) == (model, method)]


def table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each model and method.

  Cells have means and standard deviations over seeds.
  """
  most = max(after['edits'] for row in measured['rows'] for after in row['many'])
  header = (
    'network',
    'method',
    'edited image right, %',
    'its copies right, %',
    'other answers changed, %',
    f'after up to {most:,} edits: edited right, %',
    'copies right, %',
    'accuracy on images that are never edited, %',
  )
  lines = []
  for model in dict.fromkeys(row['model'] for row in measured['rows']):
    for method in _methods(measured):
      rows = _rows(measured, model, method)
      alone = [mean_of([row['alone'][key] for row in rows]) for key in ('edited', 'copies', 'changed')]
      ends = [row['many'][-1] for row in rows if row['many']]
      if method == 'no edit':
        before = [
          row['many'][-1]['others_before'] for row in measured['rows'] if row['model'] == model and row['many']
        ]
        many = ['', '', mean_of(before)]
      else:
        many = [mean_of([after[key] for after in ends]) for key in ('edited', 'copies', 'others')]
      lines.append((network_name(model), method, *alone, *many))
  return markdown.table(header, lines)


def mean_of(values: Sequence[float]) -> str:
  """Return the mean over the seeds as text. With several seeds, their standard deviation follows in parentheses."""
  if len(values) < 2:
    return f'{np.mean(values):.2f}'
  return f'{np.mean(values):.2f} ({np.std(values, ddof=1):.2f})'


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with three panels for the first model.

  The left panel has a marker for each choice of a method's options that was tried for single edits. The other panels
  are about many edits: the right answers to copies of the edited images, and the wrong answers to images that are
  never edited.
  """
  model = measured['rows'][0]['model']
  figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout='constrained')
  for number, method in enumerate(name for name in _methods(measured) if name != 'no edit'):
    style = {'color': f'C{number}', 'marker': 'osv^DPX*x+'[number % 10], 'label': method, 'markerfacecolor': 'none'}
    rows = _rows(measured, model, method)
    trials = sorted(rows[0]['trials'], key=lambda trial: trial['changed'])
    left.plot([max(t['changed'], 1e-3) for t in trials], [t['copies'] for t in trials], linestyle='', **style)
    after_edits = [{after['edits']: after for after in row['many']} for row in rows]
    counts = sorted(set.intersection(*map(set, after_edits)))  # seeds with fewer mistakes have fewer edits
    copies, others = (np.mean([[found[n][key] for n in counts] for found in after_edits], axis=0) for key in AFTER)
    middle.plot(counts, copies, **style)
    right.plot(counts, 100 - others, **style)  # a logarithmic axis keeps methods with little damage apart
  left.axvline(0.2, color='gray', linestyle=':')
  left.set(
    xscale='log', xlabel='other answers changed, % (held-out images)', ylabel='copies of the edited image right, %'
  )
  left.set_title('one edit: all trials')
  middle.set(xscale='log', xlabel='edits', ylabel='copies of the edited images right, %', title='many edits: success')
  right.set(xscale='log', yscale='log', xlabel='edits', ylabel='wrong answers to other images, %')
  right.set_title('many edits: damage')
  for axis in (left, middle, right):
    axis.grid(alpha=0.3)
  figure.legend(*middle.get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=8)
  write_png(figure, path)
