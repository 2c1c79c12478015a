"""How much of the accuracy is left when images are corrupted."""

from typing import Any

import numpy as np

from hbf.analysis.report.page import Lacks, Section, Shown, Table, Text
from hbf.analysis.report.sections.errors import address
from hbf.analysis.trained_run import TrainedRun
from hbf.data.augment.corruptions import CORRUPTIONS, GROUPS, STRENGTHS, corrupt

IMAGES = 500  # of 32 pixels a side; of larger ones, which take longer, fewer
FEWEST = 50
SHOWN = 3  # strength of the examples


def section(subject: TrainedRun) -> Section:
  """The 15 common corruptions at 5 strengths, of some test images; raises `Lacks` where these aren't square."""
  height, width, _ = subject.task.shape
  if height != width:
    raise Lacks('The corruptions are those of square images, and these are not.')
  images, labels = subject.read('test', max(FEWEST, IMAGES * 32**2 // (height * width)))
  clean = 100 * (subject.logits(images).argmax(axis=1) == labels)
  right = {
    name: np.stack([100 * (subject.logits(corrupt(images, name, s)).argmax(axis=1) == labels) for s in STRENGTHS])
    for name in CORRUPTIONS
  }
  error = 100 - np.mean(list(right.values()), axis=(0, 1))  # of each image
  half = 1.96 * error.std(ddof=1) / np.sqrt(len(error))
  accuracy = {name: of_name.mean(axis=1) for name, of_name in right.items()}
  rows = [('none', *[''] * (len(STRENGTHS)), f'{clean.mean():.1f}')]
  rows += [(name.replace('_', ' '), *(f'{z:.1f}' for z in z_), f'{z_.mean():.1f}') for name, z_ in accuracy.items()]
  mean, low, high = float(error.mean()), float(error.mean() - half), float(error.mean() + half)
  numbers = {'images': len(labels), 'accuracy': {name: z.tolist() for name, z in accuracy.items()}}
  numbers |= {'accuracy_clean': float(clean.mean()), 'mean_corruption_error': mean, 'interval': [low, high]}
  groups = {group: float(np.mean([accuracy[name] for name in names])) for group, names in GROUPS.items()}
  numbers |= {'accuracy_of_groups': groups}
  said = (
    f'Mean error over all corruptions and strengths: {mean:.2f}% (95% confidence interval: {low:.2f} to '
    f'{high:.2f}), of {len(labels)} test images; {100 - clean.mean():.2f}% without corruption. '
    f'Accuracy with {", ".join(f"{group} {z:.1f}%" for group, z in groups.items())}.'
  )
  examples = [(address(corrupt(images[:1], name, SHOWN)[0]), name.replace('_', ' ')) for name in CORRUPTIONS]
  parts: list[Any] = [
    Text(said),
    Table(('corruption', *(f'strength {s}' for s in STRENGTHS), 'mean'), rows, 'Accuracy in percent.'),
    Shown(examples, f'An image with each, at strength {SHOWN}. They are made here, and not those of CIFAR-10-C.', 64),
  ]
  command = "hbf.data.augment.corruptions.corrupt(images, 'fog', strength=3)"
  return Section('corrupted', 'Corrupted images', parts, numbers, command)
