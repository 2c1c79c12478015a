"""The table of a comparison, from the logs of its runs alone."""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import numpy as np

from hbf.comparison.grid import Arm, Grid
from hbf.comparison.runs import failure
from hbf.comparison.statistics import Interval, over_examples, over_seeds
from hbf.markdown import table
from hbf.training.workdir import read_predictions

Results = dict[int, dict[str, Any]]  # result.json by seed

HEADER = (
  'model',
  'parameters',
  'MFLOP',
  'seeds',
  'accuracy, % (sd)',
  'difference',
  '95%, seeds',
  '95%, images',
  'published',
  'minutes',
  'images/s',
  'memory, MB',
)


@dataclasses.dataclass(frozen=True)
class Row:
  """An arm's figures over its finished runs.

  Attributes:
    group: the arms that are compared with each other.
    label: of the arm.
    results: by seed, what result.json holds.
    failed: by seed, why there is no result.
    accuracy: mean test accuracy in percent; None without a result.
    sd: standard deviation over the seeds; None with fewer than two.
    seeds_difference: to the group's first arm, in points, over the seeds that both have; None for the first.
    images_difference: likewise, over the test images.
    published: accuracy that others report.
  """

  group: str
  label: str
  results: Results
  failed: dict[int, str]
  accuracy: float | None
  sd: float | None
  seeds_difference: Interval | None
  images_difference: Interval | None
  published: float | None


def read_rows(grid: Grid, workdir: pathlib.Path) -> list[Row]:
  """A row for each arm of the grid."""
  results = {arm: _results(arm, grid, workdir) for arm in grid.arms}
  rows = []
  for arm in grid.arms:
    first = next(other for other in grid.arms if other.group == arm.group)
    accuracies = [result['accuracy'] for result in results[arm].values()]
    common = [seed for seed in results[arm] if seed in results[first]] if arm != first else []
    of_seeds = [[results[a][seed]['accuracy'] for seed in common] for a in (arm, first)]
    rows.append(
      Row(
        group=arm.group,
        label=arm.label,
        results=results[arm],
        failed={seed: failure(workdir, arm.run(seed)) or '' for seed in grid.seeds if seed not in results[arm]},
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        sd=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        seeds_difference=over_seeds(*of_seeds) if common else None,
        images_difference=_over_images(arm, first, common, workdir),
        published=arm.published,
      )
    )
  return rows


def markdown(rows: list[Row]) -> str:
  """A table for each group, and the runs that have no result."""
  parts = []
  for group in dict.fromkeys(row.group for row in rows):
    of_group = [row for row in rows if row.group == group]
    columns = [i for i, name in enumerate(HEADER) if name != 'published' or any(row.published for row in of_group)]
    header, *cells = (tuple(line[i] for i in columns) for line in (HEADER, *map(_cells, of_group)))
    parts += [_title(group, of_group), table(header, cells)]
  missing = [f'- {row.group} {row.label}, seed {seed}: {why}' for row in rows for seed, why in row.failed.items()]
  return '\n\n'.join(parts + (['Without a result:\n\n' + '\n'.join(missing)] if missing else [])) + '\n'


def as_json(rows: list[Row]) -> str:
  """The rows with all that their runs' results hold."""
  return json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + '\n'


def _results(arm: Arm, grid: Grid, workdir: pathlib.Path) -> Results:
  paths = {seed: workdir / arm.run(seed) / 'result.json' for seed in grid.seeds}
  return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}


def _over_images(arm: Arm, first: Arm, seeds: list[int], workdir: pathlib.Path) -> Interval | None:
  """None if a run kept no predictions, or they are of other images."""
  found = [[read_predictions(workdir / a.run(seed)) for seed in seeds] for a in (arm, first)]
  flat = [pair for of_arm in found for pair in of_arm]
  if not flat or any(pair is None or not np.array_equal(pair[0], flat[0][0]) for pair in flat):  # type: ignore[index]
    return None
  ours, reference = (np.array([labels == predictions for labels, predictions in of_arm]) for of_arm in found)  # type: ignore[misc]
  return over_examples(ours, reference)


def _title(group: str, rows: list[Row]) -> str:
  results = [result for row in rows for result in row.results.values()]
  if not results:
    return f'{group}: no results yet'
  about = {
    f'recipe {result["recipe"]}, {result["epochs"]:g} epochs, {result["device"]}'
    for result in sorted(results, key=lambda result: result['device'])
  }
  seeds = sorted({seed for row in rows for seed in row.results})
  return (
    f'{group}, {"; ".join(sorted(about))}; seeds {", ".join(map(str, seeds))}; differences to {rows[0].label} '
    'paired by seed, with 95% intervals over the seeds and over the test images:'
  )


def _cells(row: Row) -> tuple[str, ...]:
  some = next(iter(row.results.values()), None)
  if some is None or row.accuracy is None:
    return (row.label, *('–',) * (len(HEADER) - 1))
  mean = {
    key: statistics.fmean(result[key] for result in row.results.values())
    for key in ('train_seconds', 'images_per_second', 'peak_memory_bytes')
  }
  return (
    row.label,
    f'{some["params"]:,}',
    f'{some["flops_per_image"] / 1e6:,.1f}',
    str(len(row.results)),
    f'**{row.accuracy:.2f}**' + (f' ({row.sd:.2f})' if row.sd is not None else ''),
    f'{row.seeds_difference.estimate:+.2f}' if row.seeds_difference else '',
    _bounds(row.seeds_difference),
    _bounds(row.images_difference),
    f'{row.published:.2f}' if row.published is not None else '',
    f'{mean["train_seconds"] / 60:.1f}',
    f'{mean["images_per_second"]:,.0f}',
    f'{mean["peak_memory_bytes"] / 1e6:,.0f}',
  )


def _bounds(interval: Interval | None) -> str:
  if interval is None or interval.low is None or interval.high is None:
    return ''
  return f'{interval.low:+.2f} … {interval.high:+.2f}'
