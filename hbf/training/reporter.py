"""Reports of training: the log, the progress bar, and the check that the loss is still a number."""

import math
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY, SCORES
from hbf.evaluation.tables import say
from hbf.nn.parameters import mean_sigmas
from hbf.tasks.evaluator import Evaluated
from hbf.training.experiment import Experiment
from hbf.training.sharding import replicated
from hbf.training.state import Totals, TrainState
from hbf.training.stopwatch import Stopwatch
from hbf.training.writers import MetricsWriter

# Of what is shown; the log has all.
FORMATS = {score.name: score.form for score in SCORES}
FORMATS |= {'images_per_second': ',.0f', 'tokens_per_second': ',.0f'}


class Diverged(UserError):
  """The loss or a parameter is not finite any more."""


class Evaluations(NamedTuple):
  """Evaluations of a split with the parameters, with their average if any, and of its copies if any."""

  params: Evaluated
  average: Evaluated | None
  copies: 'Evaluations | None' = None

  def scores(self, *names: str) -> dict[str, Any]:
    """Return the named figures of the parameters; entries `average` and `copies` beside them hold the others'."""
    values = {name: self.params.summary[name] for name in names}
    if self.average is not None:
      values['average'] = {name: self.average.summary[name] for name in names}
    if self.copies is not None:
      values['copies'] = self.copies.scores(*names)
    return values


class Reporter:
  """Turns totals into lines, one call late: the device never waits for the host to read them."""

  def __init__(
    self, experiment: Experiment, writer: MetricsWriter, stopwatch: Stopwatch, start: int, console: Console
  ):
    """Of a run that begins or continues after step `start`, timed by the stopwatch."""
    self._experiment = experiment
    self._writer = writer
    self._stopwatch = stopwatch
    self._console = console
    # Put there by a program: with several processes `device_put` would compare what each of them puts.
    self._zeros = jax.jit(Totals.zeros, out_shardings=replicated(experiment.mesh))
    self._widths = jax.jit(mean_sigmas, out_shardings=replicated(experiment.mesh))
    self._pending: tuple[int, Totals, Any, Any] | None = None
    self._counted = stopwatch.steps, stopwatch.seconds
    columns = ('{task.description}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), '{task.fields[shown]}')
    self._bar = Progress(
      *(TextColumn(column) if isinstance(column, str) else column for column in columns),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._bar.add_task('train', total=experiment.clock.steps, completed=start, shown='')

  def report(self, step: int, state: TrainState) -> TrainState:
    """Takes the totals out of the state; `flush` reads them, once the steps are done."""
    # Asked for now, or the learning rate would wait behind the next call, and the parameters be gone.
    self._pending = step, state.totals, self._experiment.schedule(step - 1), self._widths(state.params)
    return state.replace(totals=self._zeros())

  def flush(self) -> None:
    """Writes the report that is still due; the stopwatch must have counted its steps and no later ones.

    Raises:
      Diverged: its loss is not finite.
    """
    if self._pending is None:
      return
    (step, *pending), self._pending = self._pending, None
    totals, rate, widths = jax.device_get(pending)
    check_finite(step, float(totals.loss))
    steps, batch_size, task = int(totals.steps), self._experiment.clock.batch_size, self._experiment.task
    # Not the steps of the report, some of which were taken before the run was resumed.
    timed, elapsed = self._stopwatch.steps - self._counted[0], self._stopwatch.seconds - self._counted[1]
    self._counted = self._stopwatch.steps, self._stopwatch.seconds
    values = {
      'loss': float(totals.loss) / steps,
      ACCURACY.name: 100 * int(totals.correct) / (steps * batch_size * task.predictions),
      'learning_rate': float(rate),
      'gradient_norm': float(totals.gradient_norm) / steps,
      f'{task.unit}s_per_second': round(timed * batch_size * task.units / elapsed, 1),
      'seconds': round(self._stopwatch.seconds, 2),
    }
    if widths:
      values['sigmas'] = jax.tree.map(float, widths)
    self._show(step, 'train', values)
    self._writer.write(step, self._experiment.clock.epoch(step), 'train', **values)

  def validation(self, step: int, found: Evaluations) -> dict[str, Any]:
    """Write the figures of the held-out part of train, and return them."""
    self.flush()
    values = found.scores(*(score.name for score in self._experiment.task.scores))
    self._writer.write(step, self._experiment.clock.epoch(step), 'validation', **values)
    self._show(step, 'validation', values)
    for entry in ('average', 'copies'):
      if entry in values:
        self._show(step, entry, values[entry])
    return values

  def _show(self, step: int, split: str, values: dict[str, Any]) -> None:
    shown = '  '.join(f'{name} {values[name]:{form}}' for name, form in FORMATS.items() if name in values)
    self._bar.update(self._task, completed=step, shown=shown)
    if split != 'train' or not self._console.is_terminal:
      epoch = self._experiment.clock.epoch(step)
      say(self._console, f'step {step:>6}  epoch {epoch:7.2f}  {split:<10}  {shown}')

  def __enter__(self) -> 'Reporter':
    self._bar.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.stop()


def check_finite(step: int, *values: float) -> None:
  """Raises Diverged unless all values are finite."""
  if not all(math.isfinite(value) for value in values):
    raise Diverged(
      f'training diverged: the loss or a parameter is not finite at step {step}. '
      'Checkpoints before it are intact; lower optimizer.learning_rate, or set optimizer.clip'
    )
