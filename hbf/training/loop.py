"""Training, from a config to result.json."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from hbf.config.resolve import resolve
from hbf.data.pipeline.inputs import Batch, Resident
from hbf.evaluation.tables import say
from hbf.models.matching import units_of
from hbf.tasks.evaluator import Evaluated, Evaluator, Interrupted
from hbf.tasks.registry import make_task
from hbf.training import processes
from hbf.training.callbacks import Callback, Callbacks, train_metrics
from hbf.training.checkpoints import Checkpoints, has_checkpoint
from hbf.training.experiment import Experiment, prepare, training_operations, with_sharding
from hbf.training.machine import commit, device_name, peak_memory_bytes, versions
from hbf.training.programs import jit_steps, make_init
from hbf.training.reporter import Evaluations, Reporter, check_finite
from hbf.training.sharding import state_sharding
from hbf.training.signals import signals
from hbf.training.state import Totals, TrainState, all_finite, former_state
from hbf.training.stopwatch import Stopwatch
from hbf.training.workdir import (
  check_place,
  claim,
  flatten,
  locked,
  naming_trouble,
  read_result,
  with_measured,
  write_json,
  write_predictions,
)
from hbf.training.writers import MetricsWriter, NoWriter, validation_scores

# What of a config may differ between the processes of a run: where each finds its data.
PER_PROCESS = ('data.dir', 'data.root')

Steps = Callable[[TrainState, Resident, Batch, np.int32], tuple[TrainState, jax.Array]]


def train(
  config: ConfigDict,
  workdir: pathlib.Path,
  console: Console,
  devices: Sequence[jax.Device] | None = None,
  *,
  dataset: Any = None,
  callbacks: Sequence[Callback] = (),
  guest: bool = False,
) -> dict[str, Any] | None:
  """Train, or go on training what is in the workdir, and report the test split once, at the end.

  Args:
    config: as `configs/` make it.
    workdir: made if it is missing; holds config.json, data.json, metrics.jsonl, checkpoints/, predictions.npz and
      result.json.
    console: where progress is shown.
    devices: to train on; None: all.
    dataset: to train on; None: the one that the config names.
    callbacks: called after each call of steps, see `hbf.train`.
    guest: whether the process is a user's own, whose handlers of signals hear them too; see `signals`.

  Returns:
    What result.json holds, or None if a signal or a callback stopped the run; the same call then goes on from there.

  Raises:
    UserError: something is wrong with the config, the data or the workdir, or its disk is full.
  """
  if not processes.is_first():
    console = Console(quiet=True)
  hooks = Callbacks(callbacks)
  with signals(guest) as heard:
    result = _train(config, workdir, console, devices, dataset, hooks, lambda: heard() or hooks.stopped)
  hooks.raise_error()
  return result


def _train(
  config: ConfigDict,
  workdir: pathlib.Path,
  console: Console,
  devices: Sequence[jax.Device] | None,
  dataset: Any,
  callbacks: Callbacks,
  heard: Callable[[], bool],
) -> dict[str, Any] | None:
  """Train as `train` does, until `heard` says that a signal came, or that a callback has stopped the run."""
  experiment, data = _prepare(config, workdir, devices, dataset)
  stopped = processes.StopSignal(heard, experiment.mesh)
  with naming_trouble(workdir), _claimed(workdir, experiment.config, data):
    if (result := processes.on_first_process(lambda: read_result(workdir, 'n', 'correct'))) is not None:
      say(console, f'{workdir} is finished; this is its result')
      return result
    _introduce(experiment, workdir, console)
    ranks = experiment.task.scores[0]
    scores = dict(processes.on_first_process(lambda: [*validation_scores(workdir, ranks).items()]))
    opened = contextlib.closing(Checkpoints(workdir / 'checkpoints', config.checkpoint.keep, ranks, scores))
    with opened as checkpoints, processes.ended_by_loss():  # or closing would wait for the one that is gone
      first = next(experiment.inputs['train'].stacks(experiment.order, 0, [1], experiment.steps_per_call))
      with jax.set_mesh(experiment.mesh):
        state, start, stopwatch = _start(experiment, first, checkpoints, console)
        compiled = None if stopped() else _compile(experiment, state, first)
      if compiled is None or stopped():
        say(console, f'stopped before step {start + 1}; the same command goes on from there')
        return None
      steps_fn, compile_seconds = compiled
      with _writer(config, workdir, start) as writer:
        with Reporter(experiment, writer, stopwatch, start, console) as reporter:
          run = _Run(experiment, steps_fn, reporter, checkpoints, stopwatch, callbacks, stopped)
          state, done = run.steps(state, start)
        test = None if stopped() else run.evaluate(state, 'test')
        if test is None:
          checkpoints.wait()  # while signals are still heard: another one must not end the save
          say(console, f'stopped after step {done}, saved; the same command goes on from there')
          return None
        shown = test.scores(*experiment.task.shown)
        writer.write(done, experiment.clock.epoch(done), 'test', **shown)
    result = _result(experiment, shown, stopwatch, compile_seconds)
    return processes.on_first_process(lambda: _finish(workdir, result, test.params))


def _prepare(
  config: ConfigDict, workdir: pathlib.Path, devices: Sequence[jax.Device] | None, dataset: Any
) -> tuple[Experiment, dict[str, Any]]:
  """Return all that a run needs, checked and the same in all processes, and what tells its data from others."""
  with processes.raise_everywhere():
    check_place(workdir)
    config = with_measured(resolve(config), workdir)
  resumed = processes.on_first_process(lambda: bool(config.init_from) and has_checkpoint(workdir / 'checkpoints'))
  if jax.process_count() > 1:
    _check_same(config, dataset)
  experiment = prepare(config, resumed, devices, dataset)
  with processes.raise_everywhere():
    return experiment, experiment.task.identity()


def _check_same(config: ConfigDict, dataset: Any) -> None:
  """Check that all processes have the same config and data; data that aren't prepared are by the first."""
  flat = flatten(json.loads(config.to_json()))
  processes.check_same({key: value for key, value in flat.items() if key not in PER_PROCESS})
  processes.on_first_process(lambda: bool(make_task(config, dataset)))  # for the others to find
  with processes.raise_everywhere():
    fingerprint = make_task(config, dataset).identity()['fingerprint']
  processes.check_same({'the fingerprint of the data': fingerprint})


@contextlib.contextmanager
def _claimed(workdir: pathlib.Path, config: ConfigDict, data: Mapping[str, Any]) -> Iterator[None]:
  """Holds the workdir, which is the run's, in the first process for all."""
  with contextlib.ExitStack() as stack:
    with processes.raise_everywhere():
      if processes.is_first():
        stack.enter_context(locked(workdir))
        claim(workdir, config, data)
    yield


def _writer(config: ConfigDict, workdir: pathlib.Path, start: int) -> MetricsWriter:
  return MetricsWriter(workdir, start, config.log.tensorboard) if processes.is_first() else NoWriter()


def _finish(workdir: pathlib.Path, result: dict[str, Any], test: Evaluated) -> dict[str, Any]:
  """Writes what a finished run leaves, and returns the result."""
  write_predictions(workdir, test.kept)
  write_json(workdir / 'result.json', result)  # last: it says that the run is finished
  return result


def _introduce(experiment: Experiment, workdir: pathlib.Path, console: Console) -> None:
  config, sizes = experiment.config, {name: len(split) for name, split in experiment.inputs.items()}
  resident = experiment.inputs['train'].resident
  unit = experiment.task.unit
  units = ''.join(f', {option} {count}' for option, count in units_of(config.model).items())
  lines = (
    f'{config.data.name}: {", ".join(f"{n:,} {name}" for name, n in sizes.items())}; '
    f'{experiment.task.about}; {"device-resident" if resident else "streaming"} input',
    f'{config.model.name}: {experiment.parameters:,} parameters{units}, '
    f'{experiment.flops / 1e6:,.1f} MFLOP {"a" if unit == "token" else "an"} {unit}',
    f'{experiment.clock.steps:,} steps of {config.train.batch_size} on {_devices(experiment)}; workdir {workdir}',
  )
  for line in lines:
    say(console, line)


def _start(
  experiment: Experiment, first: Batch, checkpoints: Checkpoints, console: Console
) -> tuple[TrainState, int, Stopwatch]:
  """The newest sound checkpoint's state, step and time, or a fresh state, made with the first batch, at step 0."""
  resident, initial = experiment.inputs['train'].resident, experiment.initial
  given = initial.params if initial else {}
  init = make_init(experiment, experiment.objective)
  shapes = jax.eval_shape(init, resident, first, given)
  if processes.on_first_process(lambda: checkpoints.latest) is not None:
    former = former_state(experiment.optimizer, shapes)
    former = former and with_sharding(former, experiment.mesh)
    found = checkpoints.restore_newest(with_sharding(shapes, experiment.mesh), former)
    for step, path in found.damaged.items():
      say(console, f'checkpoint {step} cannot be read; set aside as {path}')
    say(console, f'goes on after step {found.step}')
    return found.state, found.step, Stopwatch(**found.about)
  if initial:
    say(console, f'starts from {initial.source}')
  shardings = state_sharding(experiment.mesh, shapes)
  compiled = jax.jit(init, out_shardings=shardings).lower(resident, first, given).compile()
  processes.barrier(experiment.mesh)
  return compiled(resident, first, given), 0, Stopwatch()


def _compile(experiment: Experiment, state: TrainState, first: Batch) -> tuple[Steps, float]:
  """The train steps, compiled for these shapes and devices, and the seconds that took."""
  begin = time.perf_counter()
  jitted = jit_steps(experiment, experiment.objective, experiment.mesh, state)
  compiled = jitted.lower(state, experiment.inputs['train'].resident, first, np.int32(1)).compile()
  seconds = time.perf_counter() - begin
  processes.barrier(experiment.mesh)
  return compiled, seconds


@dataclasses.dataclass(frozen=True)
class _Run:
  """The steps of a run with what is due between them, until the end or a signal."""

  experiment: Experiment
  steps_fn: Steps
  reporter: Reporter
  checkpoints: Checkpoints
  stopwatch: Stopwatch
  callbacks: Callbacks
  stopped: Callable[[], bool]

  def steps(self, state: TrainState, start: int) -> tuple[TrainState, int]:
    """Goes on after step `start`; returns the state and the last step taken."""
    due, last, train_input = self.experiment.due, self.experiment.clock.steps, self.experiment.inputs['train']
    if start and self._evaluates(start) and not self.checkpoints.scored(start):  # a signal came in between
      self._validate(start, state)
      if self.stopped():
        return state, start
    counts = self.experiment.clock.calls(start, self.experiment.steps_per_call, due.values())
    stacks = train_input.stacks(self.experiment.order, start, counts, self.experiment.steps_per_call)
    step = start
    with contextlib.closing(stacks):
      for count, stack in zip(counts, stacks, strict=True):
        state = self._call(state, train_input.resident, stack, count)
        step += count
        totals = state.totals
        if due['log'](step) or step == last:
          state = self.reporter.report(step, state)
        best = self._evaluates(step) and self._validate(step, state)
        if self.callbacks:
          self._call_back(step, totals, state)
        stopping = self.stopped()
        if due['checkpoint'](step) or step == last or best or stopping:
          self._save(step, state)
        if stopping:
          break
    return state, step

  def evaluate(self, state: TrainState, split: str) -> Evaluations | None:
    """Evaluate the parameters and their average on a split, and on copies of it; return None if a signal came."""
    examples, copies = self.experiment.inputs[split], self.experiment.copies_evaluator

    def evaluated(evaluator: Evaluator) -> Evaluations:
      params = evaluator(state.params, examples, self.stopped)
      return Evaluations(params, None if state.average is None else evaluator(state.average, examples, self.stopped))

    with contextlib.suppress(Interrupted):
      return evaluated(self.experiment.evaluator)._replace(copies=evaluated(copies) if copies else None)
    return None

  def _call(self, state: TrainState, resident: Resident, stack: Batch, count: int) -> TrainState:
    self.stopwatch.begin()
    state, done = self.steps_fn(state, resident, stack, np.int32(count))
    # One call may wait behind the running one, not more: signals are answered soon, and few batches lie in memory.
    self.stopwatch.settle()
    self.reporter.flush()
    self.stopwatch.add(count, done)
    return state

  def _call_back(self, step: int, totals: Totals, state: TrainState) -> None:
    """Call the user's callbacks after a step, with the totals since the last report."""
    clock, predictions = self.experiment.clock, self.experiment.task.predictions
    with self.stopwatch.paused():
      metrics = {'epoch': clock.epoch(step), **train_metrics(totals, clock.batch_size * predictions)}
      self.callbacks(step, metrics, state, step == clock.steps)

  def _evaluates(self, step: int) -> bool:
    is_due = self.experiment.due['evaluate'](step) or step == self.experiment.clock.steps
    return is_due and 'validation' in self.experiment.inputs

  def _validate(self, step: int, state: TrainState) -> bool:
    """Reports the held-out part of train; returns whether no checkpoint is as good, False too if a signal came."""
    with self.stopwatch.paused():
      found = self.evaluate(state, 'validation')
      if found is None:
        return False
      self.callbacks.validated(step, self.reporter.validation(step, found))
      return self.checkpoints.score(step, found.params.summary[self.experiment.task.scores[0].name])

  def _save(self, step: int, state: TrainState) -> None:
    """Saves a state that is finite; what the log owes is written first, so that a resumed run owes nothing."""
    with self.stopwatch.paused():
      self.reporter.flush()
      finite = bool(all_finite((state.params, state.average)))
      check_finite(step, float(state.totals.loss), 0.0 if finite else float('nan'))
      self.checkpoints.save(step, state, {'seconds': self.stopwatch.seconds, 'steps': self.stopwatch.steps})


def _devices(experiment: Experiment) -> str:
  return device_name(experiment.mesh.devices.flat)


def _result(
  experiment: Experiment, scores: dict[str, Any], stopwatch: Stopwatch, compile_seconds: float
) -> dict[str, Any]:
  config, clock = experiment.config, experiment.clock
  # Of the steps that were timed: a checkpoint of an older version says nothing of those before it.
  task, units = experiment.task, stopwatch.steps * clock.batch_size * experiment.task.units
  return {
    'task': config.task,
    'dataset': config.data.name,
    'model': config.model.name,
    'recipe': config.recipe,
    'seed': config.seed,
    'params': experiment.parameters,
    f'flops_per_{task.unit}': experiment.flops,
    'steps': clock.steps,
    'epochs': config.train.epochs,
    'train_operations': training_operations(experiment.flops * task.units, clock),
    'split': 'test',
    **scores,
    'train_seconds': round(stopwatch.seconds, 2),
    'compile_seconds': round(compile_seconds, 2),
    f'{task.unit}s_per_second': round(units / stopwatch.seconds, 1) if stopwatch.steps else 0.0,
    'peak_memory_bytes': peak_memory_bytes(experiment.mesh.local_devices),
    'device': _devices(experiment),
    'commit': commit(),
    'versions': versions(),
  }
