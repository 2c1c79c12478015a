"""Reports of training: the log, the progress bar, and the check that the loss is still a number."""

import contextlib
import math
import time
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hbf.errors import UserError
from hbf.training.experiment import Experiment
from hbf.training.sharding import state_sharding
from hbf.training.state import Totals, TrainState
from hbf.training.writers import MetricsWriter


class Diverged(UserError):
  """The loss or a parameter is not finite any more."""


class Reporter:
  """Turns totals into lines, one report late: the device never waits for the host to read them."""

  def __init__(self, experiment: Experiment, writer: MetricsWriter, start: int, console: Console):
    """Starts the clock of a run that begins or continues after step `start`."""
    self._experiment = experiment
    self._writer = writer
    self._console = console
    self._pending: tuple[int, Totals] | None = None
    self._last_step, self._last_time = start, time.perf_counter()
    self.seconds = writer.seconds
    columns = ('{task.description}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), '{task.fields[shown]}')
    self._bar = Progress(
      *(TextColumn(column) if isinstance(column, str) else column for column in columns),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._bar.add_task('train', total=experiment.clock.steps, completed=start, shown='')

  def report(self, step: int, state: TrainState) -> TrainState:
    """Takes the totals out of the state; they are read at the next report, or by `flush`."""
    self.flush()
    self._pending = (step, state.totals)
    return state.replace(totals=jax.device_put(Totals.zeros(), state_sharding(self._experiment.mesh, 0)))

  def flush(self) -> None:
    """Writes the report that is still due.

    Raises:
      Diverged: its loss is not finite.
    """
    if self._pending is None:
      return
    step, pending = self._pending
    self._pending = None
    totals = jax.device_get(pending)
    check_finite(step, float(totals.loss))
    now, steps = time.perf_counter(), int(totals.steps)
    elapsed, self._last_time = now - self._last_time, now
    self.seconds += elapsed
    examples = (step - self._last_step) * self._experiment.clock.batch_size
    self._last_step = step
    values = {
      'loss': float(totals.loss) / steps,
      'accuracy': 100 * int(totals.correct) / (steps * self._experiment.clock.batch_size),
      'learning_rate': float(self._experiment.schedule(step - 1)),
      'gradient_norm': float(totals.gradient_norm) / steps,
      'images_per_second': round(examples / elapsed, 1),
      'seconds': round(self.seconds, 2),
    }
    self._show(step, 'train', values)
    self._writer.write(step, self._experiment.clock.epoch(step), 'train', **values)

  def validation(self, step: int, summary: dict) -> None:
    """Writes the figures of the held-out part of train."""
    self.flush()
    values = {name: summary[name] for name in ('accuracy', 'top5', 'nll', 'ece')}
    self._writer.write(step, self._experiment.clock.epoch(step), 'validation', **values)
    self._show(step, 'validation', values)

  @contextlib.contextmanager
  def paused(self, state: TrainState) -> Iterator[None]:
    """Doesn't count what happens inside as training time."""
    jax.block_until_ready(state.step)
    begin = time.perf_counter()
    yield
    self._last_time += time.perf_counter() - begin

  def _show(self, step: int, split: str, values: dict[str, float]) -> None:
    names = {'loss': '.3f', 'accuracy': '.2f', 'nll': '.3f', 'images_per_second': ',.0f'}
    shown = '  '.join(f'{name} {values[name]:{form}}' for name, form in names.items() if name in values)
    self._bar.update(self._task, completed=step, shown=shown)
    if split != 'train' or not self._console.is_terminal:
      epoch = self._experiment.clock.epoch(step)
      self._console.print(
        f'step {step:>6}  epoch {epoch:7.2f}  {split:<10}  {shown}', highlight=False, soft_wrap=True
      )

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
