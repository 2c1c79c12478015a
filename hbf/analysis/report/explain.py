"""The page of a run: its sections, one after another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hbf.analysis.centers import Census
from hbf.analysis.ood_images import others
from hbf.analysis.report.page import Beside, Lacks, Section, Text
from hbf.analysis.report.sections import attention, centers, corrupted, errors, outliers, pair, relevance, run, unit
from hbf.analysis.trained_run import TrainedRun
from hbf.training.machine import commit, device_name

TITLES = {
  'run': 'The run',
  'errors': 'Errors',
  'unit': 'The unit',
  'centers': 'Centers',
  'attention': 'Attention',
  'relevance': 'What decides an image',
  'outliers': 'Out of distribution',
  'corrupted': 'Corrupted images',
}
PAIR = 'The two beside each other'


def sections(subject: TrainedRun, outside: Mapping[str, np.ndarray]) -> Iterator[Section]:
  """The sections of a run's page, in the order of `TITLES`; one that the model has no part for says so.

  Args:
    subject: the run.
    outside: images of other data sets, as `hbf.analysis.ood_images.others` gives them.

  Raises:
    UserError: an image can't be read.
  """
  training = subject.read('train', centers.TRAINING)
  found: Mapping[str, Census] = {}

  def of_centers() -> Section:
    nonlocal found
    section, found = centers.section(subject, training)
    return section

  makers: dict[str, Callable[[], Section]] = {
    'run': lambda: run.section(subject),
    'errors': lambda: errors.section(subject),
    'unit': lambda: unit.section(subject),
    'centers': of_centers,
    'attention': lambda: attention.section(subject),
    'relevance': lambda: relevance.section(subject, training, found),
    'outliers': lambda: outliers.section(subject, outside),
    'corrupted': lambda: corrupted.section(subject),
  }
  for name, title in TITLES.items():
    yield _made(name, title, makers[name])


def paired(one: TrainedRun, other: TrainedRun, outside: Mapping[str, np.ndarray]) -> Iterator[Section]:
  """The sections of two runs beside each other, after what tells the two apart.

  Args:
    one: the run.
    other: the one that it is compared to.
    outside: as for `sections`.

  Raises:
    UserError: an image can't be read.
  """
  yield _made('pair', PAIR, lambda: pair.section(one, other))
  names = [subject.workdir.name for subject in (one, other)]
  for first, second in zip(sections(one, outside), sections(other, outside), strict=True):
    columns = list(zip(names, (first.parts, second.parts), strict=True))
    numbers = {'first': first.numbers, 'other': second.numbers}
    yield Section(first.name, first.title, [Beside(columns)], numbers, first.command)


def _made(name: str, title: str, make: Callable[[], Section]) -> Section:
  try:
    return make()
  except Lacks as reason:
    return Section(name, title, [Text(str(reason))], {'lacks': str(reason)})


def explain(subject: TrainedRun, against: TrainedRun | None, ood: Sequence[str]) -> tuple[int, Iterator[Section]]:
  """How many sections the page has, and the sections, which take their time.

  Args:
    subject: the run.
    against: another to set beside it, or None.
    ood: names of data sets, or folders of images, of other kinds than those trained on.

  Raises:
    UserError: as `hbf.analysis.ood_images.others`.
  """
  outside = others(subject, ood)
  if against is None:
    return len(TITLES), sections(subject, outside)
  return len(TITLES) + 1, paired(subject, against, outside)


def about(subject: TrainedRun) -> str:
  """Describe a run in a line."""
  config = subject.restored.config
  about = f'{config.model.name} on {config.data.name}, recipe {config.recipe}, seed {config.seed}'
  return f'{about}, average' if subject.average else about


def numbers(made: Sequence[Section]) -> dict[str, Any]:
  """What the sections found, by name, for JSON, and by which code and where."""
  return {section.name: dict(section.numbers) for section in made} | {'device': device_name(), 'commit': commit()}
