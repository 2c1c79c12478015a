"""Sections that explain the answers to a user's own images, one for each image.

The relevance of a patch is the decrease of the answer's probability if the patch is painted over. The vote of a
center is its contribution to the answer's logit.
"""

from collections.abc import Mapping

import numpy as np

from hbf.analysis import relevance
from hbf.analysis.centers import census
from hbf.analysis.report.drawing import png
from hbf.analysis.report.page import Gallery, PageTable, Paragraph, Part, Section
from hbf.analysis.report.sections.centers import TRAINING
from hbf.analysis.report.sections.errors import address
from hbf.analysis.report.sections.relevance import VOTERS, map_of, strongest, voters
from hbf.analysis.trained_run import TrainedRun
from hbf.errors import UserError

MOST = 100  # most images of a page
NAMED = 3  # classes shown for each image
SIDE = 160  # width of an image in CSS pixels


def check_count(images: int) -> None:
  """Raise `UserError` if there are too many images for a page."""
  if images > MOST:
    raise UserError(f'a page takes 1 to {MOST} images, but {images} were given: split them over several pages')


def sections(run: TrainedRun, named: Mapping[str, np.ndarray]) -> list[Section]:
  """Return a section for each image.

  A section has the likeliest classes and the relevance of the patches. If the last block has centers, the section
  also shows the centers with the strongest votes, and the training patches nearest to them.

  Args:
    run: the run. Its training data are needed.
    named: images by name, uint8 [height, width, channels], in the shape of the run's training images.

  Raises:
    UserError: there are no images, or more than `MOST`.
  """
  if not named:
    raise UserError(f'a page takes 1 to {MOST} images, but 0 were given that can be read: name others')
  check_count(len(named))
  images = np.stack(list(named.values()))

  def answers(shown: np.ndarray) -> np.ndarray:
    return relevance.probabilities(run.logits(shown))

  found = relevance.relevance(answers, images, run.patches_of(run.last_block).side, relevance.color(run))
  training = run.read('train', TRAINING)
  last_census = census(run, training.images).get(run.last_block)
  made = []
  for i, (name, p) in enumerate(zip(named, answers(images), strict=True)):
    best = np.argsort(-p, kind='stable')[:NAMED]
    deciding = png(map_of(run, found[i]))
    shown = [(address(images[i]), 'as the model sees it'), (deciding, f'at most {found[i].max():.2f}')]
    parts: list[Part] = [
      PageTable(('class', 'probability'), [(run.classes[c], f'{100 * p[c]:.1f}%') for c in best]),
      Gallery(shown, 'Right: drop of the answer’s probability if a patch is painted over (light: most).', SIDE),
    ]
    if last_census is None:
      parts.append(Paragraph('Stage 2 of the last block has no centers, so there are no votes.'))
    else:
      cast = strongest(run, images[i : i + 1], p.argmax(keepdims=True), VOTERS)
      parts.append(voters(run, training, last_census, images[i : i + 1], cast))
    made.append(Section(f'image{i}', name, parts))
  return made
