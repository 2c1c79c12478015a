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
from hbf.evaluation.figures import CLASSIFICATION
from hbf.markdown import table
from hbf.training.workdir import read_predictions

Results = dict[int, dict[str, Any]]  # result.json by seed

FIGURE = CLASSIFICATION[0]  # what arms are compared by
HEADER = (
  'model',
  'parameters',
  'MFLOP',
  'seeds',
  f'{FIGURE.label} (sd)',
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
    mean: of the compared figure, over the seeds; None without a result.
    sd: standard deviation over the seeds; None with fewer than two.
    seeds_difference: to the group's first arm, over the seeds that both have; None for the first.
    images_difference: likewise, over the test images.
    published: what others report of the figure.
  """

  group: str
  label: str
  results: Results
  failed: dict[int, str]
  mean: float | None
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
    values = [result[FIGURE.name] for result in results[arm].values()]
    common = [seed for seed in results[arm] if seed in results[first]] if arm != first else []
    of_seeds = [[results[a][seed][FIGURE.name] for seed in common] for a in (arm, first)]
    rows.append(
      Row(
        group=arm.group,
        label=arm.label,
        results=results[arm],
        failed={seed: failure(workdir, arm.run(seed)) or '' for seed in grid.seeds if seed not in results[arm]},
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values) if len(values) > 1 else None,
        seeds_difference=over_seeds(*of_seeds) if common else None,
        images_difference=_over_images(arm, first, common, workdir),
        published=arm.published,
      )
    )
  return rows


def markdown(rows: list[Row]) -> str:
  """Of each group a title, a table and how to read it; then the runs that have no result."""
  parts = []
  for group in dict.fromkeys(row.group for row in rows):
    of_group = [row for row in rows if row.group == group]
    columns = [i for i, name in enumerate(HEADER) if name != 'published' or any(row.published for row in of_group)]
    header, *cells = (tuple(line[i] for i in columns) for line in (HEADER, *map(_cells, of_group)))
    parts += [_title(group, of_group), table(header, cells), _note(of_group)]
  missing = [f'- {row.group} {row.label}, seed {seed}: {why}' for row in rows for seed, why in row.failed.items()]
  parts += ['Without a result:', '\n'.join(missing)] if missing else []
  return '\n\n'.join(filter(None, parts)) + '\n'


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
  how = sorted({f'recipe {result["recipe"]}, {result["epochs"]:g} epochs' for result in results})
  where = sorted({result['device'] for result in results})
  seeds = sorted({seed for row in rows for seed in row.results})
  return f'{group}, {" or ".join(how)}, seeds {", ".join(map(str, seeds))}; on {" or ".join(where)}:'


def _note(rows: list[Row]) -> str:
  """How the differences are to be read; '' if there are none."""
  compared = [row for row in rows if row.seeds_difference]
  if not compared:
    return ''
  found = [interval for row in compared for interval in (row.seeds_difference, row.images_difference)]
  intervals = sum(bool(_bounds(interval)) for interval in found)
  misses = round((1 - LEVEL) * intervals)
  sentences = [
    f'Differences are to {rows[0].label}, paired by seed, with {LEVEL:.0%} intervals: over the seeds (would other '
    'seeds show it?) and over the test images (would other images?).',
    f'One such interval in {round(1 / (1 - LEVEL))} misses by chance, of these {intervals} so about {misses}.'
    if misses
    else '',
    'Where there is one seed, there is no interval over the seeds, and nothing is said of others.'
    if any(not _bounds(row.seeds_difference) for row in compared)
    else '',
  ]
  return ' '.join(filter(None, sentences))


def _cells(row: Row) -> tuple[str, ...]:
  some = next(iter(row.results.values()), None)
  if some is None or row.mean is None:
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
    f'**{row.mean:{FIGURE.form}}**' + (f' ({row.sd:{FIGURE.form}})' if row.sd is not None else ''),
    f'{row.seeds_difference.estimate:+{FIGURE.form}}' if row.seeds_difference else '',
    _bounds(row.seeds_difference),
    _bounds(row.images_difference),
    f'{row.published:{FIGURE.form}}' if row.published is not None else '',
    f'{mean["train_seconds"] / 60:.1f}',
    f'{mean["images_per_second"]:,.0f}',
    f'{mean["peak_memory_bytes"] / 1e6:,.0f}',
  )


def _bounds(interval: Interval | None) -> str:
  if interval is None or interval.low is None or interval.high is None:
    return ''
  return f'{interval.low:+{FIGURE.form}} … {interval.high:+{FIGURE.form}}'
