"""Section on the kernels: their sigmas and learned metrics."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.sigmas import SigmaSummary, summarize_sigmas
from hbf.analysis.trained_run import TrainedRun
from hbf.ops.kernels import KERNELS, SIGNED
from hbf.training.writers import read_metrics

IMAGES = 20
STAGES = ('stage1', 'stage2')
STYLES = ('-', '--', '-.', ':')  # line styles of the blocks, because there are few colors
CAPTION = (
  'Sigmas, and the root mean square of the distances. In stage 1 these are the distances of queries and keys before '
  'rotary positions turn them, without the centers of `memory`.'
)
SIGMAS = {'sigmas', 'widths'}  # keys in metrics.jsonl. Runs before schema version 12 have 'widths'


def section(run: TrainedRun) -> Section:
  """Return the section on the sigmas and metrics of the kernels.

  Raises:
    MissingPart: the model has no radial kernel.
  """
  found = summarize_sigmas(run, run.read('test', IMAGES).images)
  if not found:
    raise MissingPart('This model has no radial kernel.')
  numbers: dict[str, Any] = {
    block: {stage: _numbers(w) for stage, w in stages.items()} for block, stages in found.items()
  }
  rows = [
    (block, stage, w.kernel, _spread(w), *(_number(z) for z in (w.sigma_init, w.distance, w.relative)), _metric(w))
    for block, stages in found.items()
    for stage, w in stages.items()
  ]
  header = ('block', 'stage', 'kernel', 'σ', 'σ at init', 'distance', 'σ / distance', '‖WᵀW − 1‖ / ‖1‖')
  table = PageTable(header, rows, CAPTION)
  parts: list[Any] = [*_kernels(found), table, *map(Paragraph, _claims(found))]
  if lines := [line for line in read_metrics(run.workdir) if SIGMAS & line.keys()]:
    for block, stages in found.items():
      for stage, w in stages.items():
        if len(w.sigma):
          numbers[block][stage]['in_training'] = [_sigmas(line)[block][stage] for line in lines]
    parts += _history([line['epoch'] for line in lines], numbers)
    numbers['epochs'] = [line['epoch'] for line in lines]
  command = f"hbf.analysis.sigmas.summarize_sigmas(run, run.read('test', {IMAGES}).images)"
  return Section('unit', 'The kernels', parts, numbers, command)


def _numbers(w: SigmaSummary) -> dict[str, Any]:
  return {
    'kernel': w.kernel,
    'sigma': w.sigma.tolist(),
    'sigma_init': w.sigma_init if len(w.sigma) else None,
    'distance': w.distance,
    'metric': w.metric,
  }


def _number(z: float) -> str:
  return f'{z:.2f}' if np.isfinite(z) else ''


def _spread(w: SigmaSummary) -> str:
  if w.kernel == SIGNED:
    return 'none (it has β)'
  if not len(w.sigma):
    return 'fixed'
  if len(w.sigma) == 1:
    return f'{w.sigma[0]:.2f}'
  return f'{w.sigma.mean():.2f} ({w.sigma.min():.2f} to {w.sigma.max():.2f})'


def _metric(w: SigmaSummary) -> str:
  return 'identity' if w.metric is None else f'{w.metric:.2f}'


def _kernels(found: dict[str, dict[str, SigmaSummary]]) -> list[Drawing]:
  distance = np.linspace(0, 2, 200)

  def kernel(w: SigmaSummary) -> np.ndarray:
    return np.exp(np.asarray(KERNELS[w.kernel](jnp.asarray(np.square(distance / w.relative) / 2))))

  curves = {
    block: {stage: kernel(w) for stage, w in stages.items() if w.kernel in KERNELS and np.isfinite(w.relative)}
    for block, stages in found.items()
  }
  caption = (
    'Kernels with the mean of their learned σ (memo, Figure 2). A distance of 1 is the root mean square distance.'
  )
  about = {'xlabel': 'distance / its root mean square', 'ylabel': 'K', 'ylim': (0, 1.05)}
  return _drawings(distance, curves, caption, **about)


def _history(epochs: list[float], numbers: dict[str, Any]) -> list[Drawing]:
  curves = {
    block: {stage: z['in_training'] for stage, z in stages.items() if 'in_training' in z}
    for block, stages in numbers.items()
  }
  return _drawings(epochs, curves, 'Mean of the learned σ during training.', xlabel='epoch', ylabel='mean σ')


def _drawings(x: Any, curves: dict[str, dict[str, Any]], caption: str, **about: Any) -> list[Drawing]:
  """Return a drawing with a panel for each stage that has curves over x. Return [] if no stage has a curve.

  Args:
    x: the values on the x-axis.
    curves: the values on the y-axis, by block and stage.
    caption: text below the drawing.
    **about: properties of the axes, such as their labels.
  """
  figures = []
  for stage in STAGES:
    blocks = {block: stages[stage] for block, stages in curves.items() if stage in stages}
    if blocks:
      figure, axis = panel()
      for (block, y), style in zip(blocks.items(), itertools.cycle(STYLES)):
        axis.plot(x, y, label=block, ls=style)
      axis.set(**about, title=stage)
      legend(axis)
      figures.append(figure)
  return [Drawing(figures, caption)] if figures else []


def _claims(found: dict[str, dict[str, SigmaSummary]]) -> list[str]:
  """Return the claims of CBMM Memo 143 about sigmas and metrics, each with the measured numbers."""
  pairs = [tuple(stages[stage] for stage in STAGES) for stages in found.values() if len(stages) == 2]
  pairs = [(one, other) for one, other in pairs if len(one.sigma) and len(other.sigma)]
  claims = []
  if pairs:
    smaller = sum(one.sigma.mean() < other.sigma.mean() for one, other in pairs)
    relative = sum(one.relative < other.relative for one, other in pairs)
    claims.append(
      f'“σ of stage 1 is smaller than of stage 2” (memo): true in {smaller} of {len(pairs)} blocks. The '
      f'distances also differ between the stages. If each σ is divided by the distance, it is true in {relative}.'
    )
  metrics = [w.metric for stages in found.values() for w in stages.values() if w.metric is not None]
  if metrics:
    claims.append(
      f'“WᵀW is near the identity” (memo): the norm of WᵀW − 1 is {min(metrics):.2f} to '
      f'{max(metrics):.2f} of the norm of the identity.'
    )
  return claims


def _sigmas(line: Mapping[str, Any]) -> Any:
  """Return the mean σ by block and stage from a line of metrics.jsonl."""
  return line.get('sigmas', line.get('widths'))
