"""Section on the accuracy on corrupted images."""

from typing import Any

import numpy as np

from hbf.analysis.interventions import Mean
from hbf.analysis.report.page import Gallery, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.report.sections.errors import address
from hbf.analysis.trained_run import TrainedRun
from hbf.data.augment.corruptions import CORRUPTIONS, GROUPS, STRENGTHS, corrupt

IMAGES = 500  # test images if they have 32 × 32 pixels. Larger images take longer, so fewer are used
FEWEST = 50
SHOWN = 3  # strength of the examples


def section(run: TrainedRun) -> Section:
  """Return the section: the accuracy under 15 common corruptions at 5 strengths.

  Raises:
    MissingPart: the images are not square.
  """
  height, width, _ = run.task.shape
  if height != width:
    raise MissingPart('The corruptions need square images, and the images of this run are not square.')
  images, labels = run.read('test', max(FEWEST, IMAGES * 32**2 // (height * width)))
  clean = 100 * (run.logits(images).argmax(axis=1) == labels)
  right = {
    name: np.stack([100 * (run.logits(corrupt(images, name, s)).argmax(axis=1) == labels) for s in STRENGTHS])
    for name in CORRUPTIONS
  }
  error = 100 - np.mean(list(right.values()), axis=(0, 1))  # for each image
  mean, half = Mean.of(error)
  accuracy = {name: values.mean(axis=1) for name, values in right.items()}
  rows = [('none', *[''] * (len(STRENGTHS)), f'{clean.mean():.1f}')]
  rows += [(name.replace('_', ' '), *(f'{z:.1f}' for z in z_), f'{z_.mean():.1f}') for name, z_ in accuracy.items()]
  low, high = mean - half, mean + half
  numbers = {'images': len(labels), 'accuracy': {name: z.tolist() for name, z in accuracy.items()}}
  numbers |= {'accuracy_clean': float(clean.mean()), 'mean_corruption_error': mean, 'interval': [low, high]}
  groups = {group: float(np.mean([accuracy[name] for name in names])) for group, names in GROUPS.items()}
  numbers |= {'accuracy_of_groups': groups}
  interval = f' (95% confidence interval: {low:.2f} to {high:.2f})' if len(labels) > 1 else ''
  text = (
    f'The mean error over all corruptions and strengths is {mean:.2f}%{interval}, on {len(labels)} test '
    f'{"images" if len(labels) > 1 else "image"}. Without corruption it is {100 - clean.mean():.2f}%. '
    f'Accuracy by group of corruptions: {", ".join(f"{group} {z:.1f}%" for group, z in groups.items())}.'
  )
  examples = [(address(corrupt(images[:1], name, SHOWN)[0]), name.replace('_', ' ')) for name in CORRUPTIONS]
  parts: list[Any] = [
    Paragraph(text),
    PageTable(('corruption', *(f'strength {s}' for s in STRENGTHS), 'mean'), rows, 'Accuracy in percent.'),
    Gallery(
      examples,
      f'One image under each corruption at strength {SHOWN}. The library makes the corruptions itself, so they '
      'differ from CIFAR-10-C.',
      64,
    ),
  ]
  command = "hbf.data.augment.corruptions.corrupt(images, 'fog', strength=3)"
  return Section('corrupted', 'Corrupted images', parts, numbers, command)
