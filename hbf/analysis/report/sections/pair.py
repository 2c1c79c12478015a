"""Two runs side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.pair import alignment, layers, matched, responses
from hbf.analysis.relevance import probabilities
from hbf.analysis.report.drawing import INK, panel
from hbf.analysis.report.page import Drawing, Lacks, Section, Shown, Table, Text
from hbf.analysis.report.sections.errors import address
from hbf.analysis.trained_run import TrainedRun
from hbf.comparison.statistics import differences

IMAGES = 1_000  # that layers are compared by
RESPONDED = 100  # images whose tokens centers are matched by
SHOWN = 12
CONTROLS = {
  'cka': 'CKA',
  'cka_other_untrained': 'the other untrained',
  'cka_first_untrained': 'the first untrained',
  'cka_both_untrained': 'both untrained',
}


def section(one: TrainedRun, other: TrainedRun) -> Section:
  """What tells them apart; raises `Lacks` if they are of other test images.

  Args:
    one: the run.
    other: the one that it is compared to.
  """
  if one.classes != other.classes or not np.array_equal(one.test.images, other.test.images):
    raise Lacks('The two runs have other test images: nothing can be paired.')
  labels, answers = one.test.labels, [subject.test_logits.argmax(axis=1) for subject in (one, other)]
  right = [answer == labels for answer in answers]
  images = one.read('test', IMAGES).images
  first, reference = (100.0 * of_run[None] for of_run in right)
  (ahead,) = differences([reference, first])
  numbers: dict[str, Any] = {
    'ahead': {'estimate': ahead.estimate, 'low': ahead.low, 'high': ahead.high},
    'agree': 100 * float((answers[0] == answers[1]).mean()),
    'both_wrong': 100 * float((~right[0] & ~right[1]).mean()),
    'only_first_right': 100 * float((right[0] & ~right[1]).mean()),
    'only_other_right': 100 * float((~right[0] & right[1]).mean()),
  }
  numbers |= {name: alike.tolist() for name, alike in _alignments(one, other, images).items()}
  numbers |= {'cka_estimator': 'debiased', 'cka_images': len(images), 'kind': _kind(one, other)}
  said = (
    f'They give the same answer to {numbers["agree"]:.2f}% of {len(labels):,} test images. The first alone is right '
    f'in {numbers["only_first_right"]:.2f}%, the other alone in {numbers["only_other_right"]:.2f}%, neither in '
    f'{numbers["both_wrong"]:.2f}%. The accuracy of the first less that of the other is {ahead.estimate:+.2f} points '
    f'(95% confidence interval, paired over the test images: {ahead.low:+.2f} to {ahead.high:+.2f}). The interval '
    'says nothing of other seeds.'
  )
  parts: list[Any] = [
    Text(said),
    _apart(one, other, right[0] & ~right[1], 'the first alone is right'),
    _apart(one, other, ~right[0] & right[1], 'the other alone is right'),
    _heat(np.array(numbers['cka']), len(images)),
    _diagonals(numbers),
  ]
  if (table := _matches(one, other, images[:RESPONDED], numbers)) is not None:
    parts.append(table)
  command = 'hbf.analysis.pair.alignment(layers(one, images), layers(other, images)); hbf.analysis.pair.matched(…)'
  return Section('pair', 'The two beside each other', parts, numbers, command)


def _apart(one: TrainedRun, other: TrainedRun, which: np.ndarray, caption: str) -> Shown:
  p = [probabilities(subject.test_logits) for subject in (one, other)]
  chosen = np.flatnonzero(which)
  sure = np.minimum(p[0][chosen].max(axis=1), p[1][chosen].max(axis=1))
  images = []
  for i in chosen[np.argsort(-sure, kind='stable')][:SHOWN]:
    said = ' / '.join(one.classes[z[i].argmax()] for z in p)
    images.append((address(one.test.images[i]), f'{one.classes[one.test.labels[i]]}: {said}'))
  return Shown(images, f'Where {caption}, and both are surest. Below each its class, and the two answers.')


def _kind(one: TrainedRun, other: TrainedRun) -> str:
  """Say what sets two runs apart: 'seeds' of one network, or 'networks'."""
  same = one.restored.config.model == other.restored.config.model
  return 'seeds' if same else 'networks'


def _alignments(one: TrainedRun, other: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """Compute the CKA of the layers of two runs, and of both with what nobody trained."""
  trained, theirs = layers(one, images), layers(other, images)
  start, their_start = layers(one.untrained(0), images), layers(other.untrained(1), images)
  return {
    'cka': alignment(trained, theirs),
    'cka_other_untrained': alignment(trained, their_start),
    'cka_first_untrained': alignment(start, theirs),
    'cka_both_untrained': alignment(start, their_start),
  }


def _diagonals(numbers: Mapping[str, Any]) -> Table:
  """Show the CKA of the same layers beside the controls."""
  columns = [np.diag(numbers[name]) for name in CONTROLS]
  rows = [(_layer(i), *(f'{z:.2f}' for z in of_layer)) for i, of_layer in enumerate(zip(*columns, strict=True))]
  kind = {'seeds': 'Two runs of one network', 'networks': 'Two networks'}[numbers['kind']]
  caption = (
    f'{kind}: CKA of the same layers, and with one or both untrained. It means little beside '
    'the controls alone: see also the other kind of pair, two seeds of one network or two networks.'
  )
  return Table(('layer', *CONTROLS.values()), rows, caption)


def _layer(i: int) -> str:
  return f'block{i - 1}' if i else 'tokens'


def _heat(alike: np.ndarray, images: int) -> Drawing:
  figure, axis = panel(4.2, 3.4)
  shown = axis.pcolormesh(alike, cmap='cividis', vmin=0, vmax=1)
  names = [[*map(_layer, range(count))] for count in alike.shape]
  axis.set_xticks(np.arange(alike.shape[1]) + 0.5, names[1], rotation=45, ha='right')
  axis.set_yticks(np.arange(alike.shape[0]) + 0.5, names[0])
  axis.set(xlabel='the other', ylabel='the first')
  axis.grid(visible=False)
  figure.colorbar(shown, ax=axis).ax.tick_params(colors=INK)
  return Drawing(
    [figure],
    f'Debiased linear CKA of the mean tokens of {images:,} test images, layer by layer; 1: alike, 0: as by chance.',
  )


def _matches(one: TrainedRun, other: TrainedRun, images: np.ndarray, numbers: dict[str, Any]) -> Table | None:
  """Centers of one run that have a counterpart in the other, block by block."""
  rows = []
  numbers['matched'] = {}
  random = np.random.default_rng(0)
  for i in range(min(subject.model.trunk.depth for subject in (one, other))):
    block = f'block{i}'
    mine, theirs = responses(one, images, block), responses(other, images, block)
    if mine is None or theirs is None or len(mine) != len(theirs):
      continue
    found = {'correlation': float(matched(mine, theirs).mean())}
    found['by_chance'] = float(matched(mine, random.permutation(theirs)).mean())
    numbers['matched'][block] = found
    rows.append((block, *(f'{z:.2f}' for z in found.values())))
  caption = 'Mean correlation of the responses of each center with its counterpart’s, and with the tokens shuffled.'
  return Table(('block', 'correlation', 'by chance'), rows, caption) if rows else None
