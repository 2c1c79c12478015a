"""The unit itself: its kernels, how wide they are, and what metric it learned."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, Lacks, Section, Table, Text
from hbf.analysis.sigmas import Widths, widths
from hbf.analysis.trained_run import TrainedRun
from hbf.ops.kernels import KERNELS, SIGNED
from hbf.training.writers import read_metrics

IMAGES = 20
STAGES = ('stage1', 'stage2')
STYLES = ('-', '--', '-.', ':')  # of blocks, which colors alone don't tell apart
SIGMAS = {'sigmas', 'widths'}  # of metrics.jsonl; runs of before version 12 have the second


def section(subject: TrainedRun) -> Section:
  """Of every block; raises `Lacks` for a model without a kernel."""
  found = widths(subject, subject.test.images[:IMAGES])
  if not found:
    raise Lacks('This model has no radial kernel.')
  numbers: dict[str, Any] = {
    block: {stage: _numbers(w) for stage, w in stages.items()} for block, stages in found.items()
  }
  rows = [
    (block, stage, w.kernel, _spread(w), *(_number(z) for z in (w.start, w.distance, w.relative)), _metric(w))
    for block, stages in found.items()
    for stage, w in stages.items()
  ]
  header = ('block', 'stage', 'kernel', 'σ', 'σ at init', 'distance', 'σ / distance', '‖WᵀW − 1‖ / ‖1‖')
  table = Table(header, rows, 'Widths, and the root mean square of the distances that they are for.')
  parts: list[Any] = [*_kernels(found), table, *map(Text, _claims(found))]
  if lines := [line for line in read_metrics(subject.workdir) if SIGMAS & line.keys()]:
    for block, stages in found.items():
      for stage, w in stages.items():
        if len(w.width):
          numbers[block][stage]['in_training'] = [_sigmas(line)[block][stage] for line in lines]
    parts += _history([line['epoch'] for line in lines], numbers)
    numbers['epochs'] = [line['epoch'] for line in lines]
  command = f'hbf.analysis.sigmas.widths(subject, subject.test.images[:{IMAGES}])'
  return Section('unit', 'The unit', parts, numbers, command)


def _numbers(w: Widths) -> dict[str, Any]:
  return {
    'kernel': w.kernel,
    'width': w.width.tolist(),
    'start': w.start if len(w.width) else None,
    'distance': w.distance,
    'metric': w.metric,
  }


def _number(z: float) -> str:
  return f'{z:.2f}' if np.isfinite(z) else ''


def _spread(w: Widths) -> str:
  if w.kernel == SIGNED:
    return 'none, it has β'
  if not len(w.width):
    return 'fixed'
  if len(w.width) == 1:
    return f'{w.width[0]:.2f}'
  return f'{w.width.mean():.2f} ({w.width.min():.2f} to {w.width.max():.2f})'


def _metric(w: Widths) -> str:
  return 'identity' if w.metric is None else f'{w.metric:.2f}'


def _kernels(found: dict[str, dict[str, Widths]]) -> list[Drawing]:
  distance = np.linspace(0, 2, 200)

  def kernel(w: Widths) -> np.ndarray:
    return np.exp(np.asarray(KERNELS[w.kernel](jnp.asarray(np.square(distance / w.relative) / 2))))

  curves = {
    block: {stage: kernel(w) for stage, w in stages.items() if w.kernel in KERNELS and np.isfinite(w.relative)}
    for block, stages in found.items()
  }
  caption = 'Kernels with the mean of their learned widths (memo Fig. 2), where 1 is a usual distance.'
  about = {'xlabel': 'distance, over its root mean square', 'ylabel': 'K', 'ylim': (0, 1.05)}
  return _drawings(distance, curves, caption, **about)


def _history(epochs: list[float], numbers: dict[str, Any]) -> list[Drawing]:
  curves = {
    block: {stage: z['in_training'] for stage, z in stages.items() if 'in_training' in z}
    for block, stages in numbers.items()
  }
  return _drawings(epochs, curves, 'The mean of the learned widths in training.', xlabel='epoch', ylabel='mean σ')


def _drawings(x: Any, curves: dict[str, dict[str, Any]], caption: str, **about: Any) -> list[Drawing]:
  """One with a panel for each stage that has curves over x, by block and stage; none if no stage has any."""
  figures = []
  for stage in STAGES:
    of_blocks = {block: stages[stage] for block, stages in curves.items() if stage in stages}
    if of_blocks:
      figure, axis = panel()
      for (block, y), style in zip(of_blocks.items(), itertools.cycle(STYLES)):
        axis.plot(x, y, label=block, ls=style)
      axis.set(**about, title=stage)
      legend(axis)
      figures.append(figure)
  return [Drawing(figures, caption)] if figures else []


def _claims(found: dict[str, dict[str, Widths]]) -> list[str]:
  """What the memo says of widths and metrics, told by numbers."""
  both = [stages for stages in found.values() if len(stages) == 2]
  said = []
  if both:
    pairs = [(stages['stage1'], stages['stage2']) for stages in both]
    smaller = sum(
      one.width.mean() < other.width.mean() for one, other in pairs if len(one.width) and len(other.width)
    )
    relative = sum(one.relative < other.relative for one, other in pairs)
    said.append(
      f'“σ of stage 1 is smaller than of stage 2” (memo): in {smaller} of {len(both)} blocks as it is, in {relative} '
      'relative to the distances, which are of other sizes in the two stages.'
    )
  metrics = [w.metric for stages in found.values() for w in stages.values() if w.metric is not None]
  if metrics:
    said.append(
      f'“WᵀW is near the identity” (memo): it is off by {min(metrics):.2f} to {max(metrics):.2f} of the identity’s '
      'norm; 0 is the identity.'
    )
  return said


def _sigmas(line: Mapping[str, Any]) -> Any:
  """Return the mean σ by block and stage of a line of metrics.jsonl."""
  return line.get('sigmas', line.get('widths'))
