"""Which images are answered wrongly, and whether the model knows."""

from typing import Any

import numpy as np

from hbf.analysis.mistakes import confused, most_ambiguous, most_confident, risk_coverage, summary
from hbf.analysis.relevance import probabilities
from hbf.analysis.report.drawing import enlarged, fitted, panel, png, rgb
from hbf.analysis.report.page import Drawing, Section, Shown, Table
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.tables import MOST_CLASSES

SHOWN = 12  # images
SIDE = 64  # pixels, of a large one


def section(subject: TrainedRun) -> Section:
  """Of the test images."""
  labels, p = subject.test.labels, probabilities(subject.test_logits)
  found = summary(subject.test_logits, labels)
  coverage, risk = risk_coverage(p.max(axis=1), p.argmax(axis=1) == labels)
  confusion = np.zeros((len(subject.classes), len(subject.classes)), int)
  np.add.at(confusion, (labels, p.argmax(axis=1)), 1)
  parts: list[Any] = [
    _by_class(subject, found) if len(subject.classes) <= MOST_CLASSES else _pairs(subject, confusion),
    _calibration(found, coverage, risk),
    _images(subject, most_confident(p, labels, SHOWN), p, 'The mistakes that it is surest of.'),
    _images(
      subject, most_ambiguous(p, SHOWN), p, 'The images whose two likeliest classes are nearest to each other.'
    ),
  ]
  if len(subject.classes) <= MOST_CLASSES:
    parts.insert(
      1, Drawing([_matrix(subject, confusion)], 'Test images by class and by answer; the color is the share.')
    )
  told = ('n', 'accuracy', 'ece', 'nll', 'per_class', 'confusion', 'reliability')
  numbers = {key: found[key] for key in told if key in found}  # of very many classes there is no confusion
  numbers |= {'area_under_risk_coverage': float(risk.mean())}
  numbers |= {f'error_at_{part}_percent': float(risk[len(risk) * part // 100 - 1]) for part in (50, 80, 90)}
  command = 'hbf.analysis.mistakes.summary(subject.test_logits, subject.test.labels)'
  return Section('errors', 'Errors', parts, numbers, command)


def _by_class(subject: TrainedRun, found: dict[str, Any]) -> Table:
  rows = []
  for i, (row, accuracy) in enumerate(zip(found['confusion'], found['per_class'], strict=True)):
    worst = max((j for j in range(len(row)) if j != i), key=row.__getitem__)
    share = '' if accuracy is None else f'{accuracy:.1f}'
    taken = f'{subject.classes[worst]} ({row[worst]})' if row[worst] else ''
    rows.append((subject.classes[i], f'{sum(row):,}', share, taken))
  return Table(('class', 'images', 'accuracy, %', 'most often taken for'), rows)


def _pairs(subject: TrainedRun, confusion: np.ndarray) -> Table:
  rows = [
    (subject.classes[label], subject.classes[answer], f'{count} of {confusion[label].sum()}')
    for label, answer, count in confused(confusion, MOST_CLASSES)
  ]
  return Table(('class', 'taken for', 'images'), rows, 'The commonest mistakes; the JSON has all.')


def _matrix(subject: TrainedRun, confusion: np.ndarray) -> Any:
  count = len(subject.classes)
  figure, axis = panel(min(7.0, 2.4 + 0.42 * count), min(6.2, 1.6 + 0.42 * count))
  share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
  axis.pcolormesh(share, cmap='cividis', vmin=0, vmax=1)
  for (i, j), number in np.ndenumerate(confusion):
    axis.text(
      j + 0.5, i + 0.5, str(number), ha='center', va='center', fontsize=8, color='k' if share[i, j] > 0.5 else 'w'
    )
  places = np.arange(count) + 0.5
  axis.set(xlabel='answer', ylabel='class', xlim=(0, count), ylim=(count, 0))
  axis.set_xticks(places, subject.classes, rotation=45, ha='right')
  axis.set_yticks(places, subject.classes)
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
  right.set(xlabel='answered, surest first, %', ylabel='wrong among them, %', xlim=(0, 100), ylim=(0, None))
  caption = (
    f'Left: how often it is right where it says so (15 bins, points as large as they are full; calibration error '
    f'{found["ece"]:.2f}%). Right: the error if it may decline to answer; {risk.mean():.2f}% on average over all '
    f'coverages, {risk[-1]:.2f}% if it answers all.'
  )
  return Drawing([reliable, declining], caption)


def _images(subject: TrainedRun, which: np.ndarray, p: np.ndarray, caption: str) -> Shown:
  images = []
  for i in which:
    two = np.argsort(-p[i], kind='stable')[:2]
    said = ', '.join(f'{subject.classes[j]} {100 * p[i, j]:.0f}%' for j in two)
    images.append((address(subject.test.images[i]), f'{subject.classes[subject.test.labels[i]]}: {said}'))
  return Shown(images, f'{caption} Below each its class, and the two likeliest answers.')


def address(image: np.ndarray) -> str:
  """An image of a data set as a PNG, small ones enlarged so that any viewer shows their pixels."""
  image = fitted(rgb(image), 2 * SIDE)
  return png(enlarged(image, max(1, SIDE // image.shape[0])))
