"""Section on out-of-distribution images."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.analysis.nearness import image_nearness
from hbf.analysis.report.drawing import legend, panel
from hbf.analysis.report.page import Drawing, MissingPart, PageTable, Paragraph, Section
from hbf.analysis.trained_run import TrainedRun
from hbf.data.pipeline.order import evenly_spaced
from hbf.evaluation.outliers import Estimate, auroc_difference, energy_score, separation, softmax_score
from hbf.ops.kernels import DIRECT

IMAGES = 2_000  # most images of each data set
RESPONSE, SOFTMAX, ENERGY = 'greatest response', 'softmax', 'energy'


def section(run: TrainedRun, others: Mapping[str, np.ndarray]) -> Section:
  """Return the section: how well several scores separate test images from out-of-distribution images.

  Args:
    run: the run.
    others: images of other data sets by name, uint8 [m, height, width, channels], in the test images' shape. Each
      data set has two images or more.

  Raises:
    MissingPart: there is a single test image.
  """
  images = run.read('test', IMAGES).images
  if len(images) < 2:
    raise MissingPart('There is a single test image: an AUROC needs two or more.')
  inside = _scores(run, images)
  outside = {name: _scores(run, images[evenly_spaced(len(images), IMAGES)]) for name, images in others.items()}
  numbers: dict[str, Any] = {}
  rows = []
  for name, scores in outside.items():
    numbers[name] = {'images': len(scores[SOFTMAX])}
    for score in inside:
      found = separation(inside[score], scores[score])
      better = auroc_difference((inside[score], scores[score]), (inside[SOFTMAX], scores[SOFTMAX]))
      numbers[name][score] = {'auroc': vars(found.auroc), 'fpr95': vars(found.fpr95), 'over_softmax': vars(better)}
      over = '' if score == SOFTMAX else _format(better, '+.2f')
      rows.append((name, score, _format(found.auroc), _format(found.fpr95), over))
  header = ('other images', 'score', 'AUROC, %', 'FPR95, %', 'AUROC minus that of softmax')
  parts: list[Any] = [
    PageTable(
      header,
      rows,
      f'At most {IMAGES:,} images of each data set, with 95% confidence intervals. An AUROC of 50 is chance. '
      'For FPR95, lower is better.',
    )
  ]
  if RESPONSE in inside:
    kernel = run.restored.config.model.stage2.kernel
    parts.append(_histogram(inside[RESPONSE], {name: scores[RESPONSE] for name, scores in outside.items()}, kernel))
  else:
    parts.append(Paragraph('Stage 2 of this model has no centers, so it has no greatest response.'))
  command = 'hbf.evaluation.outliers.separation(inside, outside); hbf.analysis.nearness.image_nearness(run, images)'
  return Section('outliers', 'Out of distribution', parts, numbers, command)


def _scores(run: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """Return several scores [n] of the images, by name.

  Test images should have greater scores than out-of-distribution images.
  """
  logits = run.logits(images)
  near = image_nearness(run, images)
  scores = {SOFTMAX: softmax_score(logits), ENERGY: energy_score(logits)}
  if near:
    scores[RESPONSE] = np.mean(list(near.values()), axis=0)
  return scores | {f'{RESPONSE}, {block}': values for block, values in near.items()}


def _format(estimate: Estimate, form: str = '.2f') -> str:
  return f'{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})'


def _histogram(inside: np.ndarray, outside: Mapping[str, np.ndarray], kernel: str) -> Drawing:
  measure = 'depth b − s' if kernel in DIRECT else 'log K'
  figure, axis = panel()
  both = np.concatenate([inside, *outside.values()])
  bins = np.linspace(float(np.quantile(both, 0.002)), float(np.quantile(both, 0.998)), 50).tolist()
  for name, scores in {'test images': inside, **outside}.items():
    axis.hist(scores, bins=bins, density=True, histtype='step', label=name)
  axis.set(xlabel=f'greatest {measure}', ylabel='density')
  legend(axis)
  caption = f'Greatest response: the largest {measure} over the centers, averaged over tokens and blocks.'
  return Drawing([figure], caption)
