"""Section on the patches and centers that decide an answer.

The relevance of a patch is the decrease of the answer's probability if the patch is painted over. The excess logit of
an answer is its logit minus the mean of all logits. The vote of a center is its contribution to the excess logit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from hbf.analysis import relevance
from hbf.analysis.centers import Census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.report.drawing import colored, enlarged, legend, panel, plain, png
from hbf.analysis.report.page import Drawing, Gallery, PageTable, Paragraph, Section
from hbf.analysis.report.sections.centers import about_class_token, marked, patches
from hbf.analysis.report.sections.errors import SIDE, address
from hbf.analysis.trained_run import TrainedRun
from hbf.data.pipeline.order import evenly_spaced

IMAGES = 50  # test images for the deletion curve
SHOWN = 6  # images with maps and votes
VOTERS = 3  # centers shown for each image


def section(run: TrainedRun, training: LabeledImages, found: Mapping[str, Census]) -> Section:
  """Return the section: the patches and centers that decide the answers to some test images.

  Args:
    run: the run.
    training: the training images from which the census was computed.
    found: the census of every block. {} if there are no centers.
  """
  images, labels = run.read('test', IMAGES)
  fill, block = relevance.color(run), run.last_block
  side = run.patches_of(block).side

  def answers(images: np.ndarray) -> np.ndarray:
    return relevance.probabilities(run.logits(images))

  patch_relevance = relevance.relevance(answers, images, side, fill)
  order = np.argsort(-patch_relevance, axis=1, kind='stable')
  gone, most_first = relevance.deletion(answers, images, side, fill, order)
  random = np.mean(
    [relevance.deletion(answers, images, side, fill, drawn)[1] for drawn in relevance.random_orders(*order.shape)],
    axis=0,
  )
  numbers: dict[str, Any] = {
    'images': len(images),
    'gone': gone.tolist(),
    'probability': most_first.mean(axis=0).tolist(),
  }
  numbers |= {'probability_random': random.mean(axis=0).tolist()}
  numbers |= {'area': float(most_first.mean()), 'area_random': float(random.mean())}
  parts: list[Any] = [
    Drawing(
      [_curve(gone, most_first, random)],
      f'Mean probability of the answer while more and more patches of {side}×{side} pixels are painted over with the '
      f'mean color, on {len(images)} test images. The area under the curve, as the mean of its points, is '
      f'{most_first.mean():.3f} if the most relevant patches go first, and {random.mean():.3f} for a random order.',
    ),
    _maps(run, images, labels, patch_relevance),
  ]
  if block in found:
    voted = images[evenly_spaced(len(images), SHOWN)]
    cast = strongest(run, voted, run.logits(voted).argmax(axis=1), VOTERS)
    numbers['votes'] = [[vote._asdict() for vote in image_votes] for image_votes in cast]
    numbers['lost_over_vote'] = median_share(cast)
    parts.append(voters(run, training, found[block], voted, cast))
  else:
    parts.append(Paragraph('Stage 2 of the last block has no centers, so there are no votes.'))
  command = 'hbf.analysis.relevance.relevance(answers, images, run.patches_of(run.last_block).side, fill)'
  return Section('relevance', 'Relevance of patches and centers', parts, numbers, command)


def _curve(gone: np.ndarray, most_first: np.ndarray, random: np.ndarray) -> Any:
  figure, axis = panel()
  axis.plot(100 * gone, most_first.mean(axis=0), label='most relevant first')
  axis.plot(100 * gone, random.mean(axis=0), label='at random')
  axis.set(xlabel='patches painted over, %', ylabel='probability of the answer', xlim=(0, 100), ylim=(0, 1))
  legend(axis)
  return figure


def _maps(run: TrainedRun, images: np.ndarray, labels: np.ndarray, patch_relevance: np.ndarray) -> Gallery:
  shown = []
  for i in np.argsort(-patch_relevance.max(axis=1), kind='stable')[:SHOWN]:
    drawn = png(map_of(run, patch_relevance[i]))
    shown += [(address(images[i]), run.classes[labels[i]]), (drawn, f'at most {patch_relevance[i].max():.2f}')]
  caption = (
    'Drop of the answer’s probability if one patch is painted over (light: most). These are the images whose answer '
    'depends most on a single patch.'
  )
  return Gallery(shown, caption)


def map_of(run: TrainedRun, patch_relevance: np.ndarray) -> np.ndarray:
  """Return an image that shows the relevance of each patch as a color, dark for 0, uint8 [height, width, 3].

  Args:
    run: the run.
    patch_relevance: the relevance of each patch of the last block, [rows · columns].
  """
  rows, columns, _ = run.patches_of(run.last_block)
  grid = colored(patch_relevance.reshape(rows, columns), 0, patch_relevance.max())
  return enlarged(grid, max(1, SIDE // grid.shape[0]))


class Vote(NamedTuple):
  """The vote of a center of the last block for an answer.

  Attributes:
    answer: index of the class.
    center: index of the center.
    token: index of the token through which the center votes most.
    adds: contribution to the answer's excess logit, summed over the tokens (`hbf.analysis.relevance.votes`).
    lost: decrease of the same excess logit if the center is removed (`hbf.analysis.relevance.effects`).
  """

  answer: int
  center: int
  token: int
  adds: float
  lost: float


def strongest(run: TrainedRun, images: np.ndarray, answers: np.ndarray, count: int) -> list[list[Vote]]:
  """Return the strongest votes for the answer to each image, the strongest first.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
    answers: index of the answered class for each image, int [n].
    count: number of votes for each image.
  """
  cast = relevance.votes(run, images, answers)  # [n, N, U]
  sums = cast.sum(axis=1)
  best = np.argsort(-sums, axis=1, kind='stable')[:, :count]
  lost, tokens = relevance.effects(run, images, answers, best), relevance.tokens_of_votes(run, cast)
  return [
    [
      Vote(int(answers[i]), int(a), int(tokens[i, a]), float(sums[i, a]), float(without))
      for a, without in zip(best[i], lost[i], strict=True)
    ]
    for i in range(len(images))
  ]


def median_share(cast: Sequence[Sequence[Vote]]) -> float:
  """Return the median of the ratio `lost` / `adds` over the strongest votes, one for each image.

  Votes of 0 do not count, as of a ball that no token is in. If all are 0, the result is 0.
  """
  return float(np.median([votes[0].lost / votes[0].adds for votes in cast if votes[0].adds] or [0.0]))


def voters(
  run: TrainedRun, training: LabeledImages, found: Census, images: np.ndarray, cast: Sequence[Sequence[Vote]]
) -> PageTable:
  """Return a table with a row for each of the strongest votes.

  A row shows the patch of the image through which the center's vote is greatest, and the training patches nearest to
  the center.

  Args:
    run: the run.
    training: the training images from which the census was computed.
    found: the census of the last block.
    images: uint8 [n, height, width, channels].
    cast: the strongest votes for each image, as returned by `strongest`.
  """
  rows, block = [], run.last_block
  for image, votes in zip(images, cast, strict=True):
    for rank, vote in enumerate(votes):
      patch, near = marked(run, block, image, vote.token), patches(run, block, training, found, vote.center)
      name = run.classes[vote.answer] if rank == 0 else ''
      rows.append((name, png(patch), str(vote.center), f'{vote.adds:+.2f}', f'{vote.lost:+.2f}', png(near)))
  header = ('answer', 'this patch', 'center', 'vote', 'logit lost without it', 'looks like these training patches')
  caption = (
    'The centers of the last block with the strongest votes for the answer. Framed: the patch through which a center '
    'votes most. Right: the training patches nearest to the center. Vote: the contribution of the center to the '
    'logit of the answer, relative to the mean of all classes. Here the divisor of the last norm and the weights '
    'of the pooling count as constants. Logit lost: the drop of the same logit if the network runs again with the '
    'coefficients of this center at 0. Then the divisor and the weights change too. Without its strongest voter, the '
    f'logit of an answer falls by {100 * median_share(cast):.0f}% of the voter’s vote (median over the images).'
    f'{about_class_token(run)}'
  )
  return PageTable(header, rows, caption)


def picture(run: TrainedRun, training: LabeledImages, found: Census, images: np.ndarray) -> Figure:
  """Return a figure for print, with a row for each image. It shows the strongest vote, as described in `voters`."""
  answers = run.logits(images).argmax(axis=1)
  votes = [first for (first,) in strongest(run, images, answers, 1)]
  figure = Figure((7.2, 0.3 + 0.62 * len(images)), layout='constrained')
  axes = figure.subplots(len(images), 2, squeeze=False, width_ratios=(1, 10))
  for (left, right), image, vote in zip(axes, images, votes, strict=True):
    left.imshow(marked(run, run.last_block, image, vote.token))
    label = f'{run.classes[vote.answer]}\nvote {vote.adds:+.2f}\nlost {vote.lost:+.2f}'
    left.set_ylabel(label, rotation=0, ha='right', va='center')
    right.imshow(patches(run, run.last_block, training, found, vote.center), aspect='equal')
    for axis in (left, right):
      axis.set(xticks=[], yticks=[], frame_on=False)
  axes[0, 0].set_title('this patch', fontsize=10)
  axes[0, 1].set_title('looks like these training patches', fontsize=10)
  return plain(figure)
