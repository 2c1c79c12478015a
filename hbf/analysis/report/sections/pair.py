"""Section that compares two runs.

Layer 0 is the tokens before the first block, and layer i is the tokens after i blocks. The similarity of two layers
is their debiased linear CKA (`hbf.analysis.pair.cka`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.pair import alignment, layers, matched, responses
from hbf.analysis.relevance import probabilities
from hbf.analysis.report.drawing import INK, panel
from hbf.analysis.report.page import Drawing, Gallery, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.report.sections.errors import address
from hbf.analysis.trained_run import TrainedRun
from hbf.comparison.statistics import differences
from hbf.data.pipeline.order import evenly_spaced

IMAGES = 1_000  # images to compare layers with
FEWEST = 4  # images that `cka` needs
RESPONDED = 100  # images to match centers with
SHOWN = 12  # images in a gallery
CONTROLS = {
  'cka': 'CKA',
  'cka_other_untrained': 'other untrained',
  'cka_first_untrained': 'first untrained',
  'cka_both_untrained': 'both untrained',
}


def section(one: TrainedRun, other: TrainedRun) -> Section:
  """Return the section: a comparison of the answers, the layers and the centers of two runs.

  Args:
    one: the first run.
    other: the run to compare the first run with.

  Raises:
    MissingPart: the test images or the classes of the runs differ, or there are too few images.
  """
  if one.classes != other.classes:
    raise MissingPart('The two runs have different classes or another order of them, so answers cannot be paired.')
  if not np.array_equal(one.test.images, other.test.images):
    raise MissingPart('The two runs have different test images, so their answers cannot be paired.')
  if len(one.test.labels) < FEWEST:
    raise MissingPart(f'There are {len(one.test.labels)} test images, and CKA needs {FEWEST} or more.')
  labels, answers = one.test.labels, [run.test_logits.argmax(axis=1) for run in (one, other)]
  right = [answer == labels for answer in answers]
  images = one.read('test', IMAGES).images
  first, reference = (100.0 * correct[None] for correct in right)
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
  text = (
    f'The two runs give the same answer to {numbers["agree"]:.2f}% of {len(labels):,} test images. Only the first is '
    f'right for {numbers["only_first_right"]:.2f}%, only the other for {numbers["only_other_right"]:.2f}%, and '
    f'neither for {numbers["both_wrong"]:.2f}%. The accuracy of the first minus the accuracy of the other is '
    f'{ahead.estimate:+.2f} points (95% confidence interval, paired over the test images: {ahead.low:+.2f} to '
    f'{ahead.high:+.2f}). The interval does not cover the variation between seeds.'
  )
  parts: list[Any] = [
    Paragraph(text),
    _disagreements(one, other, right[0] & ~right[1], 'Only the first run is right'),
    _disagreements(one, other, ~right[0] & right[1], 'Only the other run is right'),
    _heat(np.array(numbers['cka']), len(images)),
    _diagonals(numbers),
  ]
  if (table := _matches(one, other, images[evenly_spaced(len(images), RESPONDED)], numbers)) is not None:
    parts.append(table)
  command = 'hbf.analysis.pair.alignment(layers(one, images), layers(other, images)); hbf.analysis.pair.matched(…)'
  return Section('pair', 'Comparison of the two runs', parts, numbers, command)


def _disagreements(one: TrainedRun, other: TrainedRun, chosen_mask: np.ndarray, caption: str) -> Gallery:
  p = [probabilities(run.test_logits) for run in (one, other)]
  chosen = np.flatnonzero(chosen_mask)
  sure = np.minimum(p[0][chosen].max(axis=1), p[1][chosen].max(axis=1))
  images = []
  for i in chosen[np.argsort(-sure, kind='stable')][:SHOWN]:
    answers = ' / '.join(one.classes[z[i].argmax()] for z in p)
    images.append((address(one.test.images[i]), f'{one.classes[one.test.labels[i]]}: {answers}'))
  caption = f'{caption}: the images where both are most confident. Below each image: its class, and the two answers.'
  return Gallery(images, caption)


def _kind(one: TrainedRun, other: TrainedRun) -> str:
  """Return 'seeds' if the model options of both runs are equal, otherwise 'networks'."""
  same = one.restored.config.model == other.restored.config.model
  return 'seeds' if same else 'networks'


def _alignments(one: TrainedRun, other: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """Return the CKA [K, L] of the K layers of one run with the L layers of the other, and three controls.

  A control is the same matrix with one or both networks untrained. The four matrices have the keys of `CONTROLS`.
  """
  trained, theirs = layers(one, images), layers(other, images)
  start, their_start = layers(one.untrained(0), images), layers(other.untrained(1), images)
  return {
    'cka': alignment(trained, theirs),
    'cka_other_untrained': alignment(trained, their_start),
    'cka_first_untrained': alignment(start, theirs),
    'cka_both_untrained': alignment(start, their_start),
  }


def _diagonals(numbers: Mapping[str, Any]) -> PageTable:
  """Return a table of the CKA of layer i of one run with layer i of the other, for all i.

  It has a column for the trained networks, and a column for each control with untrained networks.
  """
  columns = [np.diag(numbers[name]) for name in CONTROLS]
  rows = [(_layer(i), *(f'{z:.2f}' for z in of_layer)) for i, of_layer in enumerate(zip(*columns, strict=True))]
  kind = {'seeds': 'Two runs of one network', 'networks': 'Two networks'}[numbers['kind']]
  caption = (
    f'{kind}: CKA of layers at the same depth. The other columns are controls, with one or both networks untrained. '
    'The controls alone do not say much. Also compare with the other kind of pair: two seeds of one network, or two '
    'networks.'
  )
  return PageTable(('layer', *CONTROLS.values()), rows, caption)


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
    f'Debiased linear CKA of the mean tokens of {images:,} test images, layer by layer. 1: alike. 0: chance.',
  )


def _matches(one: TrainedRun, other: TrainedRun, images: np.ndarray, numbers: dict[str, Any]) -> PageTable | None:
  """Return a table that tells how similarly the centers of two runs respond, or None.

  Each center is matched with a center of the other run that responds similarly to the same tokens. A row has the mean
  correlation of the responses of matched centers in a block. Only blocks that have centers and the same number of
  tokens in both runs are compared. If there is no such block, return None. The correlations are added to `numbers`.
  """
  rows = []
  numbers['matched'] = {}
  random = np.random.default_rng(0)
  for i in range(min(run.model.trunk.depth for run in (one, other))):
    block = f'block{i}'
    mine, theirs = responses(one, images, block), responses(other, images, block)
    if mine is None or theirs is None or len(mine) != len(theirs):
      continue
    found = {'correlation': float(matched(mine, theirs).mean())}
    found['by_chance'] = float(matched(mine, random.permutation(theirs)).mean())
    numbers['matched'][block] = found
    rows.append((block, *(f'{z:.2f}' for z in found.values())))
  caption = (
    'Each center is matched with a center of the other run. Correlation: the correlation of the responses of matched '
    'centers, as a mean over the pairs. '
    'By chance: the same with shuffled tokens.'
  )
  return PageTable(('block', 'correlation', 'by chance'), rows, caption) if rows else None
