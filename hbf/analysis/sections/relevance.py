"""What decides an image."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis import relevance
from hbf.analysis.centres import Census
from hbf.analysis.drawing import coloured, enlarged, legend, panel, png
from hbf.analysis.page import Drawing, Section, Shown, Table, Text
from hbf.analysis.sections.centres import patches
from hbf.analysis.sections.errors import SIDE, address
from hbf.analysis.subject import Labelled, Subject

IMAGES = 50  # whose patches are painted over
SHOWN = 6
VOTERS = 3  # centres an image


def section(subject: Subject, training: Labelled, found: Mapping[str, Census]) -> Section:
  """Of some test images.

  Args:
    subject: the run.
    training: the images that the census is of.
    found: the census of every block, {} if there are no centres.
  """
  images, labels = subject.read('test', IMAGES)
  fill = relevance.colour(subject)

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
  numbers = {'images': len(images), 'gone': gone.tolist(), 'probability': most_first.mean(axis=0).tolist()}
  numbers |= {'probability_random': random.mean(axis=0).tolist()}
  numbers |= {'area': float(most_first.mean()), 'area_random': float(random.mean())}
  parts: list[Any] = [
    Drawing(
      [_curve(gone, most_first, random)],
      f'Mean probability of the answer while patches are painted over with the mean colour, of {len(images)} test '
      f'images. Area under the curve: {most_first.mean():.3f} with the most relevant first, {random.mean():.3f} at '
      'random.',
    ),
    _maps(subject, images, labels, of_patches),
  ]
  block = f'block{subject.model.trunk.depth - 1}'
  if block in found:
    parts.append(voters(subject, training, found[block], images[:SHOWN]))
  else:
    parts.append(Text('The last block has no centres that could have voted.'))
  command = 'hbf.analysis.relevance.relevance(answers, images, subject.patch, fill)'
  return Section('relevance', 'What decides an image', parts, numbers, command)


def _curve(gone: np.ndarray, most_first: np.ndarray, random: np.ndarray) -> Any:
  figure, axis = panel()
  axis.plot(100 * gone, most_first.mean(axis=0), label='most relevant first')
  axis.plot(100 * gone, random.mean(axis=0), label='at random')
  axis.set(xlabel='patches gone, %', ylabel='probability of the answer', xlim=(0, 100), ylim=(0, 1))
  legend(axis)
  return figure


def _maps(subject: Subject, images: np.ndarray, labels: np.ndarray, of_patches: np.ndarray) -> Shown:
  shown = []
  for i in np.argsort(-of_patches.max(axis=1), kind='stable')[:SHOWN]:
    drawn = png(map_of(subject, of_patches[i]))
    shown += [(address(images[i]), subject.classes[labels[i]]), (drawn, f'at most {of_patches[i].max():.2f}')]
  caption = (
    'How much of the answer’s probability goes with each patch alone (light: most), of the images whose answer hangs '
    'most on one patch.'
  )
  return Shown(shown, caption)


def map_of(subject: Subject, of_patches: np.ndarray) -> np.ndarray:
  """An image's relevances [rows · columns] in colours, dark where there is none: uint8 [height, width, 3]."""
  grid = coloured(of_patches.reshape(subject.grid), 0, of_patches.max())
  return enlarged(grid, max(1, SIDE // grid.shape[0]))


def voters(subject: Subject, training: Labelled, found: Census, images: np.ndarray) -> Table:
  """The centres of the last block that add most to the answer's logit: this patch looks like these."""
  answers = subject.logits(images).argmax(axis=1)
  cast = relevance.votes(subject, images, answers).sum(axis=1)  # over the tokens
  rows = []
  for image, answer, of_image in zip(images, answers, cast, strict=True):
    for place, a in enumerate(np.argsort(-of_image, kind='stable')[:VOTERS]):
      first = (address(image), subject.classes[answer]) if place == 0 else ('', '')
      rows.append((*first, str(a), f'{of_image[a]:+.2f}', png(patches(subject, training, found, a))))
  header = ('image', 'answer', 'centre', 'adds to its logit', 'training patches nearest to the centre')
  caption = 'The centres of the last block that add most to the answer’s logit, over the mean of all classes.'
  return Table(header, rows, caption)
