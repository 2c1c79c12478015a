"""Scores of the arms on held-out examples. Use these scores to choose between arms, not test scores."""

import pathlib
import statistics
from collections.abc import Sequence

from hbf.comparison.grid import Arm, Grid
from hbf.comparison.stored import StoredRuns, open_runs
from hbf.errors import UserError
from hbf.evaluation.scores import Score
from hbf.markdown import table


def held_out_table(grid: Grid, workdir: pathlib.Path) -> str:
  """Return a Markdown table for each group: its arms' scores on held-out examples, at the end of training.

  A score is the mean over the finished runs, with its standard deviation over the seeds. In each table, the best
  value of the first score is bold.

  Raises:
    UserError: there are finished runs, but none of them held examples out.
  """
  runs = open_runs(workdir)
  ends = {arm: _ends(arm, grid, runs) for arm in grid.arms}
  if not any(ends.values()) and any(runs.failure(arm.run_name(seed)) is None for arm, seed in grid.runs()):
    raise UserError(f'the runs of {workdir} held out no examples: train with --config.data.validation=0.1')
  parts = []
  for group in dict.fromkeys(arm.group for arm in grid.arms):
    arms = [arm for arm in grid.arms if arm.group == group]
    kind = arms[0].kind
    first = kind.scores[0]
    means = [_mean(ends[arm], first) for arm in arms if ends[arm]]
    best = first.better(means) if means else None
    rows = []
    for arm in arms:
      cells = [_format(ends[arm], score) for score in kind.scores]
      if ends[arm] and _mean(ends[arm], first) == best:
        cells[0] = f'**{cells[0]}**'
      rows.append((arm.label, str(len(ends[arm])), *cells))
    header = ('model', 'seeds', *(f'{score.label} (sd)' for score in kind.scores))
    parts += [f'{group}, held-out {kind.example}s at the end of training:', table(header, rows)]
  return '\n\n'.join(parts)


def _ends(arm: Arm, grid: Grid, runs: StoredRuns) -> list[dict[str, float]]:
  """Return the scores on held-out examples at the end of each finished run of an arm."""
  names = [arm.run_name(seed) for seed in grid.seeds]
  logs = [runs.metrics(name) for name in names if runs.failure(name) is None]
  return [line for log in logs for line in [line for line in log if line['split'] == 'validation'][-1:]]


def _mean(lines: Sequence[dict[str, float]], score: Score) -> float:
  return statistics.fmean(line[score.name] for line in lines)


def _format(lines: Sequence[dict[str, float]], score: Score) -> str:
  if not lines:
    return '–'
  values = [line[score.name] for line in lines]
  return f'{_mean(lines, score):{score.form}}' + (f' ({statistics.stdev(values):{score.form}})' if values[1:] else '')
