"""Learning curves of a comparison, drawn from the logs of its runs.

An arm is a model with its options. A group is all arms on one config, such as all models on CIFAR-10.
"""

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.optimize import isotonic_regression

from hbf.comparison.figures import plt, write_png
from hbf.comparison.grid import Grid
from hbf.comparison.stored import StoredRuns, open_runs
from hbf.evaluation.scores import Score
from hbf.tasks.task import Task
from hbf.training.writers import lines_with

REFERENCE, REST = 'black', '0.55'
# Colors that color-blind readers can distinguish (Okabe & Ito 2008), without yellow, which is too light for a line.
COLORS = ('#D55E00', '#0072B2', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
WIDTH, HEIGHT, LABEL = 11.0, 4.2, 0.21  # in inches: width and least height of a row of panels, height of a label


class Curve(NamedTuple):
  """The learning curve of an arm: a score of each of S seeds at each of n epochs.

  Attributes:
    epochs: the epochs at which the log of the first seed has the score, [n]. Epochs that another seed has not reached
      are left out.
    values: the score of each seed at each of the n epochs, [S, n]. If a seed's log has other epochs, the score is
      interpolated.
  """

  epochs: np.ndarray
  values: np.ndarray

  @property
  def mean(self) -> np.ndarray:
    """Mean over the seeds, [n]."""
    return self.values.mean(axis=0)


class Panel(NamedTuple):
  """A panel of a figure: the learning curves of the arms of a group, for one score on one split.

  Attributes:
    name: name of the split, for the label of the y-axis.
    score: the score on the y-axis.
    curves: the curves by label of the arm. Arms whose logs do not have the score are left out.
  """

  name: str
  score: Score
  curves: dict[str, Curve]


def draw_curves(grid: Grid, workdir: pathlib.Path, path: pathlib.Path) -> None:
  """Write a PNG with a row of two panels for each group, which is all arms on one config.

  A curve is the mean over an arm's seeds. A band around the curve shows the range over the seeds. The first panel
  shows the training loss. The second panel shows the first of the task's `scores` on held-out examples or, if the
  group has no held-out examples, the task's `training_score`. Labels stand at the ends of the curves. If there are
  more arms than colors, the best arms get a color, and the others are gray. A curve ends at the last epoch that all
  seeds of the arm have reached. The values of a diverged run end at its divergence.

  Args:
    grid: the arms and seeds to draw.
    workdir: folder of the comparison.
    path: path of the PNG.
  """
  runs = open_runs(workdir)
  groups = {group: _logs(grid, runs, group) for group in dict.fromkeys(arm.group for arm in grid.arms)}
  height = max(HEIGHT, 1 + LABEL * max(map(len, groups.values())))
  with plt.rc_context({'font.size': 11}):
    figure, axes = plt.subplots(
      len(groups), 2, figsize=(WIDTH, height * len(groups)), squeeze=False, layout='constrained'
    )
    for (group, logs), row in zip(groups.items(), axes, strict=True):
      kind = next(arm for arm in grid.arms if arm.group == group).kind
      panels = _panel(logs, 'train', kind.loss_score), _held_out_panel(logs, kind)
      colors = _colors(list(logs), panels[-1])
      seeds = f'seed {grid.seeds[0]}' if len(grid.seeds) == 1 else 'mean and range over the seeds'
      row[0].set_title(f'{group}, {seeds}', loc='left')
      for axis, panel in zip(row, panels, strict=True):
        axis.set(xlabel='epoch', ylabel=f'{panel.name} {panel.score.label}')
        _draw(axis, panel.curves, colors)
        _label_lines(axis, panel.curves, colors, LABEL / (height - 1))
    write_png(figure, path, dpi=120)


def draw_expected(
  expected: Mapping[str, Sequence[float]], score: Score, path: pathlib.Path, name: str = 'expected best'
) -> None:
  """Write a PNG with a curve for each arm: its best held-out score against the number of trials.

  Args:
    expected: the best scores of 1, 2, … trials, by label of the arm. For a random search they are expected values.
      Otherwise they are the best scores so far.
    score: the kind of score.
    path: path of the PNG.
    name: words for the label of the y-axis: 'expected best' for a random search, and otherwise 'best'.
  """
  curves = {
    label: Curve(np.arange(1, len(values) + 1), np.asarray([values])) for label, values in expected.items() if values
  }
  height = max(HEIGHT, 1 + LABEL * len(curves))
  with plt.rc_context({'font.size': 11}):
    figure, axis = plt.subplots(figsize=(0.65 * WIDTH, height), layout='constrained')
    axis.set(xlabel='trials', ylabel=f'{name} held-out {score.label}')
    if curves:
      colors = _colors(list(curves), Panel('validation', score, curves))
      _draw(axis, curves, colors)
      _label_lines(axis, curves, colors, LABEL / (height - 1))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    write_png(figure, path, dpi=120)


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
  """Return positions [n] for labels that are near the wanted positions and do not overlap.

  The order of the labels stays, and the sum of the squared distances from the wanted positions is minimal. To
  compute it, i · gap is subtracted from the i-th wanted position. An isotonic regression of these numbers follows,
  and i · gap is added again.

  Args:
    wanted: the wanted position of each label, [n].
    gap: least distance between two positions.
    low: lower bound of the positions.
    high: upper bound of the positions. If the labels do not fit between the bounds, the last ones lie above it.
  """
  order = np.argsort(wanted, kind='stable')
  even = gap * np.arange(len(order))
  positions = np.empty(len(order))
  offsets = isotonic_regression(np.asarray(wanted)[order] - even).x
  positions[order] = np.clip(offsets, low, max(low, high - gap * (len(order) - 1))) + even
  return positions


def _logs(grid: Grid, runs: StoredRuns, group: str) -> dict[str, list[list[dict]]]:
  """Return the lines of metrics.jsonl for each arm of a group, by label: a list of lines for each seed."""
  arms = [arm for arm in grid.arms if arm.group == group]
  return {arm.label: [runs.metrics(arm.run_name(seed)) for seed in grid.seeds] for arm in arms}


def _panel(logs: Mapping[str, list[list[dict]]], split: str, score: Score) -> Panel:
  curves = {label: curve for label, runs in logs.items() if (curve := _curve(runs, split, score))}
  return Panel({'train': 'training'}.get(split, split), score, curves)


def _held_out_panel(logs: Mapping[str, list[list[dict]]], kind: type[Task]) -> Panel:
  """Return the second panel of a group, from the lines of metrics.jsonl by label (`_logs`), for the task `kind`.

  It shows the first of the task's `scores` on held-out examples. If there are no held-out examples, it shows the
  task's `training_score` or, if the task has none, the training loss.
  """
  panel = _panel(logs, 'validation', kind.scores[0])
  return panel if panel.curves else _panel(logs, 'train', kind.training_score or kind.loss_score)


def _curve(runs: list[list[dict]], split: str, score: Score) -> Curve | None:
  lines = [lines_with(run, split, score.name) for run in runs]
  finite = [itertools.takewhile(lambda line: math.isfinite(line[score.name]), seed_lines) for seed_lines in lines]
  points = [[(line['epoch'], line[score.name]) for line in seed_lines] for seed_lines in finite]
  points = [seed_points for seed_points in points if seed_points]
  if not points:
    return None
  seeds = [np.array(seed_points).T for seed_points in points]
  first, last = max(epochs[0] for epochs, _ in seeds), min(epochs[-1] for epochs, _ in seeds)
  shown = seeds[0][0][(seeds[0][0] >= first) & (seeds[0][0] <= last)]
  return Curve(shown, np.array([np.interp(shown, *seed) for seed in seeds])) if len(shown) else None


def _colors(labels: list[str], panel: Panel) -> dict[str, str]:
  """Return a color for each label. If there are too few colors, the arms with the best scores get them.

  Args:
    labels: labels of the arms. The first arm is the reference and is black.
    panel: the panel whose curves decide which arms are best. The last value of each curve is compared.
  """
  others = labels[1:]
  if len(others) > len(COLORS):
    ends = {label: panel.curves[label].mean[-1] for label in others if label in panel.curves}
    others = sorted(ends, key=ends.__getitem__, reverse=panel.score.better is max)
  return dict.fromkeys(labels, REST) | dict(zip(others, COLORS, strict=False)) | {labels[0]: REFERENCE}


def _draw(axis: Axes, curves: Mapping[str, Curve], colors: Mapping[str, str]) -> None:
  for label, curve in curves.items():
    epochs, values, color = *curve, colors[label]
    front = 2 + (color != REST)
    axis.plot(epochs, curve.mean, color=color, zorder=front)
    axis.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, lw=0, zorder=front)
  axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
  axis.grid(alpha=0.3)
  axis.spines[['top', 'right']].set_visible(False)


def _label_lines(axis: Axes, curves: Mapping[str, Curve], colors: Mapping[str, str], gap: float) -> None:
  """Write the label of each curve beside the end of the curve, and connect both by a line.

  Args:
    axis: the axes that contain the curves.
    curves: the curves by label.
    colors: the colors by label.
    gap: least distance between two labels, as a fraction of the height of the axes.
  """
  if not curves:
    return
  low, high = axis.get_ylim()
  axis.set_ylim(low, high)
  positions = spread_labels([(curve.mean[-1] - low) / (high - low) for curve in curves.values()], gap, 0.0, 1.0)
  for (label, curve), position in zip(curves.items(), positions, strict=True):
    axis.annotate(
      label,
      (curve.epochs[-1], curve.mean[-1]),
      (1.04, position),
      textcoords='axes fraction',
      va='center',
      color=colors[label],
      arrowprops={'arrowstyle': '-', 'color': colors[label], 'lw': 0.6, 'relpos': (0, 0.5), 'shrinkB': 0},
      annotation_clip=False,
    )
