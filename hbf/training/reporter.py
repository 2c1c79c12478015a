"""Reports of training: the log, the progress bar, and the check that the loss is finite."""

from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hbf.evaluation.scores import SCORES
from hbf.evaluation.tables import say
from hbf.nn.parameters import mean_sigmas
from hbf.training.evaluate_state import StateEvaluation
from hbf.training.experiment import Experiment
from hbf.training.loggers import Histogram
from hbf.training.noise import noise_scale
from hbf.training.plateau import scale_of
from hbf.training.sharding import replicated
from hbf.training.state import GradientNorms, Totals, TrainState, check_finite, training_means
from hbf.training.stopwatch import Stopwatch
from hbf.training.units import UnitWarnings
from hbf.training.writers import MetricsWriter

# Formats of the shown values. The log has all values.
FORMATS = {score.name: score.form for score in SCORES}
FORMATS |= {'images_per_second': ',.0f', 'tokens_per_second': ',.0f'}


class Reporter:
  """The reporter of a run, which writes to the log, the loggers and the console.

  It fetches the sums for a report (`Totals`) while the devices take the next steps. So the devices never wait for the
  host.
  """

  def __init__(
    self, experiment: Experiment, writer: MetricsWriter, stopwatch: Stopwatch, start: int, console: Console
  ):
    """Open the reports of a run that continues after step `start`. 0: a new run."""
    self._experiment = experiment
    self._writer = writer
    self._stopwatch = stopwatch
    self._console = console
    # A program makes the zeros: with several processes, `device_put` would compare their values.
    self._zeros = jax.jit(Totals.zeros, out_shardings=replicated(experiment.mesh))
    self._zero_norms = jax.jit(GradientNorms.zeros, out_shardings=replicated(experiment.mesh))
    # One program, because each small one would take time to compile.
    self._rate_and_sigmas = jax.jit(
      lambda step, params: (experiment.schedule(step), mean_sigmas(params)), out_shardings=replicated(experiment.mesh)
    )
    self._pending: tuple[int, Totals, Any, Any, Any, Any] | None = None
    self._skipped = 0
    self._counted = stopwatch.steps, stopwatch.seconds
    self._unit_warnings = UnitWarnings()
    columns = ('{task.description}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), '{task.fields[shown]}')
    self._bar = Progress(
      *(TextColumn(column) if isinstance(column, str) else column for column in columns),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._bar.add_task('train', total=experiment.clock.steps, completed=start, shown='')

  def report(self, step: int, state: TrainState) -> TrainState:
    """Store the totals of a state for `flush`, and return the state with totals and norms of 0.

    `flush` reads the stored totals once the devices have taken the steps up to `step`.
    """
    # The rate and the sigmas are computed now. The next call donates the parameters, and the rate would wait for it.
    skipped = None if state.skips is None else jnp.copy(state.skips.total)
    taken = step - 1 if skipped is None else jnp.maximum(step - 1 - skipped, 0)
    rate, sigmas = self._rate_and_sigmas(taken, state.params)
    if self._experiment.config.optimizer.schedule == 'plateau':
      rate = rate * scale_of(state)
    self._pending = step, state.totals, rate, sigmas, skipped, state.norms
    return state.replace(totals=self._zeros(), norms=None if state.norms is None else self._zero_norms())

  def flush(self) -> None:
    """Write the pending report, if there is one.

    The stopwatch must have counted all steps up to this report, and no later ones.

    Raises:
      Diverged: the loss is not finite.
    """
    if self._pending is None:
      return
    (step, *pending), self._pending = self._pending, None
    totals, rate, sigmas, skipped, norms = jax.device_get(pending)
    check_finite(step, float(totals.loss))
    steps, batch_size, task = max(int(totals.steps), 1), self._experiment.clock.batch_size, self._experiment.task
    # The speed can't use the steps of the report: some of them may precede the start of this process.
    timed, elapsed = self._stopwatch.steps - self._counted[0], self._stopwatch.seconds - self._counted[1]
    self._counted = self._stopwatch.steps, self._stopwatch.seconds
    means = training_means(task, totals, steps * batch_size)
    values = {
      **means,
      'learning_rate': float(rate),
      'gradient_norm': float(totals.gradient_norm) / steps,
      f'{task.unit}s_per_second': round(timed * batch_size * task.units / elapsed, 1),
      'seconds': round(self._stopwatch.seconds, 2),
    }
    if sigmas:
      values['sigmas'] = jax.tree.map(float, sigmas)
    if norms is not None and totals.steps:
      parts = self._experiment.config.train.accumulate
      values |= noise_scale(jax.tree.map(lambda z: z / steps, norms), batch_size, parts)
    if not totals.steps:  # all were skipped: there is no mean
      values = {name: value for name, value in values.items() if name not in (*means, 'gradient_norm')}
    if skipped is not None:
      values['skipped'] = int(skipped)
      self._say_skipped(step, int(skipped))
    self._show(step, 'train', values)
    self._writer.write(step, self._experiment.clock.epoch(step), 'train', **values)

  def validation(self, step: int, found: StateEvaluation) -> dict[str, Any]:
    """Write the scores of the validation split, and return them."""
    self.flush()
    values = found.scores(*(score.name for score in self._experiment.task.scores))
    self._writer.write(step, self._experiment.clock.epoch(step), 'validation', **values)
    self._show(step, 'validation', values)
    for entry in ('average', 'copies'):
      if entry in values:
        self._show(step, entry, values[entry])
    return values

  def units(self, step: int, shares: dict[str, dict[str, float]]) -> None:
    """Write the percentages of dead, constant and doubled units by block, and print the lines of `UnitWarnings`."""
    self.flush()
    self._writer.write(step, self._experiment.clock.epoch(step), 'units', **shares)
    for line in self._unit_warnings(shares):
      say(self._console, line)

  def histograms(self, step: int, values: dict[str, Histogram]) -> None:
    """Send the histograms of the parameters to the loggers."""
    self.flush()
    self._writer.histograms(step, values)

  def _say_skipped(self, step: int, skipped: int) -> None:
    """Say how many steps of the run were skipped, if their number has grown."""
    if skipped > self._skipped:
      again = 'step was' if skipped == 1 else 'steps were'
      say(self._console, f'step {step:>6}  {skipped} {again} skipped so far: the new state was not finite')
    self._skipped = skipped

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
