"""The log of a run: metrics.jsonl, and the loggers that the config names."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import override

from hbf.evaluation.scores import Score
from hbf.training.loggers import Histogram, Loggers
from hbf.training.workdir import check_kinds, flatten, parse_json, replace_text

# The consequence of the advice to delete a damaged line, for messages.
_DELETED = (
  '; a deleted validation score no longer counts for the best checkpoint, train.patience and schedule plateau'
)


class MetricsWriter:
  """The log of a run, with one JSON object on each line: step, epoch and split, and values by name.

  A resumed run drops the lines of the steps after its checkpoint, because it takes these steps again.
  """

  def __init__(self, workdir: pathlib.Path, start: int, loggers: Loggers | None = None):
    """Open the log of a run that continues after step `start`. 0: a new run. `loggers` get the same numbers."""
    self._path = workdir / 'metrics.jsonl'
    # The run writes the test split again at its end. A run that starts anew writes all lines again.
    kept = [line for line in read_metrics(workdir) if line['step'] <= start and line['split'] != 'test' and start]
    replace_text(self._path, ''.join(json.dumps(line) + '\n' for line in kept))
    self._file = open(self._path, 'a')  # noqa: SIM115 (closed in close)
    self._loggers = loggers
    self._finished = False

  def write(self, step: int, epoch: float, split: str, **values: Any) -> None:
    """Write a line. The line survives a crash of the process, but maybe not a crash of the machine.

    A line of the validation split survives this too. Schedule plateau, early stopping and the choice of the best
    checkpoint read its scores when the run goes on.
    """
    self._file.write(json.dumps({'step': step, 'epoch': round(epoch, 4), 'split': split, **values}) + '\n')
    self._file.flush()
    self._finished = split == 'test'  # the last line of a run
    if split == 'validation':
      os.fsync(self._file.fileno())
    if self._loggers:
      self._loggers.numbers(step, {f'{split}/{name}': value for name, value in flatten(values).items()})

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Send histograms of the parameters to the loggers."""
    if self._loggers:
      self._loggers.histograms(step, values)

  def images(self, step: int, name: str, images: np.ndarray) -> None:
    """Send images to the loggers, uint8 [n, H, W, C]."""
    if self._loggers:
      self._loggers.images(step, name, images)

  def close(self) -> None:
    """Close the file and the loggers."""
    self._file.close()
    if self._loggers:
      self._loggers.close(self._finished)

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    self.close()


class NoWriter(MetricsWriter):
  """A log that writes nothing, for every process except the first."""

  def __init__(self) -> None:
    """Open nothing."""

  @override
  def write(self, step: int, epoch: float, split: str, **values: Any) -> None:
    pass

  @override
  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    pass

  @override
  def images(self, step: int, name: str, images: np.ndarray) -> None:
    pass

  @override
  def close(self) -> None:
    pass


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Return the lines of a run's metrics.jsonl. If a crash cut the last line short, this line is left out.

  Raises:
    UserError: another line is damaged.
  """
  path, cure = workdir / 'metrics.jsonl', f'delete this line{_DELETED}'
  if not path.exists():
    return []
  lines = path.read_bytes().split(b'\n')[:-1]  # the text after the last newline is incomplete
  found = []
  for number, line in enumerate(lines, 1):
    found.append(parse_json(line, f'line {number} of {path}', cure))
    check_kinds(found[-1], f'line {number} of {path}', cure, step=int, split=str)
  return found


def lines_with(lines: Iterable[Mapping[str, Any]], split: str, name: str) -> list[Mapping[str, Any]]:
  """Return those lines of a log that are of a split and have a score.

  If all steps of a report were skipped (`optimizer.skip`), its line has no score.

  Args:
    lines: the lines, from `read_metrics`.
    split: the split, such as 'train'.
    name: the name of the score, such as 'loss'.
  """
  return [line for line in lines if line['split'] == split and name in line]


def validation_scores(workdir: pathlib.Path, score: Score, rank: str = 'parameters') -> dict[int, float]:
  """Return the values of a score on the validation split, by step.

  Args:
    workdir: the run folder.
    score: the kind of score.
    rank: 'parameters' for the scores of the parameters, 'average' for those of their average (`checkpoint.rank`).
  """
  lines = [line for line in read_metrics(workdir) if line['split'] == 'validation']
  source, cure = f'a validation line of {workdir / "metrics.jsonl"}', f'delete this line{_DELETED}'
  found = {}
  for line in lines:
    part: Any = line.get('average') if rank == 'average' else line
    check_kinds(part, source, cure, **{score.name: (int, float)})
    found[line['step']] = part[score.name]
  return found
