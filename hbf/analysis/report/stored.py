"""Stored numbers of a study that measures runs: a row for each run and measurement."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hbf.errors import UserError

Measured = Mapping[str, Any]
Row = Mapping[str, Any]


def models(measured: Measured) -> list[str]:
  """Return the names of the models, in the order of their first rows."""
  return [*dict.fromkeys(row['model'] for row in measured['rows'])]


def rows_of_runs(
  measured: Measured, model: str, name: Callable[[Row], str], wanted: Sequence[str]
) -> list[list[Row]]:
  """Return a list for each of a model's runs: its stored rows of the measurements `wanted`.

  Args:
    measured: the stored numbers.
    model: the name of the model.
    name: a function that returns the name of a row's measurement, such as 'the corruption fog'. If a run has several
      rows of a measurement, the last row counts.
    wanted: names of measurements.

  Raises:
    UserError: a run lacks a measurement.
  """
  rows = {(row['run'], name(row)): row for row in measured['rows'] if row['model'] == model}
  runs = dict.fromkeys(run for run, _ in rows)
  if missing := [(run, each) for run in runs for each in wanted if (run, each) not in rows]:
    run, each = missing[0]
    raise UserError(f'{run} was not measured under {each}: measure again, without --report')
  return [[rows[run, each] for each in wanted] for run in runs]
