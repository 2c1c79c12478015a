"""The table of a comparison, made from the logs of its runs."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hbf.comparison.grid import Arm, Grid
from hbf.comparison.statistics import LEVEL, SEEDS, Difference, block_length, differences
from hbf.comparison.stored import StoredRuns, open_runs
from hbf.markdown import table
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task

OPTIONAL = ('training operations', 'published')  # columns that are left out if they are empty
Results = dict[int, dict[str, Any]]  # result.json by seed


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the table: the scores of an arm over its finished runs.

  The compared score is the first one in the task's `scores`.

  Attributes:
    group: name of the group. Arms of one group are compared with each other.
    task: name of the group's task.
    label: label of the arm.
    results: the content of each finished run's result.json, by seed.
    failed: for each run without a result, the reason why it has none, by seed.
    mean: mean of the compared score over the seeds. None without a result.
    sd: standard deviation of the compared score over the seeds. None for fewer than two results.
    difference: difference from the first arm of the group. None for the first arm itself, and if `apart` is given.
    apart: reason why the arm cannot be compared, such as other test examples. '' if there is none.
    published: value of the compared score that others report, or None.
  """

  group: str
  task: str
  label: str
  results: Results
  failed: dict[int, str]
  mean: float | None
  sd: float | None
  difference: Difference | None
  apart: str
  published: float | None

  @property
  def kind(self) -> type[Task]:
    """The subclass of `Task` that implements the group's task."""
    return TASKS[self.task]

  def format(self, value: float, sign: str = '') -> str:
    """Return a value of the table's compared score as a text. If `sign` is '+', positive values get a plus sign."""
    return f'{value:{sign}{self.kind.scores[0].form}}'


def read_rows(grid: Grid, workdir: pathlib.Path) -> list[Row]:
  """Return a row for each arm of the grid, from the runs of a folder."""
  runs = open_runs(workdir)
  results = {arm: _results(arm, grid, runs) for arm in grid.arms}
  compared: dict[Arm, Difference | str] = {}
  for group in dict.fromkeys(arm.group for arm in grid.arms):
    compared |= _differences({arm: list(results[arm]) for arm in grid.arms if arm.group == group}, runs)
  rows = []
  for arm in grid.arms:
    values = [result[arm.kind.scores[0].name] for result in results[arm].values()]
    difference = compared.get(arm)
    rows.append(
      Row(
        group=arm.group,
        task=arm.task,
        label=arm.label,
        results=results[arm],
        failed={seed: runs.failure(arm.run_name(seed)) or '' for seed in grid.seeds if seed not in results[arm]},
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        difference=difference if isinstance(difference, Difference) else None,
        apart=difference if isinstance(difference, str) else '',
        published=arm.published,
      )
    )
  return rows


def markdown(rows: list[Row]) -> str:
  """Return Markdown: a title, a table and a note for each group, then a list of the runs without a result."""
  parts = []
  for group in dict.fromkeys(row.group for row in rows):
    group_rows = [row for row in rows if row.group == group]
    names = _header(group_rows[0].kind)
    kinds = {row.difference.seeds for row in group_rows if row.difference}
    lines = [_cells(row, mixed=len(kinds) > 1) for row in group_rows]
    columns = [i for i, name in enumerate(names) if name not in OPTIONAL or any(line[i].strip('–') for line in lines)]
    header, *cells = (tuple(line[i] for i in columns) for line in (names, *lines))
    parts += [_title(group, group_rows), table(header, cells), _note(group_rows)]
  missing = [f'- {row.group} {row.label}, seed {seed}: {why}' for row in rows for seed, why in row.failed.items()]
  parts += ['Without a result:', '\n'.join(missing)] if missing else []
  return '\n\n'.join(filter(None, parts)) + '\n'


def as_json(rows: list[Row]) -> str:
  """Return the rows as JSON, with the complete results of their runs."""
  return json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + '\n'


def _results(arm: Arm, grid: Grid, runs: StoredRuns) -> Results:
  found = {seed: runs.result(arm.run_name(seed), arm.kind.scores[0].name) for seed in grid.seeds}
  return {seed: result for seed, result in found.items() if result is not None}


def _differences(seeds: Mapping[Arm, Sequence[int]], runs: StoredRuns) -> dict[Arm, Difference | str]:
  """Return the difference of each arm of a group from the first arm, or the reason why there is none.

  If the first arm itself cannot be compared, it is the only arm in the result.

  Args:
    seeds: the seeds of the finished runs of each arm. The first arm is the reference.
    runs: the stored runs.
  """
  stored = {arm: [runs.predictions(arm.run_name(seed)) for seed in numbers] for arm, numbers in seeds.items()}
  first, *others = stored
  like: Mapping[str, np.ndarray] = next((run for run in stored[first] if run is not None), {})
  examples = [like[name] for name in first.kind.label_names if name in like]
  reasons = {arm: _why_apart(arm, read, examples) for arm, read in stored.items()}
  if reasons[first]:
    return {first: reasons[first]}
  arms = [first, *(arm for arm in others if not reasons[arm])]
  outcomes = [_outcomes(arm, stored[arm]) for arm in arms]
  length = block_length(outcomes[0].shape[1]) if first.kind.consecutive else 1
  found = dict(zip(arms[1:], differences(outcomes, length), strict=True))
  return {arm: found.get(arm) or reasons[arm] for arm in others}


def _outcomes(arm: Arm, read: Sequence[Mapping[str, np.ndarray] | None]) -> np.ndarray:
  """Return the scores of S runs for n test examples, [S, n]."""
  return np.array([arm.kind.example_scores(run) for run in read if run is not None])


def _why_apart(arm: Arm, read: Sequence[Mapping[str, np.ndarray] | None], examples: Sequence[np.ndarray]) -> str:
  """Return the reason why the runs of an arm cannot be compared with the first arm, or ''.

  Args:
    arm: the arm.
    read: what each finished run of the arm stored for the test examples. None if it stored nothing.
    examples: the arrays `label_names` of the first arm.
  """
  if not read:
    return 'it has no finished run'
  if any(run is None for run in read):
    return 'a run has no predictions.npz'
  for run in filter(None, read):
    if not all(np.array_equal(run[name], one) for name, one in zip(arm.kind.label_names, examples, strict=True)):
      return 'its test examples are others'
  return '' if np.isfinite(_outcomes(arm, read)).all() else 'a run has scores that are not finite'


def _header(kind: type[Task]) -> tuple[str, ...]:
  return (
    'model',
    'parameters',
    'MFLOP',
    'training operations',
    'seeds',
    f'{kind.scores[0].label} (sd)',
    'difference',
    f'{LEVEL:.0%} interval',
    'published',
  )


def _title(group: str, rows: list[Row]) -> str:
  results = [result for row in rows for result in row.results.values()]
  if not results:
    return f'{group}: no results yet'
  epochs: dict[str, set[float]] = {}
  for result in results:
    epochs.setdefault(result['recipe'], set()).add(result['epochs'])
  how = [f'recipe {name}, {" or ".join(f"{n:g}" for n in sorted(epochs[name]))} epochs' for name in sorted(epochs)]
  where = sorted({result['device'] for result in results})
  seeds = sorted({seed for row in rows for seed in row.results})
  return f'{group}, {" or ".join(how)}, seeds {", ".join(map(str, seeds))}; on {" or ".join(where)}:'


def _note(rows: list[Row]) -> str:
  """Return a note that explains the differences in the table, and why some are missing. '' if there are none."""
  found = [row.difference for row in rows if row.difference]
  missing = [f'{row.label} is not compared: {row.apart}.' for row in rows if row.apart and row.results]
  if not found:
    return ' '.join(missing)
  example, alone = rows[0].kind.example, sum(not difference.seeds for difference in found)
  over = f'over test {example}s alone' if alone == len(found) else f'over test {example}s and seeds'
  every = 'both' if len(found) == 2 else f'all {len(found)}'
  sentences = [
    f'Differences are from {rows[0].label}. Intervals are {LEVEL:.0%} confidence intervals {over}.',
    f'They are simultaneous: in {LEVEL:.0%} of comparisons, {every} contain their true difference.'
    if len(found) > 1
    else '',
    'The windows of a text are grouped into blocks of a tenth of the text.' if rows[0].kind.consecutive else '',
    f'Where a model has fewer than {SEEDS} seeds, its interval is over the {example}s alone and says nothing about '
    'other seeds.'
    if 0 < alone < len(found)
    else '',
    f'Models have fewer than {SEEDS} seeds, so nothing is said about other seeds.' if alone == len(found) else '',
    *missing,
  ]
  return ' '.join(filter(None, sentences))


def _cells(row: Row, mixed: bool) -> tuple[str, ...]:
  some, unit = next(iter(row.results.values()), None), row.kind.unit
  if some is None or row.mean is None:
    return (row.label, *('–',) * (len(_header(row.kind)) - 1))
  return (
    row.label,
    f'{some["params"]:,}',
    f'{some[f"flops_per_{unit}"] / 1e6:,.1f}',
    _operations([result['train_operations'] for result in row.results.values() if 'train_operations' in result]),
    str(len(row.results)),
    f'**{row.format(row.mean)}**' + (f' ({row.format(row.sd)})' if row.sd is not None else ''),
    row.format(row.difference.estimate, '+') if row.difference else '',
    _bounds(row, mixed),
    row.format(row.published) if row.published is not None else '',
  )


def _operations(found: Sequence[float]) -> str:
  """Return the mean number of training operations as a text. With `train.patience` it differs between seeds."""
  return f'{statistics.fmean(found):.2e}'.replace('e+', 'e') if found else ''


def _bounds(row: Row, mixed: bool) -> str:
  """Return the interval of a row as a text.

  `mixed` is True if some intervals of the table are over examples and seeds, and others over examples alone. An
  interval over examples alone is then marked as such.
  """
  difference = row.difference
  if difference is None or difference.low is None or difference.high is None:
    return ''
  over = f' ({row.kind.example}s)' if mixed and not difference.seeds else ''
  return f'{row.format(difference.low, "+")} … {row.format(difference.high, "+")}{over}'
