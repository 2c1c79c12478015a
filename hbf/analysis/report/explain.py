"""The sections of the page that `hbf explain` writes for a run on images."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hbf.analysis.centers import Census
from hbf.analysis.ood_images import load_ood_images
from hbf.analysis.report.page import Columns, MissingPart, Paragraph, Section
from hbf.analysis.report.sections import (
  attention,
  centers,
  corrupted,
  errors,
  interventions,
  outliers,
  pair,
  relevance,
  summary,
  unit,
  voters,
)
from hbf.analysis.texts import TextRun
from hbf.analysis.trained_run import TrainedRun
from hbf.training.machine import commit, device_name

TITLES = {
  'run': 'The run',
  'errors': 'Errors',
  'unit': 'The kernels',
  'centers': 'Centers',
  'attention': 'Attention',
  'relevance': 'Relevance of patches and centers',
  'voters': 'Images and their voters',
  'interventions': 'Interventions',
  'outliers': 'Out of distribution',
  'corrupted': 'Corrupted images',
}
PAIR = 'Comparison of the two runs'


def sections(run: TrainedRun, outside: Mapping[str, np.ndarray]) -> Iterator[Section]:
  """Yield the sections of a run's page in the order of `TITLES`.

  If the model does not have the parts that a section describes, the section says so.

  Args:
    run: the run.
    outside: images of other data sets, as returned by `hbf.analysis.ood_images.load_ood_images`.

  Raises:
    UserError: an image cannot be read.
  """
  training = run.read('train', centers.TRAINING)
  found: Mapping[str, Census] = {}

  def centers_section() -> Section:
    nonlocal found
    section, found = centers.section(run, training)
    return section

  makers: dict[str, Callable[[], Section]] = {
    'run': lambda: summary.section(run),
    'errors': lambda: errors.section(run),
    'unit': lambda: unit.section(run),
    'centers': centers_section,
    'attention': lambda: attention.section(run),
    'relevance': lambda: relevance.section(run, training, found),
    'voters': lambda: voters.section(run, training, found),
    'interventions': lambda: interventions.section(run, training, found),
    'outliers': lambda: outliers.section(run, outside),
    'corrupted': lambda: corrupted.section(run),
  }
  for name, title in TITLES.items():
    yield _make(name, title, makers[name])


def paired(one: TrainedRun, other: TrainedRun, outside: Sequence[Mapping[str, np.ndarray]]) -> Iterator[Section]:
  """Yield a section that compares two runs, then the sections of both runs side by side.

  Args:
    one: the first run.
    other: the run to compare the first run with.
    outside: for each run, images of other data sets, as for `sections`. The images of the runs may differ in shape.

  Raises:
    UserError: an image cannot be read.
  """
  yield _make('pair', PAIR, lambda: pair.section(one, other))
  names = [run.workdir.name for run in (one, other)]
  for first, second in zip(*map(sections, (one, other), outside), strict=True):
    columns = list(zip(names, (first.parts, second.parts), strict=True))
    numbers = {'first': first.numbers, 'other': second.numbers}
    yield Section(first.name, first.title, [Columns(columns)], numbers, first.command)


def _make(name: str, title: str, make: Callable[[], Section]) -> Section:
  try:
    return make()
  except MissingPart as reason:
    return Section(name, title, [Paragraph(str(reason))], {'lacks': str(reason)})


def explain(run: TrainedRun, against: TrainedRun | None, ood: Sequence[str]) -> tuple[int, Iterator[Section]]:
  """Return the number of sections of the page, and an iterator that computes the sections.

  Args:
    run: the run.
    against: another run to compare the run with, or None.
    ood: names of data sets, or folders of images, that differ from the training data.

  Raises:
    UserError: as for `hbf.analysis.ood_images.load_ood_images`.
  """
  outside = load_ood_images(run, ood)
  if against is None:
    return len(TITLES), sections(run, outside)
  return len(TITLES) + 1, paired(run, against, [outside, load_ood_images(against, ood)])


def about(run: TrainedRun | TextRun) -> str:
  """Describe a run in one line."""
  config = run.restored.config
  about = f'{config.model.name} on {config.data.name}, recipe {config.recipe}, seed {config.seed}'
  return f'{about}, average' if run.average else about


def numbers(sections: Sequence[Section]) -> dict[str, Any]:
  """Return the numbers of each section by the section's name, for JSON.

  The result also has the keys 'device' and 'commit': the device and the commit of the library that computed them.
  """
  found = {section.name: _finite(section.numbers) for section in sections}
  return found | {'device': device_name(), 'commit': commit()}


def _finite(value: Any) -> Any:
  """Return a value with None in place of infinite numbers and NaN, which JSON does not have."""
  if isinstance(value, Mapping):
    return {key: _finite(of) for key, of in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(of) for of in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
