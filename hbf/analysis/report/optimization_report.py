"""Tables and picture of refits and of AGOPs, from `hbf.analysis.optimization_study`.

A refit replaces the weights of one linear layer of a trained network by new weights, from Gauss–Newton steps or from
Adam. The average gradient outer product (AGOP) of a block is compared with matrices [D, D] that are made from the
parameters of the block's stage 2 (`hbf.analysis.agop`).
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf import markdown
from hbf.analysis.report.names import network_name
from hbf.comparison.figures import plt, write_png

Network = Mapping[str, Any]
MATRICES = {
  'metric': 'WᵀW',
  'centers': 'TᵀT',
  'slopes': 'UᵀU',
  'centers and slopes': 'TᵀT/σ⁴ + UᵀU',
  'weights': 'W₁W₁ᵀ',
}
PARTS = {'all': 'all entries', 'off_diagonal': 'off the diagonal', 'diagonal': 'on the diagonal'}


def name(network: Network) -> str:
  """Return a network's name for tables and pictures.

  It contains the metric of stage 2 unless the metric is the identity.
  """
  metric = network['stage2'].get('metric', 'identity')
  found = network_name(network['model'])
  return found if metric == 'identity' else f'{found}, metric {metric}'


def tables(measured: Mapping[str, Any]) -> str:
  """Return two tables in Markdown: the refits, and the correlations of AGOPs with matrices of stage 2."""
  return f'{refit_table(measured)}\n\n{agop_table(measured)}'


def refit_table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each network and refit."""
  header = (
    'network',
    'layer',
    'start',
    'loss to minimize',
    'steps',
    'held-out loss: before → after',
    'test accuracy, %',
    'test cross-entropy',
    'operations of the steps',
  )
  lines = []
  for network in measured['networks']:
    for number, row in enumerate(network['refits']):
      about = (name(network), row['layer'], row['start'])
      if not number:
        lines.append((*about, 'no refit', '0', '', *_scores(row['tests'][0]), '0'))
      steps, losses, operations = '1', '', '0'
      if 'rounds' in row:
        steps = f'{row["epochs"]} epochs' if 'epochs' in row else str(len(row['tests']) - 1)
        losses = f'{row["before"]:.4f} → {row["rounds"][-1]["held_out"]:.4f}'
        operations = f'{row["operations"]:.1e}'.replace('e+', 'e')
      lines.append((*about, row['loss'], steps, losses, *_scores(row['tests'][-1]), operations))
  return markdown.table(header, lines)


def _scores(found: Mapping[str, float]) -> tuple[str, str]:
  return f'{found["accuracy"]:.2f}', f'{found["nll"]:.4f}'


def agop_table(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table with a row for each network, matrix of stage 2 and block.

  A cell has the correlation of the block's AGOP with the matrix, in the trained or the untrained network. In a column
  'random', a cell has the 97.5% quantile of the AGOP's correlations with random matrices.
  """
  header = (
    'network',
    'matrix',
    'block',
    *(f'{state}, {label}' for label in PARTS.values() for state in ('trained', 'untrained', 'random')),
  )
  lines = []
  for network in measured['networks']:
    for row in _trained(network):
      start = _untrained(network, row)
      cells = []
      for part in PARTS:
        drawn = row['random'][part] if part in row['agop'] else ()
        cells += [_correlation(row, part), _correlation(start, part), f'{drawn[2]:.2f}' if drawn else '']
      lines.append((name(network), MATRICES[row['matrix']], str(_number(row)), *cells))
  return markdown.table(header, lines)


def _trained(network: Network) -> list[Mapping[str, Any]]:
  rows = [row for row in network['agop'] if row['state'] == 'trained']
  return sorted(rows, key=lambda row: ([*MATRICES].index(row['matrix']), _number(row)))


def _number(row: Mapping[str, Any]) -> int:
  """Return the number of a row's block."""
  return int(row['block'].removeprefix('block'))


def _untrained(network: Network, row: Mapping[str, Any]) -> Mapping[str, Any]:
  """Return the untrained network's row for the same block and the same matrix as in `row`."""
  key = (row['block'], row['matrix'])
  return next(z for z in network['agop'] if z['state'] == 'untrained' and (z['block'], z['matrix']) == key)


def _correlation(row: Mapping[str, Any], part: str) -> str:
  return f'{row["agop"][part]:.2f}' if part in row['agop'] else ''


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with two panels.

  The left panel shows the test accuracy against the operations, for refits of stage 2 that start from
  coefficients of 0. The right panel shows the correlation of each block's AGOP with the matrices of its stage 2.
  """
  figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), layout='constrained')
  for number, network in enumerate(measured['networks']):
    _draw_refits(left, network, f'C{number}')
  left.set(xlabel='floating-point operations of the steps', ylabel='test accuracy, %')
  left.set_title('last stage 2 refit from coefficients of 0')
  number = 0
  for network in measured['networks']:
    for matrix in dict.fromkeys(row['matrix'] for row in _trained(network)):
      _draw_agop(right, network, matrix, number)
      number += 1
  right.xaxis.get_major_locator().set_params(integer=True)
  right.set(xlabel='block', ylabel="Pearson's correlation", title='AGOP against stage 2 (dotted: untrained)')
  right.axhline(0, color='gray', linewidth=0.8)
  for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.13), ncols=2)
  write_png(figure, path)


def _draw_refits(axis: Any, network: Network, color: str) -> None:
  """Draw the accuracy against the operations, for refits of stage 2 that start from coefficients of 0.

  A horizontal line marks the accuracy of the trained network.
  """
  for row in network['refits']:
    if row['layer'] != 'stage 2' or not row['start'].startswith('zero'):
      continue
    random, adam = 'random' in row['start'], 'epochs' in row
    style = {'color': color, 'marker': '*' if adam else 's' if random else 'o', 'linestyle': '--' if random else '-'}
    label = f'{name(network)}, {"Adam" if adam else "random units" if random else "Gauss–Newton"}'
    accuracies = [test['accuracy'] for test in row['tests']]
    operations = np.linspace(0, row['operations'], len(accuracies))
    axis.plot(operations[-1:] if adam else operations, accuracies[-1:] if adam else accuracies, label=label, **style)
  if network['refits']:
    accuracy = network['refits'][0]['tests'][0]['accuracy']
    axis.axhline(accuracy, color=color, linestyle=':', label=f'{name(network)}, as trained')


def _draw_agop(axis: Any, network: Network, matrix: str, number: int) -> None:
  """Draw the correlations of the blocks' AGOPs with one kind of matrix. `number` selects the color and the marker.

  A correlation is over the entries off the diagonal. For a diagonal matrix, it is over the entries on the diagonal.
  """
  rows = [row for row in _trained(network) if row['matrix'] == matrix]
  part = 'off_diagonal' if 'off_diagonal' in rows[0]['agop'] else 'diagonal'
  blocks = [*map(_number, rows)]
  style = {'color': f'C{number}', 'marker': 'osv^DPX'[number % 7]}
  found = [row['agop'].get(part, np.nan) for row in rows]
  label = f'{name(network)}: {MATRICES[matrix]}, {PARTS[part]}'
  axis.plot(blocks, found, label=label, **style)
  start = [_untrained(network, row)['agop'].get(part, np.nan) for row in rows]
  axis.plot(blocks, start, linestyle=':', markerfacecolor='none', **style)
