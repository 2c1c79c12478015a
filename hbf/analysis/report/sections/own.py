"""What decides the answers to images of one's own, an image a section."""

from collections.abc import Mapping

import numpy as np

from hbf.analysis import relevance
from hbf.analysis.centers import census
from hbf.analysis.report.drawing import png
from hbf.analysis.report.page import Part, Section, Shown, Table, Text
from hbf.analysis.report.sections.centers import TRAINING
from hbf.analysis.report.sections.errors import address
from hbf.analysis.report.sections.relevance import VOTERS, map_of, strongest, voters
from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError

MOST = 100  # images of a page
NAMED = 3  # classes
SIDE = 160  # pixels of the page, of an image


def sections(subject: TrainedRun, named: Mapping[str, np.ndarray]) -> list[Section]:
  """The likeliest classes of each image, the patches that decide, and the training patches that are like them.

  Args:
    subject: the run, with its training data.
    named: images by name, uint8 [height, width, channels], of the run's shape.

  Raises:
    UserError: there are more than a page takes, or none.
  """
  if not 1 <= len(named) <= MOST:
    raise UserError(f'a page is of 1 to {MOST} images, and here are {len(named)}: give fewer, or several pages')
  images = np.stack(list(named.values()))

  def answers(shown: np.ndarray) -> np.ndarray:
    return relevance.probabilities(subject.logits(shown))

  found = relevance.relevance(answers, images, subject.patch, relevance.color(subject))
  training = subject.read('train', TRAINING)
  of_block = census(subject, training.images).get(f'block{subject.model.trunk.depth - 1}')
  made = []
  for i, (name, p) in enumerate(zip(named, answers(images), strict=True)):
    best = np.argsort(-p, kind='stable')[:NAMED]
    deciding = png(map_of(subject, found[i]))
    shown = [(address(images[i]), 'as the model sees it'), (deciding, f'at most {found[i].max():.2f}')]
    parts: list[Part] = [
      Table(('class', 'probability'), [(subject.classes[c], f'{100 * p[c]:.1f}%') for c in best]),
      Shown(shown, 'Right: how much of the answer’s probability goes with each patch alone (light: most).', SIDE),
    ]
    if of_block is None:
      parts.append(Text('The last block has no centers that could have voted.'))
    else:
      cast = strongest(subject, images[i : i + 1], p.argmax(keepdims=True), VOTERS)
      parts.append(voters(subject, training, of_block, images[i : i + 1], cast))
    made.append(Section(f'image{i}', name, parts))
  return made
