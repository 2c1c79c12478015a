"""Table and picture of methods that teach facts to a language model, from `hbf.analysis.text_edit_study`.

A fact is a prompt with an invented name, and the answer that the model should write after it.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.analysis.report.edit_report import mean_of
from hbf.analysis.report.names import network_name
from hbf.comparison.figures import plt, write_png

SCORES = ('prompt', 'copies', 'reworded', 'controls', 'changed')
LINES = {'copies': 'facts written after a passage, %', 'bits': 'bits per character of other text'}


def table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each model and method.

  Cells have means and standard deviations over seeds. Bits per character have means only.
  """
  most = max(after['facts'] for row in measured['rows'] for after in row['many'])
  header = (
    'network',
    'method',
    'one fact: after its prompt, %',
    'after a passage, %',
    'reworded prompt, %',
    'other names changed, %',
    'other answers changed, %',
    f'{most} facts: after their prompts, %',
    'after a passage, %',
    'other names changed, %',
    'other answers changed, %',
    'bits per character',
  )
  lines = []
  for model, method in dict.fromkeys((row['model'], row['method']) for row in measured['rows']):
    rows = [row for row in measured['rows'] if (row['model'], row['method']) == (model, method)]
    ends = [row['many'][-1] for row in rows if row['many']]
    one = [mean_of([row['alone'][key] for row in rows]) for key in SCORES]
    if ends:
      after = [mean_of([end[key] for end in ends]) for key in SCORES if key != 'reworded']
      bits = _bits([end['bits'] for end in ends])
    else:
      after, bits = [''] * 4, _bits([row['alone']['bits'] for row in rows])
    lines.append((network_name(model), method, *one, *after, bits))
  return markdown.table(header, lines)


def _bits(values: Sequence[float]) -> str:
  return f'{np.mean(values):.3f}'


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with three panels for the first model.

  The left panel has a marker for each choice of a method's options that was tried for single facts. The other panels
  show the scores in `LINES` against the number of facts that the model was taught.
  """
  rows = [row for row in measured['rows'] if row['model'] == measured['rows'][0]['model']]
  figure, (left, *panels) = plt.subplots(1, 3, figsize=(15, 4.6), layout='constrained')
  colors, markers = [*(f'C{number}' for number in range(10)), 'black'], 'osv^DPX*x+<'
  for number, method in enumerate(dict.fromkeys(row['method'] for row in rows if row['many'])):
    style = {'color': colors[number % 11], 'marker': markers[number % 11], 'label': method, 'markerfacecolor': 'none'}
    own = [row for row in rows if row['method'] == method]
    trials = own[0]['trials']
    left.plot([t['controls'] for t in trials], [t['copies'] for t in trials], linestyle='', **style)
    counts = [after['facts'] for after in own[0]['many']]
    for axis, key in zip(panels, LINES, strict=True):
      axis.plot(counts, np.mean([[after[key] for after in row['many']] for row in own], axis=0), **style)
  before = np.mean([row['alone']['bits'] for row in rows if row['method'] == 'no edit'])
  panels[1].axhline(before, color='gray', linestyle=':')
  panels[1].set_ylim(before - 0.01, before + 0.2)  # methods that replace answers are far above
  left.set(xlabel='other names changed, % (held-out facts)', ylabel=LINES['copies'], title='one fact: all trials')
  for axis, title, label in zip(panels, ('many facts: success', 'many facts: damage'), LINES.values(), strict=True):
    axis.set(xscale='log', xlabel='facts', ylabel=label, title=title)
  for axis in (left, *panels):
    axis.grid(alpha=0.3)
  figure.legend(*left.get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=8)
  write_png(figure, path)
