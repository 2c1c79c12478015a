"""The table of a comparison, from the logs of its runs alone."""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import numpy as np

from hbf.comparison.grid import Arm, Grid
from hbf.comparison.runs import failure
from hbf.comparison.statistics import LEVEL, Interval, over_examples, over_seeds
from hbf.markdown import table
from hbf.tasks.registry import TASKS
from hbf.tasks.task import Task
from hbf.training.workdir import read_predictions, read_result

Results = dict[int, dict[str, Any]]  # result.json by seed


@dataclasses.dataclass(frozen=True)
class Row:
  """An arm's figures over its finished runs.

  Attributes:
    group: the arms that are compared with each other.
    task: of the group, by name; arms are compared by the first of its figures.
    label: of the arm.
    results: by seed, what result.json holds.
    failed: by seed, why there is no result.
    mean: of the compared figure, over the seeds; None without a result.
    sd: standard deviation over the seeds; None with fewer than two.
    seeds_difference: to the group's first arm, over the seeds that both have; None for the first.
    examples_difference: likewise, over the test split's examples.
    published: what others report of the figure.
  """

  group: str
  task: str
  label: str
  results: Results
  failed: dict[int, str]
  mean: float | None
  sd: float | None
  seeds_difference: Interval | None
  examples_difference: Interval | None
  published: float | None

  @property
  def kind(self) -> type[Task]:
    """The group's task."""
    return TASKS[self.task]

  def shown(self, value: float, sign: str = '') -> str:
    """A value of the compared figure, as a table has it."""
    return f'{value:{sign}{self.kind.figures[0].form}}'


def read_rows(grid: Grid, workdir: pathlib.Path) -> list[Row]:
  """A row for each arm of the grid."""
  results = {arm: _results(arm, grid, workdir) for arm in grid.arms}
  rows = []
  for arm in grid.arms:
    first = next(other for other in grid.arms if other.group == arm.group)
    name = arm.kind.figures[0].name
    values = [result[name] for result in results[arm].values()]
    common = [seed for seed in results[arm] if seed in results[first]] if arm != first else []
    of_seeds = [[results[a][seed][name] for seed in common] for a in (arm, first)]
    rows.append(
      Row(
        group=arm.group,
        task=arm.task,
        label=arm.label,
        results=results[arm],
        failed={seed: failure(workdir, arm.run(seed)) or '' for seed in grid.seeds if seed not in results[arm]},
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        seeds_difference=over_seeds(*of_seeds) if common else None,
        examples_difference=_over_examples(arm, first, common, workdir),
        published=arm.published,
      )
    )
  return rows


def markdown(rows: list[Row]) -> str:
  """Of each group a title, a table and how to read it; then the runs that have no result."""
  parts = []
  for group in dict.fromkeys(row.group for row in rows):
    of_group = [row for row in rows if row.group == group]
    names = _header(of_group[0].kind)
    columns = [i for i, name in enumerate(names) if name != 'published' or any(row.published for row in of_group)]
    header, *cells = (tuple(line[i] for i in columns) for line in (names, *map(_cells, of_group)))
    parts += [_title(group, of_group), table(header, cells), _note(of_group)]
  missing = [f'- {row.group} {row.label}, seed {seed}: {why}' for row in rows for seed, why in row.failed.items()]
  parts += ['Without a result:', '\n'.join(missing)] if missing else []
  return '\n\n'.join(filter(None, parts)) + '\n'


def as_json(rows: list[Row]) -> str:
  """The rows with all that their runs' results hold."""
  return json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + '\n'


def _results(arm: Arm, grid: Grid, workdir: pathlib.Path) -> Results:
  found = {seed: read_result(workdir / arm.run(seed), arm.kind.figures[0].name) for seed in grid.seeds}
  return {seed: result for seed, result in found.items() if result is not None}


def _over_examples(arm: Arm, first: Arm, seeds: list[int], workdir: pathlib.Path) -> Interval | None:
  """None if a run kept nothing of its examples, or they are others."""
  found = [[read_predictions(workdir / a.run(seed)) for seed in seeds] for a in (arm, first)]
  kept = [of_run for of_arm in found for of_run in of_arm if of_run is not None]
  if not kept or len(kept) < 2 * len(seeds):
    return None
  names = [name for name in kept[0] if name in arm.kind.examples]
  if any(not np.array_equal(of_run[name], kept[0][name]) for of_run in kept for name in names):
    return None
  outcomes = np.array([arm.kind.outcomes(of_run) for of_run in kept])
  return over_examples(outcomes[: len(seeds)], outcomes[len(seeds) :])


def _header(kind: type[Task]) -> tuple[str, ...]:
  return (
    'model',
    'parameters',
    'MFLOP',
    'seeds',
    f'{kind.figures[0].label} (sd)',
    'difference',
    '95%, seeds',
    f'95%, {kind.example}s',
    'published',
    'minutes',
    f'{kind.unit}s/s',
    'memory, MB',
  )


def _title(group: str, rows: list[Row]) -> str:
  results = [result for row in rows for result in row.results.values()]
  if not results:
    return f'{group}: no results yet'
  how = sorted({f'recipe {result["recipe"]}, {result["epochs"]:g} epochs' for result in results})
  where = sorted({result['device'] for result in results})
  seeds = sorted({seed for row in rows for seed in row.results})
  return f'{group}, {" or ".join(how)}, seeds {", ".join(map(str, seeds))}; on {" or ".join(where)}:'


def _note(rows: list[Row]) -> str:
  """How the differences are to be read; '' if there are none."""
  compared = [row for row in rows if row.seeds_difference]
  if not compared:
    return ''
  found = [(row, interval) for row in compared for interval in (row.seeds_difference, row.examples_difference)]
  intervals = sum(bool(_bounds(*pair)) for pair in found)
  example, misses = rows[0].kind.example, round((1 - LEVEL) * intervals)
  sentences = [
    f'Differences are to {rows[0].label}, paired by seed, with {LEVEL:.0%} intervals: over the seeds (would other '
    f'seeds show it?) and over the test {example}s (would other {example}s?).',
    f'One such interval in {round(1 / (1 - LEVEL))} misses by chance, of these {intervals} so about {misses}.'
    if misses
    else '',
    'A difference counts the seeds that both arms have, a mean all of its own.'
    if any(row.results.keys() != rows[0].results.keys() for row in compared)
    else '',
    'Where there is one seed, there is no interval over the seeds, and nothing is said of others.'
    if any(not _bounds(row, row.seeds_difference) for row in compared)
    else '',
  ]
  return ' '.join(filter(None, sentences))


def _cells(row: Row) -> tuple[str, ...]:
  some, unit = next(iter(row.results.values()), None), row.kind.unit
  if some is None or row.mean is None:
    return (row.label, *('–',) * (len(_header(row.kind)) - 1))
  mean = {
    key: statistics.fmean(result[key] for result in row.results.values())
    for key in ('train_seconds', f'{unit}s_per_second', 'peak_memory_bytes')
  }
  return (
    row.label,
    f'{some["params"]:,}',
    f'{some[f"flops_per_{unit}"] / 1e6:,.1f}',
    str(len(row.results)),
    f'**{row.shown(row.mean)}**' + (f' ({row.shown(row.sd)})' if row.sd is not None else ''),
    row.shown(row.seeds_difference.estimate, '+') if row.seeds_difference else '',
    _bounds(row, row.seeds_difference),
    _bounds(row, row.examples_difference),
    row.shown(row.published) if row.published is not None else '',
    f'{mean["train_seconds"] / 60:.1f}',
    f'{mean[f"{unit}s_per_second"]:,.0f}',
    f'{mean["peak_memory_bytes"] / 1e6:,.0f}',
  )


def _bounds(row: Row, interval: Interval | None) -> str:
  if interval is None or interval.low is None or interval.high is None:
    return ''
  return f'{row.shown(interval.low, "+")} … {row.shown(interval.high, "+")}'
