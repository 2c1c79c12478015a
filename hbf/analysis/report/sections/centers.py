"""Section on the centers of stage 2.

The census of a block (`hbf.analysis.centers.Census`) has statistics of its centers, and the training patches nearest
to each center. The purity of a set of images is the share of its most common class.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis import centers
from hbf.analysis.centers import NEAREST, Census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.report.drawing import GRAY, enlarged, fitted, framed, in_rows, legend, panel, png, rgb
from hbf.analysis.report.page import Details, Drawing, Gallery, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.unit_health import CONSTANT, DOUBLED, LOW_SHARE

TRAINING = 2_000  # most training images to search for patches
SHOWN = 12  # centers shown for each block
NOISE = 8  # standard deviation of the noise. Pixels have values from 0 to 255
ROW = 48  # height of the images in a row, in pixels
FAULTS = {'dead': 'dead', 'constant': 'constant', 'low_share': 'low share', 'doubled': 'doubled'}
SHARES = {
  'purity': 'purity, %',
  'purity_of_random_tokens': 'purity of random tokens, %',
  'purity_untrained': 'purity untrained, %',
  'overlap_under_noise': 'kept under noise, %',
}
RANDOM_DRAWS = 1_000  # number of sets of random images that measure the purity by chance


def section(run: TrainedRun, training: LabeledImages) -> tuple[Section, dict[str, Census]]:
  """Return the section, and the census of each block by the block's name.

  Args:
    run: the run.
    training: the training images among which the patches nearest to each center are found.

  Raises:
    MissingPart: the model has no centers.
  """
  found = centers.census(run, training.images, labels=training.labels)
  if not found:
    raise MissingPart('Stage 2 of this model has no centers.')
  moved = centers.census(run, _noisy(training.images))
  numbers: dict[str, Any] = {block: _numbers(training, found[block], moved[block]) for block in found}
  nulls = {
    'purity_of_random_tokens': centers.random_tokens(run, training.images, found),
    'purity_untrained': centers.census(run.untrained(0), training.images),
  }
  for name, null in nulls.items():
    for block, null_census in null.items():
      numbers[block][name] = float(centers.purity(training.labels, null_census).mean())
  accuracy, projected = _projection(run, training, found)
  numbers |= {'accuracy': accuracy, 'accuracy_projected': projected, 'images': len(training.labels)}
  numbers |= {'purity_of_random_images': _chance(training)}
  parts: list[Any] = [
    _table(found, numbers),
    Paragraph(
      f'The nearest patches come from {len(training.labels):,} training images. A center is awake for a token if its '
      'share of ΣK is at least twice the even share. Purity has a meaning only if it exceeds three controls: random '
      'training tokens in place of the centers (the image of such a token does not count), the network with '
      f'random parameters, and {NEAREST} random images, whose purity is '
      f'{100 * numbers["purity_of_random_images"]:.0f}%. The noise has a standard deviation of {NOISE} (pixels are 0 '
      'to 255). If every center is moved onto its nearest training token, the accuracy changes from '
      f'{accuracy:.2f}% to {projected:.2f}%.'
    ),
    _rates(found),
  ]
  for block, block_census in found.items():
    parts += [_rows(run, training, block, block_census), _all(run, training, block, block_census)]
  command = 'hbf.analysis.centers.census(run, training.images)  # nearest patches, rates, responses'
  return Section('centers', 'Centers', parts, numbers, command), found


def _noisy(images: np.ndarray) -> np.ndarray:
  """Return uint8 images with noise. The noise is made image by image, because it takes eight times their memory."""
  random, noisy = np.random.default_rng(0), np.empty_like(images)
  for image, changed in zip(images, noisy, strict=True):
    changed[:] = np.clip(np.rint(image + random.normal(0, NOISE, image.shape)), 0, 255)
  return noisy


def _numbers(training: LabeledImages, found: Census, moved: Census) -> dict[str, Any]:
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


def _chance(training: LabeledImages) -> float:
  """Return the purity that is due to chance.

  It is the mean share of the most common class in sets of `NEAREST` random training images.
  """
  drawn = np.random.default_rng(0).choice(training.labels, (RANDOM_DRAWS, min(NEAREST, len(training.labels))))
  return float(np.mean([np.bincount(row).max() / len(row) for row in drawn]))


def _projection(run: TrainedRun, training: LabeledImages, found: Mapping[str, Census]) -> tuple[float, float]:
  """Return the test accuracy in percent before and after every center is moved onto its nearest training token."""
  images, labels = run.test
  moved = run.logits(images, centers.project_centers(run, training.images, found))
  return tuple(100 * float((z.argmax(axis=1) == labels).mean()) for z in (run.test_logits, moved))  # type: ignore


def _table(found: Mapping[str, Census], numbers: Mapping[str, Any]) -> PageTable:
  header = ('block', 'centers', 'awake for a token', *FAULTS.values(), *SHARES.values())
  rows = []
  for block in found:
    n = numbers[block]
    counts = [f'{n[name]:,}' for name in FAULTS]
    shares = [f'{100 * n[name]:.0f}' for name in SHARES]
    rows.append((block, f'{n["centers"]:,}', f'{n["awake"]:.1f}', *counts, *shares))
  caption = (
    'Awake for a token: the effective number of centers that respond to one token. Dead: the greatest |response| is '
    '0 up to rounding, or the coefficients get no gradient. Such a center adds or learns nothing. Constant: the '
    f'standard deviation of the response over the tokens is below {100 * CONSTANT:.0f}% of its root mean square. '
    f'Such a center adds a bias. Low share: the center is awake for fewer than {100 * LOW_SHARE:.1f}% of the tokens. '
    f'It may still be alive. Doubled: the center responds like another center (correlation above {DOUBLED}). Purity: '
    f'the share of the most common class among the {NEAREST} nearest images. Kept under noise: the share of the '
    'nearest images that are still among the nearest if noise is added to all images.'
  )
  return PageTable(header, rows, caption)


def _rates(found: Mapping[str, Census]) -> Drawing:
  figure, axis = panel()
  for block, block_census in found.items():
    ordered = np.sort(block_census.rate)[::-1]
    axis.plot(100 * (np.arange(len(ordered)) + 0.5) / len(ordered), 100 * ordered, label=block)
  axis.set(xlabel='centers, sorted, %', ylabel='tokens it is awake for, %', ylim=(0, None), xlim=(0, 100))
  legend(axis)
  return Drawing([figure], 'Share of the tokens for which a center is awake, for the centers of each block.')


def _rows(run: TrainedRun, training: LabeledImages, block: str, found: Census) -> PageTable:
  """Return a table of the centers that are awake for the most tokens, with nearest patches and favored classes."""
  scores, purity = centers.class_scores(run, block, found), centers.purity(training.labels, found)
  rows = []
  for a in np.argsort(-found.rate, kind='stable')[:SHOWN]:
    whole = png(marked(run, block, training.images[found.images[a, 0]], found.tokens[a, 0]))
    rows.append(
      (
        str(a),
        whole,
        png(patches(run, block, training, found, a)),
        f'{100 * found.rate[a]:.1f}',
        f'{100 * purity[a]:.0f}',
        written(run, scores[a]),
      )
    )
  header = ('center', 'nearest patch', f'the {NEAREST} nearest patches', 'awake, %', 'purity, %', 'class scores')
  caption = (
    f'{block}: the {len(rows)} centers that are awake for the most tokens. Each patch is shown with its neighbors. '
    'Class scores: the class that the center raises most (+), and the class that it lowers most (−).'
    f'{about_class_token(run)}'
  )
  return PageTable(header, rows, caption)


def written(run: TrainedRun, scores: np.ndarray) -> str:
  """Return the names of the classes that a center raises most (+) and lowers most (−), as one text.

  Args:
    run: the run.
    scores: the class scores of the center, [classes] (`hbf.analysis.centers.class_scores`).
  """
  classes = np.argsort(-scores, kind='stable')
  return ', '.join(f'{sign}{run.classes[i]}' for sign, i in (('+', classes[0]), ('−', classes[-1])))


def marked(run: TrainedRun, block: str, image: np.ndarray, token: int) -> np.ndarray:
  """Return an enlarged image with a frame around the patch of a token, uint8 [height, width, 3].

  Args:
    run: the run.
    block: name of the block whose token it is.
    image: uint8 [height, width, channels].
    token: index of the token. A class token has no patch, so the image gets no frame for it.
  """
  index, times, shown = int(token) - run.first_patch, max(1, ROW // image.shape[0]), run.patches_of(block)
  large = enlarged(rgb(image), times)
  if index < 0:
    return large
  row, column = divmod(index, shown.columns)
  side = times * shown.side
  return framed(large, row * side, column * side, side, width=max(1, times))


def crops(
  run: TrainedRun, block: str, images: np.ndarray, chosen: np.ndarray, tokens: np.ndarray, around: int = 1
) -> np.ndarray:
  """Return parts of images, uint8 [..., side, side, 3]: the patch of one token, and the patches around it.

  Pixels outside of the image are gray. A class token has no patch, so the whole image is returned for it, shrunk to
  the same size.

  Args:
    run: the run.
    block: name of the block whose tokens they are.
    images: uint8 [n, height, width, channels].
    chosen: indices of the images to cut from, int [...].
    tokens: index of a token for each chosen image, int [...].
    around: number of patches to show on each side of the patch.
  """
  shown, positions = run.patches_of(block), np.asarray(tokens) - run.first_patch
  margin = around * shown.side
  side = shown.side + 2 * margin
  cut = np.full((positions.size, side, side, 3), GRAY, np.uint8)
  for part, image, position in zip(cut, np.ravel(chosen), positions.ravel(), strict=True):
    if position < 0:
      inside = fitted(rgb(images[image]), side)
      row, column = ((side - length) // 2 for length in inside.shape[:2])
    else:
      top, left = (shown.side * z - margin for z in divmod(position, shown.columns))
      inside = images[image, max(top, 0) : top + side, max(left, 0) : left + side]
      row, column = max(-top, 0), max(-left, 0)
    part[row : row + inside.shape[0], column : column + inside.shape[1]] = inside
  return cut.reshape(*positions.shape, *cut.shape[1:])


def about_class_token(run: TrainedRun) -> str:
  """Return a sentence for captions on what is shown for a class token. Return '' if the run has none."""
  if not run.first_patch:
    return ''
  return ' The class token has no patch: for it, the whole image is shown without a frame.'


def patches(run: TrainedRun, block: str, training: LabeledImages, found: Census, a: int) -> np.ndarray:
  """Return an image of the training patches nearest to center a of a block, in a row, uint8 [height, width, 3].

  Each patch is shown with its neighbors, with more of them if patches are small.
  """
  around = max(1, run.patches_of(block).rows // 8)
  cut = crops(run, block, training.images, found.images[a], found.tokens[a], around)
  return in_rows(cut, len(cut), gap=2)


def _all(run: TrainedRun, training: LabeledImages, block: str, found: Census) -> Details:
  """Return details with a square for each center of a block. The square shows the patches nearest to the center.

  The centers that are awake for the most tokens come first.
  """
  order = np.argsort(-found.rate, kind='stable')
  cut = crops(run, block, training.images, found.images[order], found.tokens[order], around=0)
  side = int(np.sqrt(cut.shape[1]))
  squares = np.stack([in_rows(nearest[: side * side], side, gap=0) for nearest in cut])
  sheet = in_rows(squares, int(np.ceil(np.sqrt(len(squares)))), gap=4)
  caption = (
    f'Each square has the {side * side} patches nearest to a center, without neighbors. Centers that are awake for '
    f'the most tokens come first.{about_class_token(run)}'
  )
  return Details(f'All {len(order):,} centers of {block}', [Gallery([(png(sheet), '')], caption, 2 * sheet.shape[1])])
