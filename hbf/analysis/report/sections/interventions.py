"""Section on interventions: units that are silenced, and centers that are moved to random tokens.

To silence a unit is to set its coefficients to 0. The census of a block (`hbf.analysis.centers.Census`) has
statistics of its centers, and the training patches nearest to each center.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis import interventions, unit_params
from hbf.analysis.centers import Census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.interventions import Curve, Effect, LastUnits, Mean
from hbf.analysis.report.drawing import legend, panel, png
from hbf.analysis.report.page import Drawing, MissingPart, PageTable, Section
from hbf.analysis.report.sections.centers import patches
from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError

IMAGES = 1_000  # test images. Larger networks get fewer images, so that the responses fit into memory
ROOM = 2**27  # most responses in memory
TRIED, SHOWN = 128, 10  # units that are silenced one by one, and units in the table
# The last control in explain.json, whose keys stay, and on the page: a run with `init_from` began with others.
UNTRAINED, RANDOM = 'the network before training', 'the network with random parameters'
SEEDS = 3  # number of times that the centers are moved to random tokens


def section(run: TrainedRun, training: LabeledImages, found: Mapping[str, Census]) -> Section:
  """Return the section: the effects of silencing units of the last block, and of moving centers.

  Args:
    run: the run.
    training: the training images from which the census was computed.
    found: the census of every block. {} if there are no centers.

  Raises:
    MissingPart: stage 2 of the last block has neither centers nor hidden units.
  """
  block = run.last_block
  try:
    count = unit_params.count_units(run.params, block)
  except UserError:
    raise MissingPart('Stage 2 of the last block has neither centers nor hidden units to silence.') from None
  rows, columns, _ = run.patches_of(block)
  images, labels = run.read('test', max(50, min(IMAGES, ROOM // (rows * columns * count))))
  units = interventions.last_units(run, images)
  votes = np.abs(interventions.importance(run, units)['votes']).mean(axis=0)
  which = np.argsort(-votes, kind='stable')[:TRIED].tolist()
  effects = dict(zip(which, interventions.silenced_one_by_one(run, units, labels, which), strict=True))
  curves = interventions.removals(run, units)
  controls = _controls(run, images, labels, units, block, training, found)
  numbers = {
    'images': len(labels),
    'units': count,
    'silenced': {str(unit): _as_numbers(effect) for unit, effect in effects.items()},
    'gone': curves['random'].gone.tolist(),
    'probability': {name: curve.probability.mean(axis=0).tolist() for name, curve in curves.items()},
    'area': {name: Mean.of(curve.areas)._asdict() for name, curve in curves.items()},
    'area_below_random': {
      name: Mean.of(curves['random'].areas - curve.areas)._asdict()
      for name, curve in curves.items()
      if name != 'random'
    },
    'controls': {name: _as_numbers(effect) for name, effect in controls.items()},
  }
  kind = 'centers' if block in found else 'hidden units'
  parts: list[Any] = [
    _units(run, effects, kind, block, len(labels), training, found.get(block)),
    _curves(curves, kind, len(labels)),
    _table_of_controls(controls),
  ]
  command = "hbf.analysis.interventions.effect(run, silence(run.params, 'block0', [3]), images, labels)"
  return Section('interventions', 'Interventions', parts, numbers, command)


def _as_numbers(effect: Effect) -> dict[str, Any]:
  return {name: mean._asdict() for name, mean in effect._asdict().items()}


def _controls(
  run: TrainedRun,
  images: np.ndarray,
  labels: np.ndarray,
  units: LastUnits,
  block: str,
  training: LabeledImages,
  found: Mapping[str, Census],
) -> dict[str, Effect]:
  """Return the effects of changes that are larger than silencing one unit, by a description of the change.

  They silence all units of the last block or half of them, move all centers, or give all parameters
  random values, as at the beginning of a training without `init_from`.
  """
  every = range(len(units.coefficients))
  half = np.random.default_rng(0).permutation(len(units.coefficients))[: len(units.coefficients) // 2]
  controls = {
    f'all units of {block} silenced': unit_params.silence(run.params, block, every),
    f'a random half of the units of {block} silenced': unit_params.silence(run.params, block, half.tolist()),
  }
  if found:
    for seed in range(SEEDS):
      moved = interventions.with_random_centers(run, training.images, seed)
      controls[f'all centers of all blocks at random training tokens, draw {seed + 1}'] = moved.params
  before = run.logits(images)
  effects = {
    name: interventions.compare(before, run.logits(images, params), labels) for name, params in controls.items()
  }
  untrained = run.untrained(seed=0).logits(images)
  return effects | {UNTRAINED: interventions.compare(before, untrained, labels)}


def _units(
  run: TrainedRun,
  effects: Mapping[int, Effect],
  kind: str,
  block: str,
  images: int,
  training: LabeledImages,
  census: Census | None,
) -> PageTable:
  """Return a table of the units whose silencing raises the loss most.

  Args:
    run: the run.
    effects: the effect of silencing a unit alone, by the unit's index.
    kind: 'centers' or 'hidden units', for the caption.
    block: name of the last block.
    images: number of test images on which the effects were measured.
    training: the training images from which the census was computed.
    census: the census of the last block, or None for hidden units.
  """
  strongest = sorted(effects, key=lambda unit: -effects[unit].loss.mean)[:SHOWN]
  rows = []
  for unit in strongest:
    cells = [str(unit), *effects[unit].texts()]
    rows.append(cells + ([png(patches(run, block, training, census, unit))] if census else []))
  header = ['unit', 'loss', 'accuracy, points', 'other answers, %'] + (['nearest training patches'] if census else [])
  caption = (
    f'Among the {len(effects)} {kind} of {block} with the strongest votes, the {len(rows)} whose silence raises the '
    f'loss most. Each row shows what changes on {images:,} test images if this unit alone is silenced: mean and half '
    'of the 95% interval over the images. To silence a unit means to set its coefficients to 0.'
  )
  return PageTable(header, rows, caption)


def _curves(curves: Mapping[str, Curve], kind: str, images: int) -> Drawing:
  figure, axis = panel()
  for name, curve in curves.items():
    axis.plot(100 * curve.gone, curve.probability.mean(axis=0), label=name)
  axis.set(xlabel=f'silenced {kind}, %', ylabel='probability of the answer', xlim=(0, 100), ylim=(0, 1))
  legend(axis)
  random = curves['random'].areas
  below = {name: Mean.of(random - curve.areas) for name, curve in curves.items() if name != 'random'}
  areas = ', '.join(
    f'{name} {curves[name].areas.mean():.3f} ({mean.mean:.3f} ± {mean.half:.3f} less than random)'
    for name, mean in below.items()
  )
  caption = (
    f'Mean probability of the answer while more and more {kind} of the last block are silenced, on {images:,} test '
    'images. Each image has its own order: the greatest votes first, the greatest gradient times response first, or '
    f'at random. Areas below the curves: {areas}, random {random.mean():.3f}. A more faithful order has a smaller '
    'area.'
  )
  return Drawing([figure], caption)


def _table_of_controls(controls: Mapping[str, Effect]) -> PageTable:
  rows = [(RANDOM if name == UNTRAINED else name, *effect.texts()) for name, effect in controls.items()]
  caption = 'Controls: what larger changes do on the same images. Mean and half of the 95% interval over the images.'
  return PageTable(('change', 'loss', 'accuracy, points', 'other answers, %'), rows, caption)
