"""Learning curves of a comparison, drawn from the logs of its runs."""

import pathlib

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from hbf.comparison.grid import Arm, Grid
from hbf.training.writers import read_metrics

# What a panel shows: split, value, name of the axis.
PANELS = (('train', 'loss', 'training loss, nats'), ('validation', 'accuracy', 'validation accuracy, %'))


def draw_curves(grid: Grid, workdir: pathlib.Path, path: pathlib.Path) -> None:
  """Writes a PNG: a row of panels for each group, each arm's mean over the seeds and their range.

  Runs that are still at work are drawn as far as all seeds of their arm have come. A group without held-out images
  shows accuracy on the training batches instead.
  """
  groups = dict.fromkeys(arm.group for arm in grid.arms)
  figure, axes = plt.subplots(len(groups), 2, figsize=(11, 4 * len(groups)), squeeze=False, layout='constrained')
  for group, row in zip(groups, axes, strict=True):
    arms = [arm for arm in grid.arms if arm.group == group]
    for axis, (split, value, name) in zip(row, PANELS, strict=True):
      if not any(_curve(arm, grid, workdir, split, value) for arm in arms):
        split, name = 'train', name.replace('validation', 'training')
      for arm in arms:
        _draw(axis, arm.label, _curve(arm, grid, workdir, split, value))
      axis.set(title=group, xlabel='epoch', ylabel=name)
      axis.grid(alpha=0.3)
      axis.legend()
  figure.savefig(path, dpi=120, metadata={'Software': None})
  plt.close(figure)


def _curve(arm: Arm, grid: Grid, workdir: pathlib.Path, split: str, value: str) -> list[list[tuple[float, float]]]:
  """Of each seed that has begun, (epoch, value) at every report."""
  runs = [read_metrics(workdir / arm.run(seed)) for seed in grid.seeds]
  curves = [[(line['epoch'], line[value]) for line in run if line['split'] == split] for run in runs]
  return [curve for curve in curves if curve]


def _draw(axis: Axes, label: str, curves: list[list[tuple[float, float]]]) -> None:
  if not curves:
    return
  length = min(map(len, curves))
  epochs = [epoch for epoch, _ in curves[0][:length]]
  values = np.array([[value for _, value in curve[:length]] for curve in curves])
  (line,) = axis.plot(epochs, values.mean(axis=0), label=label)
  axis.fill_between(epochs, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.2)
