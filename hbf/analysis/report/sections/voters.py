"""Section of test images and their voters. A click on an image leads to its voters.

The voters of an image are the centers of the last block that contribute most to the logit of the answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf.analysis import centers, interventions
from hbf.analysis.centers import Census
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.interventions import Effect
from hbf.analysis.report.drawing import png
from hbf.analysis.report.page import Choices, Details, Link, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.report.sections.centers import about_class_token, marked, patches, written
from hbf.analysis.report.sections.errors import address
from hbf.analysis.report.sections.relevance import Vote, strongest
from hbf.analysis.trained_run import TrainedRun
from hbf.data.pipeline.order import evenly_spaced

IMAGES = 24  # test images to click on, half of them with a wrong answer
VOTERS = 5  # centers shown for each image
TESTED = 500  # test images on which a center is silenced


def section(run: TrainedRun, training: LabeledImages, found: Mapping[str, Census]) -> Section:
  """Return the section. A click on an image shows the centers that contribute most to the logit of its answer.

  A click on a center shows the training patches nearest to it.

  Args:
    run: the run.
    training: the training images from which the census was computed.
    found: the census of every block. {} if there are no centers.

  Raises:
    MissingPart: stage 2 of the last block has no centers.
  """
  block = run.last_block
  if block not in found:
    raise MissingPart('Stage 2 of the last block has no centers, so no center votes for an answer.')
  shown = half_wrong(run.test_logits.argmax(axis=1) == run.test.labels, IMAGES)
  images, labels = run.test.images[shown], run.test.labels[shown]
  answers = run.test_logits[shown].argmax(axis=1)
  wrong = int((answers != labels).sum())
  cast = strongest(run, images, answers, VOTERS)
  which = sorted({vote.center for votes in cast for vote in votes})
  tested = evenly_spaced(len(run.test.labels), TESTED)
  units = interventions.last_units(run, run.test.images[tested])
  effects = interventions.silenced_one_by_one(run, units, run.test.labels[tested], which)
  numbers = {
    'images': shown.tolist(),
    'votes': [[vote._asdict() for vote in votes] for votes in cast],
    'silenced': {
      str(center): {name: mean._asdict() for name, mean in effect._asdict().items()}
      for center, effect in zip(which, effects, strict=True)
    },
  }
  opened = {
    center: _center(run, training, found[block], block, center, effect)
    for center, effect in zip(which, effects, strict=True)
  }
  parts: list[Any] = [
    Paragraph(
      f'Click on an image to see the {VOTERS} centers of {block} with the strongest votes for its answer. Click on '
      'the number of a center to see its training patches and its effect. '
      f'Of these {len(shown)} images, {wrong} {"has" if wrong == 1 else "have"} a wrong answer.'
      f'{about_class_token(run)}'
    ),
    Choices([_image(run, *of_image, opened) for of_image in zip(images, labels, cast, strict=True)]),
    Paragraph(
      f'The {len(which)} centers with the strongest votes for these answers. Loss, accuracy and other answers are '
      f'the changes on {len(units.tokens)} test images if one center is silenced: mean and half of the 95% interval.'
    ),
    *opened.values(),
  ]
  command = 'hbf.analysis.report.sections.relevance.strongest(run, images, answers, 5)'
  return Section('voters', 'Images and their voters', parts, numbers, command)


def half_wrong(right: np.ndarray, count: int) -> np.ndarray:
  """Return the indices of at most `count` images, half of them with wrong answers if there are enough wrong answers.

  Both halves are evenly spaced, because the images of a split may be sorted by class.

  Args:
    right: True for each image with a right answer, bool [n].
    count: the largest number of images.
  """
  kinds = ((np.flatnonzero(~right), count // 2), (np.flatnonzero(right), count - count // 2))
  return np.sort(np.concatenate([kind[evenly_spaced(len(kind), most)] for kind, most in kinds]))


def _image(
  run: TrainedRun, image: np.ndarray, label: int, votes: Sequence[Vote], opened: Mapping[int, Details]
) -> Details:
  answer = votes[0].answer
  right = 'right' if answer == label else f'wrong: it is {run.classes[label]}'
  rows = [
    (
      Link(str(vote.center), opened[vote.center]),
      png(marked(run, run.last_block, image, vote.token)),
      f'{vote.adds:+.2f}',
      f'{vote.lost:+.2f}',
    )
    for vote in votes
  ]
  table = PageTable(('center', 'through this patch', 'vote', 'logit lost without it'), rows)
  return Details(f'{run.classes[answer]}, {right}', [table], image=address(image))


def _center(
  run: TrainedRun,
  training: LabeledImages,
  found: Census,
  block: str,
  center: int,
  effect: Effect,
) -> Details:
  header = ('nearest training patches', 'class scores', 'loss', 'accuracy, points', 'other answers, %')
  scores = written(run, centers.class_scores(run, block, found)[center])
  row: Any = (png(patches(run, block, training, found, center)), scores, *effect.texts())
  return Details(f'Center {center}', [PageTable(header, [row])])
