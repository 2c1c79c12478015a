"""Tables and picture of classes and tasks that are learned one after the other, from `hbf.analysis.few_shot_study`.

In a session, a classifier of CIFAR-100 learns five new classes from five images each. In Split CIFAR-10, a network
trains on five tasks of two classes, one task after the other.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf import markdown
from hbf.analysis.report.edit_report import mean_of
from hbf.analysis.report.names import network_name
from hbf.comparison.figures import plt, write_png

Rows = Sequence[Mapping[str, Any]]


def _unique(rows: Rows, *names: str) -> list[tuple[Any, ...]]:
  """Return the distinct combinations of the values of some columns, in order of first appearance."""
  return [*dict.fromkeys(tuple(row[name] for name in names) for row in rows)]


def tables(measured: Mapping[str, Any]) -> str:
  """Return a Markdown table of sessions, and a second table of Split CIFAR-10 if it was measured.

  A session adds five classes to a classifier of CIFAR-100. The first table has the accuracies after the last session,
  and the mean of the accuracies before the first session and after each session. Its cells are means and standard
  deviations over draws of the new classes. Cells of the second table are means and standard deviations over seeds.
  """
  return '\n\n'.join([_few_shot(measured['rows']), *([_split(measured['split'])] if measured['split'] else [])])


def _few_shot(rows: Rows) -> str:
  header = ('network', 'method', 'all classes, %', 'base classes, %', 'new classes, %', 'mean over sessions, %')
  lines = []
  for model, method in _unique(rows, 'model', 'method'):
    found = [row['sessions'] for row in rows if (row['model'], row['method']) == (model, method)]
    if len(found[0]) == 1:  # only the base classes, which are the same in all draws
      lines.append((network_name(model), method, '', mean_of([found[0][-1]['base']]), '', ''))
      continue
    ends = [mean_of([sessions[-1][key] for sessions in found]) for key in ('all', 'base', 'new')]
    over = mean_of([float(np.mean([after['all'] for after in sessions])) for sessions in found])
    lines.append((network_name(model), method, *ends, over))
  return markdown.table(header, lines)


def forgetting(row: Mapping[str, Any], key: str) -> float:
  """Return the forgetting in Split CIFAR-10, in percentage points, as a mean over all tasks but the last.

  The forgetting of a task is its accuracy right after the training on it minus its accuracy after the last task.

  Args:
    row: the numbers of one training.
    key: 'sessions' for answers among all classes, 'told' for answers among the classes of the task.
  """
  sessions = row[key]
  return float(np.mean([sessions[task][task] - sessions[-1][task] for task in range(len(sessions) - 1)]))


def _split(rows: Rows) -> str:
  header = ('stage 2', 'replay', 'accuracy, %', 'forgetting, points', 'task given: accuracy, %', 'forgetting, points')
  lines = []
  for replay, arm in sorted(_unique(rows, 'replay', 'arm'), key=lambda pair: pair[0]):
    found = [row for row in rows if (row['replay'], row['arm']) == (replay, arm)]
    cells = []
    for key in ('sessions', 'told'):
      cells.append(mean_of([float(np.mean(row[key][-1])) for row in found]))
      cells.append(mean_of([forgetting(row, key) for row in found]))
    lines.append((arm, '500 images' if replay else 'none', *cells))
  return markdown.table(header, lines)


def draw(measured: Mapping[str, Any], path: pathlib.Path) -> None:
  """Write a PNG with a panel for each network, and a curve for each method.

  A curve shows the accuracy before the first session of new classes and after each session. If Split CIFAR-10 was
  measured, a last panel shows the accuracy after each of its tasks.
  """
  rows, split = measured['rows'], measured['split']
  models = [model for (model,) in _unique(rows, 'model')]
  panels = len(models) + bool(split)
  size = (2 + 5 * panels, 4.8)
  figure, (axes,) = plt.subplots(1, panels, squeeze=False, figsize=size, layout='constrained')
  for axis, model in zip(axes, models, strict=False):
    own = [row for row in rows if row['model'] == model and len(row['sessions']) > 1]
    for number, (method,) in enumerate(_unique(own, 'method')):
      curves = [[after['all'] for after in row['sessions']] for row in own if row['method'] == method]
      marker = 'osv^DPX*'[number % 8]
      axis.plot(np.mean(curves, axis=0), color=f'C{number}', marker=marker, markerfacecolor='none', label=method)
    axis.set(xlabel='sessions of 5 new classes', ylabel='accuracy on all classes so far, %')
    axis.set_title(f'{network_name(model)}: CIFAR-100, 5 images a class')
  for number, (arm,) in enumerate(_unique(split, 'arm')):
    for replay in (False, True):
      found = [row['sessions'] for row in split if (row['arm'], row['replay']) == (arm, replay)]
      means = np.mean([[np.mean(after) for after in sessions] for sessions in found], axis=0)
      label = f'{arm}, {"replay" if replay else "no replay"}'
      style, marker = '-' if replay else ':', 'osv'[number % 3]
      axes[-1].plot(range(1, len(means) + 1), means, style, color=f'C{number}', marker=marker, label=label)
  if split:
    axes[-1].set(xlabel='tasks', ylabel='accuracy on all tasks so far, %', title='Split CIFAR-10')
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].legend(fontsize=7)
  for axis in axes:
    axis.grid(alpha=0.3)
  figure.legend(
    *axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=2 if panels == 1 else 4, fontsize=8
  )
  write_png(figure, path)
