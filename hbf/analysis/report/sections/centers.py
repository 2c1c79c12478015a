"""What the centers of stage 2 stand for."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis import centers
from hbf.analysis.centers import DOUBLED, NEAREST, Census
from hbf.analysis.report.drawing import enlarged, framed, in_rows, legend, panel, png, rgb
from hbf.analysis.report.page import Drawing, Folded, Lacks, Section, Shown, Table, Text
from hbf.analysis.trained_run import Labeled, TrainedRun
from hbf.evaluation.unit_health import CONSTANT, LOW_SHARE

TRAINING = 2_000  # most images whose patches are looked through
SHOWN = 12  # centers of a block, of those that are awake most
NOISE = 8  # standard deviation, of 255
ROW = 48  # pixels, the height of a row's images
FAULTS = {'dead': 'dead', 'constant': 'constant', 'low_share': 'low share', 'doubled': 'doubled'}
SHARES = {
  'purity': 'purity, %',
  'purity_of_random_tokens': 'purity of random tokens, %',
  'purity_untrained': 'purity untrained, %',
  'overlap_under_noise': 'kept under noise, %',
}
EVEN = 1_000  # centers of random images, for the purity that chance gives


def section(subject: TrainedRun, training: Labeled) -> tuple[Section, dict[str, Census]]:
  """Of every block, and what was counted; raises `Lacks` for a model without centers.

  Args:
    subject: the run.
    training: images to look for patches in.
  """
  found = centers.census(subject, training.images, labels=training.labels)
  if not found:
    raise Lacks('This model’s stage 2 has no centers.')
  noise = np.random.default_rng(0).normal(0, NOISE, training.images.shape)
  noisy = np.clip(np.rint(training.images + noise), 0, 255).astype(np.uint8)
  moved = centers.census(subject, noisy)
  numbers: dict[str, Any] = {block: _numbers(training, found[block], moved[block]) for block in found}
  nulls = {
    'purity_of_random_tokens': centers.random_tokens(subject, training.images, found),
    'purity_untrained': centers.census(subject.untrained(0), training.images),
  }
  for name, null in nulls.items():
    for block, of_block in null.items():
      numbers[block][name] = float(centers.purity(training.labels, of_block).mean())
  accuracy, projected = _projection(subject, training, found)
  numbers |= {'accuracy': accuracy, 'accuracy_projected': projected, 'images': len(training.labels)}
  numbers |= {'purity_of_random_images': _chance(training)}
  parts: list[Any] = [
    _table(found, numbers),
    Text(
      f'Nearest are sought among the patches of {len(training.labels):,} training images; a center is awake for a '
      f'token if its part of ΣK is at least twice the even one. Purity is worth something where it is above that of '
      'random training tokens in the place of the centers (their own images left out), and of the network at '
      f'initialization; {NEAREST} random images have {100 * numbers["purity_of_random_images"]:.0f}%. '
      f'Noise has a standard deviation of {NOISE} of 255. With '
      f'every center moved onto its nearest training token the accuracy is {projected:.2f}%, instead of '
      f'{accuracy:.2f}%.'
    ),
    _rates(found),
  ]
  for block, of_block in found.items():
    parts += [_rows(subject, training, block, of_block), _all(subject, training, block, of_block)]
  command = 'hbf.analysis.centers.census(subject, training.images)  # nearest patches, rates, responses'
  return Section('centers', 'Centers', parts, numbers, command), found


def _numbers(training: Labeled, found: Census, moved: Census) -> dict[str, Any]:
  return {
    'centers': len(found.rate),
    'dead': int(found.health.dead.sum()),
    'constant': int(found.health.constant.sum()),
    'low_share': int(found.low_share.sum()),
    'doubled': int(found.doubled.sum()),
    'awake': found.awake,
    'rate': found.rate.round(6).tolist(),
    'purity': float(centers.purity(training.labels, found).mean()),
    'overlap_under_noise': float(centers.overlap(found, moved).mean()),
  }


def _chance(training: Labeled) -> float:
  """The purity of images drawn at random."""
  drawn = np.random.default_rng(0).choice(training.labels, (EVEN, min(NEAREST, len(training.labels))))
  return float(np.mean([np.bincount(row).max() / len(row) for row in drawn]))


def _projection(subject: TrainedRun, training: Labeled, found: Mapping[str, Census]) -> tuple[float, float]:
  """Test accuracy in percent as it is, and with every center moved onto its nearest training token."""
  images, labels = subject.test
  moved = subject.logits(images, centers.projected(subject, training.images, found))
  return tuple(100 * float((z.argmax(axis=1) == labels).mean()) for z in (subject.test_logits, moved))  # type: ignore


def _table(found: Mapping[str, Census], numbers: Mapping[str, Any]) -> Table:
  header = ('block', 'centers', 'awake a token', *FAULTS.values(), *SHARES.values())
  rows = []
  for block in found:
    n = numbers[block]
    counts = [f'{n[name]:,}' for name in FAULTS]
    shares = [f'{100 * n[name]:.0f}' for name in SHARES]
    rows.append((block, f'{n["centers"]:,}', f'{n["awake"]:.1f}', *counts, *shares))
  caption = (
    'Dead: the greatest |response| is 0 to rounding, or no gradient reaches the coefficients; the center adds '
    f'nothing. Constant: the deviation of the response over the tokens is below {100 * CONSTANT:.0f}% of its root '
    f'mean square; the center adds a bias. Low share: awake for fewer than {100 * LOW_SHARE:.1f}% of the '
    f'tokens; the center may be alive. Doubled: it responds as another center does (correlation above {DOUBLED}). '
    f'Purity: the share of the commonest class among the {NEAREST} nearest images. Kept: how many of the nearest '
    'images stay so with noise.'
  )
  return Table(header, rows, caption)


def _rates(found: Mapping[str, Census]) -> Drawing:
  figure, axis = panel()
  for block, of_block in found.items():
    ordered = np.sort(of_block.rate)[::-1]
    axis.plot(100 * (np.arange(len(ordered)) + 0.5) / len(ordered), 100 * ordered, label=block)
  axis.set(xlabel='centers, in their order, %', ylabel='tokens it is awake for, %', ylim=(0, None), xlim=(0, 100))
  legend(axis)
  return Drawing([figure], 'How often the centers of each block respond.')


def _rows(subject: TrainedRun, training: Labeled, block: str, found: Census) -> Table:
  """The centers that are awake most: nearest patches, and what they write."""
  scores, purity = centers.written(subject, block), centers.purity(training.labels, found)
  rows = []
  for a in np.argsort(-found.rate, kind='stable')[:SHOWN]:
    classes = np.argsort(-scores[a], kind='stable')
    writes = ', '.join(f'{sign}{subject.classes[i]}' for sign, i in (('+', classes[0]), ('−', classes[-1])))
    whole = png(marked(subject, training.images[found.images[a, 0]], found.tokens[a, 0]))
    rows.append(
      (
        str(a),
        whole,
        png(patches(subject, training, found, a)),
        f'{100 * found.rate[a]:.1f}',
        f'{100 * purity[a]:.0f}',
        writes,
      )
    )
  header = ('center', 'nearest in its image', f'the {NEAREST} nearest patches', 'awake, %', 'purity, %', 'writes')
  return Table(header, rows, f'{block}: the {len(rows)} centers that are awake most; each patch with its neighbors.')


def marked(subject: TrainedRun, image: np.ndarray, token: int) -> np.ndarray:
  """An image, large enough to be seen, with a frame around a token's patch: uint8 [height, width, 3]."""
  place, times = token - subject.first_patch, max(1, ROW // image.shape[0])
  large = enlarged(rgb(image), times)
  if place < 0:  # a class token is nowhere
    return large
  row, column = np.unravel_index(place, subject.grid)
  side = times * subject.patch
  return framed(large, int(row) * side, int(column) * side, side, width=max(1, times))


def patches(subject: TrainedRun, training: Labeled, found: Census, a: int) -> np.ndarray:
  """The patches nearest to a center with their neighbors, in a row: uint8 [height, width, 3]."""
  cut = rgb(centers.crops(subject, training.images[found.images[a]], found.tokens[a]))
  return in_rows(cut, len(cut), gap=2)


def _all(subject: TrainedRun, training: Labeled, block: str, found: Census) -> Folded:
  """Of every center a square of nearest patches, those that are awake most first."""
  order = np.argsort(-found.rate, kind='stable')
  cut = rgb(centers.crops(subject, training.images[found.images[order]], found.tokens[order], around=0))
  side = int(np.sqrt(cut.shape[1]))
  squares = np.stack([in_rows(of_center[: side * side], side, gap=0) for of_center in cut])
  sheet = in_rows(squares, int(np.ceil(np.sqrt(len(squares)))), gap=4)
  caption = (
    f'Each square: the {side * side} patches nearest to a center, without neighbors. Those awake most come first.'
  )
  return Folded(f'All {len(order):,} centers of {block}', [Shown([(png(sheet), '')], caption, 2 * sheet.shape[1])])
