"""The training loop. `run_steps` takes the steps. `train` does a whole run, from the config to result.json."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from hbf.evaluation.tables import say
from hbf.training import processes, startup
from hbf.training.callbacks import Callback, Callbacks, callback_metrics
from hbf.training.checkpoints import Checkpoints
from hbf.training.durations import Event
from hbf.training.evaluate_state import evaluate_state
from hbf.training.experiment import Experiment
from hbf.training.loggers import Loggers
from hbf.training.pictures import Histograms
from hbf.training.plateau import plateau_scale, with_plateau_scale
from hbf.training.profiling import Profiler
from hbf.training.reporter import Reporter
from hbf.training.result import make_result, write_result
from hbf.training.signals import signals
from hbf.training.state import Totals, TrainState, check_finite_state
from hbf.training.stopwatch import Stopwatch
from hbf.training.units import UnitReport
from hbf.training.workdir import naming_trouble, read_result
from hbf.training.writers import MetricsWriter, NoWriter


@dataclasses.dataclass(frozen=True)
class TrainingRun:
  """A run with a compiled function that takes steps, and the objects that act between the calls of this function.

  Attributes:
    experiment: the model, the data, the optimizer and the steps at which events are due.
    take_steps: the compiled function that takes several steps (`hbf.training.state.repeat_step`).
    reporter: the log and the progress bar.
    checkpoints: the saved states.
    stopwatch: the time that the steps take on the devices.
    callbacks: the user's functions.
    stopped: a function that returns True once a signal or a callback has stopped the run.
    units: a function from parameters to the percentages of dead, constant and doubled units (`hbf.training.units`).
      None if they are not logged.
    histograms: a function from parameters to histograms (`hbf.training.pictures`). None if no logger takes them.
    profiler: the trace of some steps.
  """

  experiment: Experiment
  take_steps: startup.Steps
  reporter: Reporter
  checkpoints: Checkpoints
  stopwatch: Stopwatch
  callbacks: Callbacks
  stopped: Callable[[], bool]
  units: UnitReport | None
  histograms: Histograms | None
  profiler: Profiler


def run_steps(run: TrainingRun, state: TrainState, step: int) -> tuple[TrainState, int]:
  """Train until the last step, or until the run is stopped or ends early. Return the state and its step.

  Args:
    run: the run.
    state: the state after `step` steps.
    step: the number of steps taken so far.
  """
  experiment, reporter, stopwatch = run.experiment, run.reporter, run.stopwatch
  train, due, last = experiment.inputs['train'], experiment.due, experiment.clock.steps
  if step and _evaluates(run, step) and not run.checkpoints.scored(step):  # a signal interrupted this evaluation
    _evaluate_again(run, step, state)
    if run.stopped():
      return state, step
  if step and _ends_early(run, step):
    return state, step

  if step:
    state = _with_rate(run, step, state)
  else:
    _report_parameters(run, step, state)

  # The devices take several steps in one call. A call ends wherever something is due.
  events: list[Event] = [*due.values(), *([experiment.traced] if experiment.traced else [])]
  counts = experiment.clock.calls(step, experiment.steps_per_call, events)
  stacks = train.stacks(experiment.order, step, counts, experiment.steps_per_call)
  with contextlib.closing(stacks), contextlib.closing(run.profiler):
    _profile(run, step, state)
    for count, batches in zip(counts, stacks, strict=True):
      # Step. At most one call waits behind the running one. So a signal acts soon, and memory holds few batches.
      stopwatch.begin()
      state, done = run.take_steps(state, experiment.resident, batches, np.int32(count))
      stopwatch.settle()
      reporter.flush()
      stopwatch.add(count, done)
      step += count
      _profile(run, step, state)

      # Report. This resets the totals.
      totals, scores, best = state.totals, None, False
      if due['log'](step) or step == last:
        state = reporter.report(step, state)

      # Look at the units and the parameters.
      if due['evaluate'](step) or step == last:
        _report_parameters(run, step, state)

      # Evaluate the validation split.
      if _evaluates(run, step):
        scores, best = _evaluate(run, step, state)
        state = _with_rate(run, step, state)
      ended = step == last or (scores is not None and _ends_early(run, step))

      _call_users(run, step, totals, scores, state, ended)

      # Save and stop.
      stopping = run.stopped()
      if due['checkpoint'](step) or ended or best or stopping:
        with stopwatch.paused():
          reporter.flush()  # otherwise a resumed run would lack this report
          check_finite_state(step, state)
          run.checkpoints.save(step, state, {'seconds': stopwatch.seconds, 'steps': stopwatch.steps})
      if stopping or ended:
        break
  return state, step


def _evaluates(run: TrainingRun, step: int) -> bool:
  """Return True if the validation split is evaluated after a step."""
  is_due = run.experiment.due['evaluate'](step) or step == run.experiment.clock.steps
  return is_due and 'validation' in run.experiment.inputs


def _ends_early(run: TrainingRun, step: int) -> bool:
  """Return True if the last `train.patience` evaluations up to a step had no better score than the ones before.

  The answer follows from the scores in metrics.jsonl, so a continued run ends at the same step.
  """
  patience = run.experiment.config.train.patience
  return bool(patience) and run.checkpoints.evaluations_since_best(step) >= patience


def _with_rate(run: TrainingRun, step: int, state: TrainState) -> TrainState:
  """Return the state with the learning rate that schedule plateau computes from all scores up to a step.

  With any other schedule, return the state itself.
  """
  experiment, optimizer = run.experiment, run.experiment.config.optimizer
  if optimizer.schedule != 'plateau':
    return state
  scale = plateau_scale(
    run.checkpoints.scores_until(step),
    experiment.task.scores[0],
    patience=optimizer.plateau_patience,
    factor=optimizer.plateau_factor,
    minimum=optimizer.minimum_rate,
  )
  return with_plateau_scale(state, scale, experiment.mesh)


def _report_parameters(run: TrainingRun, step: int, state: TrainState) -> None:
  """Report the percentages of dead, constant and doubled units, and the histograms of parameters."""
  with run.stopwatch.paused():
    if run.units:
      run.reporter.units(step, run.units(state.params))
    if run.histograms:
      run.reporter.histograms(step, run.histograms(state.params))


def _evaluate(run: TrainingRun, step: int, state: TrainState) -> tuple[dict[str, Any] | None, bool]:
  """Evaluate and report the validation split.

  Returns:
    The scores, and True if the step has a better score than every checkpoint. If the run was stopped, None and False.
  """
  with run.stopwatch.paused():
    found = evaluate_state(run.experiment, state, 'validation', run.stopped)
    if found is None:
      return None, False
    scores = run.reporter.validation(step, found)
    ranked = scores['average'] if run.experiment.config.checkpoint.rank == 'average' else scores
    return scores, run.checkpoints.score(step, ranked[run.experiment.task.scores[0].name])


def _evaluate_again(run: TrainingRun, step: int, state: TrainState) -> None:
  """Repeat the evaluation that was interrupted when the run stopped after this step, and show its scores to the user.

  The user's functions were called for this step already, but without scores.
  """
  scores, _ = _evaluate(run, step, state)
  if scores is not None:
    ended = step == run.experiment.clock.steps or _ends_early(run, step)
    _call_users(run, step, state.totals, scores, _with_rate(run, step, state), ended)


def _profile(run: TrainingRun, step: int, state: TrainState) -> None:
  """Begin or end the trace of some steps, if this is due after a step. To write a trace is no training time."""
  if run.profiler.is_due(step):
    with run.stopwatch.paused():
      run.profiler(step, state)


def _call_users(
  run: TrainingRun, step: int, totals: Totals, scores: dict[str, Any] | None, state: TrainState, ended: bool
) -> None:
  """Call the user's functions after a step. See `Callbacks` and `callback_metrics` for the arguments."""
  if run.callbacks:
    with run.stopwatch.paused():
      run.callbacks(step, callback_metrics(run.experiment, step, totals, scores), state, last=ended)


def train(
  config: ConfigDict,
  workdir: pathlib.Path,
  console: Console,
  devices: Sequence[jax.Device] | None = None,
  *,
  dataset: Any = None,
  callbacks: Sequence[Callback] = (),
  signaled: Callable[[], bool] | None = None,
) -> dict[str, Any] | None:
  """Train, or continue the run in the run folder, and evaluate the test split once, at the end.

  Args:
    config: the config of the run, for example from `hbf.get_config`.
    workdir: the run folder. A missing folder is made. It holds config.json, data.json, metrics.jsonl, checkpoints/,
      predictions.npz and result.json.
    console: the Rich console that shows progress.
    devices: the devices to train on. None: all.
    dataset: the data set. None: the one that the config names.
    callbacks: the user's functions, see `hbf.train`.
    signaled: a function that returns True once a signal has come, if the caller handles signals itself
      (`hbf.training.signals`). None: this function handles them.

  Returns:
    The content of result.json, also if the run was finished before. None if a signal or a callback stopped the run.
    Then the same call continues the run.

  Raises:
    UserError: the config, the data or the run folder is not valid, or the disk is full.
  """
  if not processes.is_first():
    console = Console(quiet=True)
  users = Callbacks(callbacks)
  try:
    with contextlib.nullcontext(signaled) if signaled else signals() as heard:
      return _train(config, workdir, console, devices, dataset, users, lambda: heard() or users.stopped)
  finally:
    users.raise_error()  # also if the run could not be saved after it


def _train(
  config: ConfigDict,
  workdir: pathlib.Path,
  console: Console,
  devices: Sequence[jax.Device] | None,
  dataset: Any,
  callbacks: Callbacks,
  stopped_here: Callable[[], bool],
) -> dict[str, Any] | None:
  """Do the work of `train`. Stop the run in all processes once `stopped_here` returns True in one of them."""
  experiment, identity = startup.prepare_run(config, workdir, devices, dataset)
  stopped = processes.StopSignal(stopped_here, experiment.mesh)
  with naming_trouble(workdir), startup.claimed(workdir, experiment, identity):
    if (result := processes.on_first_process(lambda: read_result(workdir, 'n'))) is not None:
      say(console, f'{workdir} is finished; this is its result')
      return result
    startup.introduce(experiment, workdir, console)
    # `ended_by_loss` is inside: closing the checkpoints would wait for a process that is gone.
    with startup.open_checkpoints(experiment, workdir) as checkpoints, processes.ended_by_loss():
      begun = startup.begin(experiment, checkpoints, stopped, console)
      if begun is None:
        return None
      step, stopwatch = begun.step, begun.stopwatch
      with _open_log(experiment.config, workdir, step) as writer:
        with Reporter(experiment, writer, stopwatch, step, console) as reporter:
          if begun.images is not None:
            writer.images(step, 'train/images', begun.images)
          run = TrainingRun(
            experiment,
            begun.take_steps,
            reporter,
            checkpoints,
            stopwatch,
            callbacks,
            stopped,
            begun.units,
            begun.histograms,
            Profiler(experiment.traced if processes.is_first() else None, workdir),
          )
          state, step = run_steps(run, begun.state, step)
        test = None if stopped() else evaluate_state(experiment, state, 'test', stopped)
        if test is None:
          checkpoints.wait()  # while signals are still handled: a second one must not end the save
          say(console, f'stopped after step {step}, saved; the same command goes on from there')
          return None
        if step < experiment.clock.steps:
          name, patience = experiment.task.scores[0].name, experiment.config.train.patience
          say(console, f'ended early, after step {step}: no better validation {name} in {patience} evaluations')
        scores = test.scores(*experiment.task.result_names)
        writer.write(step, experiment.clock.epoch(step), 'test', **scores)
    result = make_result(experiment, scores, stopwatch, begun.compile_seconds, step, state)
    return processes.on_first_process(lambda: write_result(workdir, result, test.params.per_example))


def _open_log(config: ConfigDict, workdir: pathlib.Path, step: int) -> MetricsWriter:
  """Open the log of a run that starts or continues after a step. Only the first process writes."""
  with processes.raise_everywhere():
    return MetricsWriter(workdir, step, Loggers(config, workdir, step)) if processes.is_first() else NoWriter()
