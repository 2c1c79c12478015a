"""Section on wrong answers and calibration."""

from typing import Any

import numpy as np

from hbf.analysis.mistakes import confused, most_ambiguous, most_confident, risk_coverage, summary
from hbf.analysis.relevance import probabilities
from hbf.analysis.report.drawing import enlarged, fitted, panel, png, rgb
from hbf.analysis.report.page import Drawing, Gallery, PageTable, Section
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.tables import MOST_CLASSES

SHOWN = 12  # images in a gallery
SIDE = 64  # least side of a shown image in pixels


def section(run: TrainedRun) -> Section:
  """Return the section: wrong answers to test images, and the calibration of the confidence."""
  labels, p = run.test.labels, probabilities(run.test_logits)
  found = summary(run.test_logits, labels)
  coverage, risk = risk_coverage(p.max(axis=1), p.argmax(axis=1) == labels)
  confusion = np.zeros((len(run.classes), len(run.classes)), int)
  np.add.at(confusion, (labels, p.argmax(axis=1)), 1)
  parts: list[Any] = [
    _by_class(run, found) if len(run.classes) <= MOST_CLASSES else _pairs(run, confusion),
    _calibration(found, coverage, risk),
    _images(run, most_confident(p, labels, SHOWN), p, 'The most confident mistakes.'),
    _images(run, most_ambiguous(p, SHOWN), p, 'The images with the smallest gap between the two likeliest classes.'),
  ]
  if len(run.classes) <= MOST_CLASSES:
    caption = 'Test images by class and answer. Color: share of the images of a class.'
    parts.insert(1, Drawing([_matrix(run, confusion)], caption))
  keys = ('n', 'accuracy', 'ece', 'nll', 'per_class', 'confusion', 'reliability')
  numbers = {key: found[key] for key in keys if key in found}  # with very many classes there is no confusion matrix
  numbers |= {'area_under_risk_coverage': float(risk.mean())}
  numbers |= {f'error_at_{part}_percent': float(risk[len(risk) * part // 100 - 1]) for part in (50, 80, 90)}
  command = 'hbf.analysis.mistakes.summary(run.test_logits, run.test.labels)'
  return Section('errors', 'Errors', parts, numbers, command)


def _by_class(run: TrainedRun, found: dict[str, Any]) -> PageTable:
  rows = []
  for i, (row, accuracy) in enumerate(zip(found['confusion'], found['per_class'], strict=True)):
    worst = max((j for j in range(len(row)) if j != i), key=row.__getitem__)
    share = '' if accuracy is None else f'{accuracy:.1f}'
    taken = f'{run.classes[worst]} ({row[worst]})' if row[worst] else ''
    rows.append((run.classes[i], f'{sum(row):,}', share, taken))
  return PageTable(('class', 'images', 'accuracy, %', 'most often taken for'), rows)


def _pairs(run: TrainedRun, confusion: np.ndarray) -> PageTable:
  rows = [
    (run.classes[label], run.classes[answer], f'{count} of {confusion[label].sum()}')
    for label, answer, count in confused(confusion, MOST_CLASSES)
  ]
  return PageTable(('class', 'taken for', 'images'), rows, 'The most common mistakes.')


def _matrix(run: TrainedRun, confusion: np.ndarray) -> Any:
  count = len(run.classes)
  figure, axis = panel(min(7.0, 2.4 + 0.42 * count), min(6.2, 1.6 + 0.42 * count))
  share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
  axis.pcolormesh(share, cmap='cividis', vmin=0, vmax=1)
  for (i, j), number in np.ndenumerate(confusion):
    axis.text(
      j + 0.5, i + 0.5, str(number), ha='center', va='center', fontsize=8, color='k' if share[i, j] > 0.5 else 'w'
    )
  ticks = np.arange(count) + 0.5
  axis.set(xlabel='answer', ylabel='class', xlim=(0, count), ylim=(count, 0))
  axis.set_xticks(ticks, run.classes, rotation=45, ha='right')
  axis.set_yticks(ticks, run.classes)
  axis.grid(visible=False)
  return figure


def _calibration(found: dict[str, Any], coverage: np.ndarray, risk: np.ndarray) -> Drawing:
  (reliable, left), (declining, right) = panel(), panel()
  bins = found['reliability']
  left.plot([0, 100], [0, 100], color='0.5', lw=1, ls='--')
  sizes = [4 + 60 * part['n'] / found['n'] for part in bins]
  left.plot([part['confidence'] for part in bins], [part['accuracy'] for part in bins], lw=1)
  left.scatter([part['confidence'] for part in bins], [part['accuracy'] for part in bins], s=sizes)
  left.set(xlabel='confidence, %', ylabel='accuracy, %', xlim=(0, 100), ylim=(0, 100))
  shown = np.unique(np.linspace(len(risk) // 50, len(risk) - 1, 300).astype(int))
  right.plot(coverage[shown], risk[shown])
  right.set(xlabel='coverage, most confident first, %', ylabel='error, %', xlim=(0, 100), ylim=(0, None))
  caption = (
    'Left: accuracy against confidence in 15 bins. A larger point has more images. The expected calibration error is '
    f'{found["ece"]:.2f}%. Right: the error if the model answers only the images that it is most confident about. It '
    f'is {risk.mean():.2f}% on average over all coverages, and {risk[-1]:.2f}% for all images.'
  )
  return Drawing([reliable, declining], caption)


def _images(run: TrainedRun, indices: np.ndarray, p: np.ndarray, caption: str) -> Gallery:
  images = []
  for i in indices:
    two = np.argsort(-p[i], kind='stable')[:2]
    answers = ', '.join(f'{run.classes[j]} {100 * p[i, j]:.0f}%' for j in two)
    images.append((address(run.test.images[i]), f'{run.classes[run.test.labels[i]]}: {answers}'))
  return Gallery(images, f'{caption} Below each image: its class, and the two likeliest answers.')


def address(image: np.ndarray) -> str:
  """Return an image as a data URL of a PNG. Small images are enlarged and large images are shrunk.

  Args:
    image: uint8 [height, width, channels].
  """
  image = fitted(rgb(image), 2 * SIDE)
  return png(enlarged(image, max(1, SIDE // image.shape[0])))
