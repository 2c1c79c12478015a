"""Learning curves of a comparison, drawn from the logs of its runs."""

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from scipy.optimize import isotonic_regression

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hbf.comparison.grid import Grid
from hbf.comparison.stored import StoredRuns, open_runs
from hbf.evaluation.scores import ACCURACY, LOSS, Score

REFERENCE, REST = 'black', '0.55'
# Told apart by color-blind readers too (Okabe & Ito 2008, without yellow, which is too light for a line).
COLORS = ('#D55E00', '#0072B2', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
WIDTH, HEIGHT, LABEL = 11.0, 4.2, 0.21  # inches: of a row of panels, its least height, and the height of a label


class Curve(NamedTuple):
  """An arm's: epochs [n], and of each of its seeds the values at these, [S, n]."""

  epochs: np.ndarray
  values: np.ndarray

  @property
  def mean(self) -> np.ndarray:
    """Over the seeds, [n]."""
    return self.values.mean(axis=0)


class Panel(NamedTuple):
  """What is shown, of which split, and the curves of the arms that have begun, by label."""

  name: str
  shown: Score
  curves: dict[str, Curve]


def draw_curves(grid: Grid, workdir: pathlib.Path, path: pathlib.Path) -> None:
  """Writes a PNG: a row of panels for each group, each arm's mean over the seeds and their range.

  Arms are named where their lines end. If there are more than colors, the best have one and the rest are gray. Runs
  that are still at work are drawn as far as all seeds of their arm have come, and runs that diverged up to there. A
  group of which nothing is held out shows the accuracy on training batches instead.
  """
  runs = open_runs(workdir)
  groups = {group: _logs(grid, runs, group) for group in dict.fromkeys(arm.group for arm in grid.arms)}
  height = max(HEIGHT, 1 + LABEL * max(map(len, groups.values())))
  with plt.rc_context({'font.size': 11}):
    figure, axes = plt.subplots(
      len(groups), 2, figsize=(WIDTH, height * len(groups)), squeeze=False, layout='constrained'
    )
    for (group, logs), row in zip(groups.items(), axes, strict=True):
      ranks = next(arm for arm in grid.arms if arm.group == group).kind.scores[0]
      panels = _panel(logs, 'train', LOSS), _panel(logs, 'validation', ranks)
      colors = _colors(list(logs), panels[-1])
      row[0].set_title(f'{group}, mean and range over the seeds', loc='left')
      for axis, panel in zip(row, panels, strict=True):
        axis.set(xlabel='epoch', ylabel=f'{panel.name} {panel.shown.label}')
        _draw(axis, panel.curves, colors)
        _name(axis, panel.curves, colors, LABEL / (height - 1))
    figure.savefig(path, dpi=120, metadata={'Software': None})
    plt.close(figure)


def draw_expected(expected: Mapping[str, Sequence[float]], shown: Score, path: pathlib.Path) -> None:
  """Write a PNG: each arm's expected best held-out score, by label, against the number of trials."""
  curves = {
    label: Curve(np.arange(1, len(values) + 1), np.asarray([values])) for label, values in expected.items() if values
  }
  height = max(HEIGHT, 1 + LABEL * len(curves))
  with plt.rc_context({'font.size': 11}):
    figure, axis = plt.subplots(figsize=(0.65 * WIDTH, height), layout='constrained')
    axis.set(xlabel='trials', ylabel=f'expected best held-out {shown.label}')
    if curves:
      colors = _colors(list(curves), Panel('validation', shown, curves))
      _draw(axis, curves, colors)
      _name(axis, curves, colors, LABEL / (height - 1))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    figure.savefig(path, dpi=120, metadata={'Software': None})
    plt.close(figure)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
  """Places [n] at least a gap apart, in the order of those wanted, within bounds, and as near as can be.

  The squared distances are least: the offsets from evenly spaced places are an isotonic regression.
  """
  order = np.argsort(wanted, kind='stable')
  even = gap * np.arange(len(order))
  places = np.empty(len(order))
  offsets = isotonic_regression(np.asarray(wanted)[order] - even).x
  places[order] = np.clip(offsets, low, max(low, high - gap * (len(order) - 1))) + even
  return places


def _logs(grid: Grid, runs: StoredRuns, group: str) -> dict[str, list[list[dict]]]:
  """Return the lines of each seed's log, by label."""
  arms = [arm for arm in grid.arms if arm.group == group]
  return {arm.label: [runs.metrics(arm.run(seed)) for seed in grid.seeds] for arm in arms}


def _panel(logs: Mapping[str, list[list[dict]]], split: str, shown: Score) -> Panel:
  curves = {label: curve for label, runs in logs.items() if (curve := _curve(runs, split, shown))}
  if not curves and split != 'train':
    return _panel(logs, 'train', ACCURACY)  # the one score that all training reports
  return Panel({'train': 'training'}.get(split, split), shown, curves)


def _curve(runs: list[list[dict]], split: str, shown: Score) -> Curve | None:
  lines = [[line for line in run if line['split'] == split] for run in runs]
  finite = [itertools.takewhile(lambda line: math.isfinite(line[shown.name]), of_seed) for of_seed in lines]
  points = [[(line['epoch'], line[shown.name]) for line in of_seed] for of_seed in finite]
  points = [of_seed for of_seed in points if of_seed]
  if not points:
    return None
  both = np.array([of_seed[: min(map(len, points))] for of_seed in points])
  return Curve(both[0, :, 0], both[:, :, 1])


def _colors(labels: list[str], ranks: Panel) -> dict[str, str]:
  """By label: the reference's own, then one each while there are enough; if there aren't, for the best."""
  others = labels[1:]
  if len(others) > len(COLORS):
    ends = {label: ranks.curves[label].mean[-1] for label in others if label in ranks.curves}
    others = sorted(ends, key=ends.__getitem__, reverse=ranks.shown.better is max)
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


def _name(axis: Axes, curves: Mapping[str, Curve], colors: Mapping[str, str], gap: float) -> None:
  """Writes each label beside the end of its line, a gap (in parts of the axis) apart, and connects the two."""
  if not curves:
    return
  low, high = axis.get_ylim()
  axis.set_ylim(low, high)
  places = spread([(curve.mean[-1] - low) / (high - low) for curve in curves.values()], gap, 0.0, 1.0)
  for (label, curve), place in zip(curves.items(), places, strict=True):
    axis.annotate(
      label,
      (curve.epochs[-1], curve.mean[-1]),
      (1.04, place),
      textcoords='axes fraction',
      va='center',
      color=colors[label],
      arrowprops={'arrowstyle': '-', 'color': colors[label], 'lw': 0.6, 'relpos': (0, 0.5), 'shrinkB': 0},
      annotation_clip=False,
    )
