"""The page of a run: its sections, one after another."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hbf.analysis.centres import Census
from hbf.analysis.page import Lacks, Section, Text
from hbf.analysis.sections import attention, centres, errors, relevance, run, unit
from hbf.analysis.subject import Subject

TITLES = {
  'run': 'The run',
  'errors': 'Errors',
  'unit': 'The unit',
  'centres': 'Centres',
  'attention': 'Attention',
  'relevance': 'What decides an image',
}


def sections(subject: Subject) -> Iterator[Section]:
  """The sections of a run's page; one that the model has no part for says so.

  Raises:
    UserError: an image can't be read.
  """
  training = subject.read('train', centres.TRAINING)
  found: Mapping[str, Census] = {}

  def of_centres() -> Section:
    nonlocal found
    section, found = centres.section(subject, training)
    return section

  makers: dict[str, Callable[[], Section]] = {
    'run': lambda: run.section(subject),
    'errors': lambda: errors.section(subject),
    'unit': lambda: unit.section(subject),
    'centres': of_centres,
    'attention': lambda: attention.section(subject),
    'relevance': lambda: relevance.section(subject, training, found),
  }
  for name, make in makers.items():
    try:
      yield make()
    except Lacks as reason:
      yield Section(name, TITLES[name], [Text(str(reason))], {'lacks': str(reason)})


def numbers(made: list[Section]) -> dict[str, Any]:
  """What the sections found, by name, for JSON."""
  return {section.name: dict(section.numbers) for section in made}
