"""Whether the model knows what it hasn't been trained on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.nearness import nearness
from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, Section, Table, Text
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.outliers import Estimate, auroc_difference, energy_score, separation, softmax_score

IMAGES = 2_000  # most of each data set
RESPONSE, SOFTMAX, ENERGY = 'greatest response', 'softmax', 'energy'


def section(subject: TrainedRun, others: Mapping[str, np.ndarray]) -> Section:
  """Scores of test images beside those of others.

  Args:
    subject: the run.
    others: images of other data sets by name, uint8 [m, height, width, channels], of the test images' shape.
  """
  inside = _scores(subject, subject.read('test', IMAGES).images)
  outside = {name: _scores(subject, images[:IMAGES]) for name, images in others.items()}
  numbers: dict[str, Any] = {}
  rows = []
  for name, scores in outside.items():
    numbers[name] = {'images': len(scores[SOFTMAX])}
    for score in inside:
      found = separation(inside[score], scores[score])
      better = auroc_difference((inside[score], scores[score]), (inside[SOFTMAX], scores[SOFTMAX]))
      numbers[name][score] = {'auroc': vars(found.auroc), 'fpr95': vars(found.fpr95), 'over_softmax': vars(better)}
      over = '' if score == SOFTMAX else _written(better, '+.2f')
      rows.append((name, score, _written(found.auroc), _written(found.fpr95), over))
  header = ('other images', 'score', 'AUROC, %', 'FPR95, %', 'AUROC over softmax')
  parts: list[Any] = [
    Table(
      header,
      rows,
      f'At most {IMAGES:,} images of each, with 95% intervals. AUROC 50 is chance; FPR95: lower is better.',
    )
  ]
  if RESPONSE in inside:
    parts.append(_histogram(inside[RESPONSE], {name: scores[RESPONSE] for name, scores in outside.items()}))
  else:
    parts.append(Text('This model has no centers, so no greatest response.'))
  command = 'hbf.evaluation.outliers.separation(inside, outside); hbf.analysis.nearness.nearness(subject, images)'
  return Section('outliers', 'Out of distribution', parts, numbers, command)


def _scores(subject: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """By name, greater where an image is more like those of training: [n]."""
  logits = subject.logits(images)
  near = nearness(subject, images)
  scores = {SOFTMAX: softmax_score(logits), ENERGY: energy_score(logits)}
  if near:
    scores[RESPONSE] = np.mean(list(near.values()), axis=0)
  return scores | {f'{RESPONSE}, {block}': of_block for block, of_block in near.items()}


def _written(estimate: Estimate, form: str = '.2f') -> str:
  return f'{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})'


def _histogram(inside: np.ndarray, outside: Mapping[str, np.ndarray]) -> Drawing:
  figure, axis = panel()
  both = np.concatenate([inside, *outside.values()])
  bins = np.linspace(float(np.quantile(both, 0.002)), float(np.quantile(both, 0.998)), 50).tolist()
  for name, scores in {'test images': inside, **outside}.items():
    axis.hist(scores, bins=bins, density=True, histtype='step', label=name)
  axis.set(xlabel='greatest log K', ylabel='density')
  legend(axis)
  return Drawing([figure], 'The greatest response: the largest log K over the centers, mean over tokens and blocks.')
