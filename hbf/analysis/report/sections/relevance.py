"""What decides an image."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from hbf.analysis import relevance
from hbf.analysis.centers import Census
from hbf.analysis.report.drawing import colored, enlarged, legend, panel, plain, png
from hbf.analysis.report.page import Drawing, Section, Shown, Table, Text
from hbf.analysis.report.sections.centers import marked, patches
from hbf.analysis.report.sections.errors import SIDE, address
from hbf.analysis.trained_run import Labeled, TrainedRun

IMAGES = 50  # whose patches are painted over
SHOWN = 6
VOTERS = 3  # centers an image


def section(subject: TrainedRun, training: Labeled, found: Mapping[str, Census]) -> Section:
  """Of some test images.

  Args:
    subject: the run.
    training: the images that the census is of.
    found: the census of every block, {} if there are no centers.
  """
  images, labels = subject.read('test', IMAGES)
  fill = relevance.color(subject)

  def answers(images: np.ndarray) -> np.ndarray:
    return relevance.probabilities(subject.logits(images))

  of_patches = relevance.relevance(answers, images, subject.patch, fill)
  order = np.argsort(-of_patches, axis=1, kind='stable')
  gone, most_first = relevance.deletion(answers, images, subject.patch, fill, order)
  random = np.mean(
    [
      relevance.deletion(answers, images, subject.patch, fill, drawn)[1]
      for drawn in relevance.random_orders(*order.shape)
    ],
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
      f'Mean probability of the answer while patches are painted over with the mean color, of {len(images)} test '
      f'images. Area under the curve: {most_first.mean():.3f} with the most relevant first, {random.mean():.3f} at '
      'random.',
    ),
    _maps(subject, images, labels, of_patches),
  ]
  block = f'block{subject.model.trunk.depth - 1}'
  if block in found:
    cast = strongest(subject, images[:SHOWN], subject.logits(images[:SHOWN]).argmax(axis=1), VOTERS)
    numbers['votes'] = [[vote._asdict() for vote in of_image] for of_image in cast]
    numbers['lost_over_vote'] = median_share(cast)
    parts.append(voters(subject, training, found[block], images[:SHOWN], cast))
  else:
    parts.append(Text('The last block has no centers that could have voted.'))
  command = 'hbf.analysis.relevance.relevance(answers, images, subject.patch, fill)'
  return Section('relevance', 'What decides an image', parts, numbers, command)


def _curve(gone: np.ndarray, most_first: np.ndarray, random: np.ndarray) -> Any:
  figure, axis = panel()
  axis.plot(100 * gone, most_first.mean(axis=0), label='most relevant first')
  axis.plot(100 * gone, random.mean(axis=0), label='at random')
  axis.set(xlabel='patches gone, %', ylabel='probability of the answer', xlim=(0, 100), ylim=(0, 1))
  legend(axis)
  return figure


def _maps(subject: TrainedRun, images: np.ndarray, labels: np.ndarray, of_patches: np.ndarray) -> Shown:
  shown = []
  for i in np.argsort(-of_patches.max(axis=1), kind='stable')[:SHOWN]:
    drawn = png(map_of(subject, of_patches[i]))
    shown += [(address(images[i]), subject.classes[labels[i]]), (drawn, f'at most {of_patches[i].max():.2f}')]
  caption = (
    'How much of the answer’s probability goes with each patch alone (light: most), of the images whose answer hangs '
    'most on one patch.'
  )
  return Shown(shown, caption)


def map_of(subject: TrainedRun, of_patches: np.ndarray) -> np.ndarray:
  """An image's relevances [rows · columns] in colors, dark where there is none: uint8 [height, width, 3]."""
  grid = colored(of_patches.reshape(subject.grid), 0, of_patches.max())
  return enlarged(grid, max(1, SIDE // grid.shape[0]))


class Vote(NamedTuple):
  """The part of a center of the last block in an answer.

  Attributes:
    answer: the class.
    center: its number.
    token: through which it adds most.
    adds: to the answer's logit through all tokens, over the mean of all classes; last norm and pooling are frozen.
    lost: by how much that logit falls when the network is run without the center.
  """

  answer: int
  center: int
  token: int
  adds: float
  lost: float


def strongest(subject: TrainedRun, images: np.ndarray, answers: np.ndarray, count: int) -> list[list[Vote]]:
  """Find for each image the centers that add most to its answer, int [n], and what is lost without each."""
  cast = relevance.votes(subject, images, answers)  # [n, N, U]
  sums = cast.sum(axis=1)
  best = np.argsort(-sums, axis=1, kind='stable')[:, :count]
  lost = relevance.effects(subject, images, answers, best)
  return [
    [
      Vote(int(answers[i]), int(a), int(cast[i, :, a].argmax()), float(sums[i, a]), float(without))
      for a, without in zip(best[i], lost[i], strict=True)
    ]
    for i in range(len(images))
  ]


def median_share(cast: Sequence[Sequence[Vote]]) -> float:
  """Return the median, over the images, of what is lost without the center that votes most, over its vote."""
  return float(np.median([votes[0].lost / votes[0].adds for votes in cast]))


def voters(
  subject: TrainedRun, training: Labeled, found: Census, images: np.ndarray, cast: Sequence[Sequence[Vote]]
) -> Table:
  """Show the centers of the last block that vote most for the answers: this patch looks like these."""
  rows = []
  for image, votes in zip(images, cast, strict=True):
    for place, vote in enumerate(votes):
      seen, near = marked(subject, image, vote.token), patches(subject, training, found, vote.center)
      name = subject.classes[vote.answer] if place == 0 else ''
      rows.append((name, png(seen), str(vote.center), f'{vote.adds:+.2f}', f'{vote.lost:+.2f}', png(near)))
  header = ('answer', 'this patch', 'center', 'vote', 'logit lost without it', 'looks like these training patches')
  caption = (
    'The centers of the last block that vote most for the answer. Framed: the patch through which each votes most, '
    'beside it the training patches nearest to the center. Vote: what the center adds to the logit of the answer, '
    'over the mean of all classes, while the division of the last norm and the weights of the pooling are frozen. '
    'Lost: the network is run again with the coefficients of this center at 0, and nothing is frozen. What is lost '
    f'without the center that votes most is {100 * median_share(cast):.0f}% of its vote (median over the images).'
  )
  return Table(header, rows, caption)


def picture(subject: TrainedRun, training: Labeled, found: Census, images: np.ndarray) -> Figure:
  """Draw the first row of `voters` for each image, as a figure for paper."""
  answers = subject.logits(images).argmax(axis=1)
  votes = [first for (first,) in strongest(subject, images, answers, 1)]
  figure = Figure((7.2, 0.3 + 0.62 * len(images)), layout='constrained')
  axes = figure.subplots(len(images), 2, squeeze=False, width_ratios=(1, 10))
  for (left, right), image, vote in zip(axes, images, votes, strict=True):
    left.imshow(marked(subject, image, vote.token))
    said = f'{subject.classes[vote.answer]}\nvote {vote.adds:+.2f}\nlost {vote.lost:+.2f}'
    left.set_ylabel(said, rotation=0, ha='right', va='center')
    right.imshow(patches(subject, training, found, vote.center), aspect='equal')
    for axis in (left, right):
      axis.set(xticks=[], yticks=[], frame_on=False)
  axes[0, 0].set_title('this patch', fontsize=10)
  axes[0, 1].set_title('looks like these training patches', fontsize=10)
  return plain(figure)
