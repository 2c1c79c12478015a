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
    difference: difference from the first arm of the group. None for the first arm itself. Also None if one of the
      two arms has no finished run or has a run without stored outcomes, or if their test examples differ.
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
  compared: dict[Arm, Difference] = {}
  for group in dict.fromkeys(arm.group for arm in grid.arms):
    compared |= _differences({arm: list(results[arm]) for arm in grid.arms if arm.group == group}, runs)
  rows = []
  for arm in grid.arms:
    values = [result[arm.kind.scores[0].name] for result in results[arm].values()]
    rows.append(
      Row(
        group=arm.group,
        task=arm.task,
        label=arm.label,
        results=results[arm],
        failed={seed: runs.failure(arm.run_name(seed)) or '' for seed in grid.seeds if seed not in results[arm]},
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        difference=compared.get(arm),
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


def _differences(seeds: Mapping[Arm, Sequence[int]], runs: StoredRuns) -> dict[Arm, Difference]:
  """Return the difference of each arm of a group from the first arm.

  An arm is left out if it has no finished run, if a run stored no outcomes for the test examples, or if its test
  examples differ from the first arm's. If the first arm is left out, the result is empty.

  Args:
    seeds: the seeds of the finished runs of each arm. The first arm is the reference.
    runs: the stored runs.
  """
  outcomes: dict[Arm, np.ndarray] = {}
  examples: list[np.ndarray] = []
  for arm, arm_seeds in seeds.items():
    stored = [runs.predictions(arm.run_name(seed)) for seed in arm_seeds]
    read = [run for run in stored if run is not None]
    names = arm.kind.label_names
    examples = examples or [run[name] for run in read[:1] for name in names]
    alike = all(np.array_equal(run[name], array) for run in read for name, array in zip(names, examples, strict=True))
    if read and len(read) == len(stored) and alike:
      outcomes[arm] = np.array([arm.kind.example_scores(run) for run in read])
    elif not outcomes:
      return {}  # without the first arm there is no reference
  arms = list(outcomes)
  length = block_length(outcomes[arms[0]].shape[1]) if arms[0].kind.consecutive else 1
  return dict(zip(arms[1:], differences(list(outcomes.values()), length), strict=True))


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
  """Return a note that explains the differences in the table. Return '' if the table has no differences."""
  found = [row.difference for row in rows if row.difference]
  if not found:
    return ''
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
    f'{some["train_operations"]:.2e}'.replace('e+', 'e') if 'train_operations' in some else '',
    str(len(row.results)),
    f'**{row.format(row.mean)}**' + (f' ({row.format(row.sd)})' if row.sd is not None else ''),
    row.format(row.difference.estimate, '+') if row.difference else '',
    _bounds(row, mixed),
    row.format(row.published) if row.published is not None else '',
  )


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
