"""Training, from a config to result.json."""

import contextlib
import json
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from hbf.data.inputs import Batch, Resident
from hbf.models.matching import units_of
from hbf.training.checkpoints import Checkpoints, has_checkpoint
from hbf.training.experiment import Experiment, prepare, with_sharding
from hbf.training.machine import commit, device_name, peak_memory_bytes, versions
from hbf.training.reporter import Reporter, check_finite
from hbf.training.sharding import state_sharding
from hbf.training.state import TrainState, all_finite, init_state, make_train_step, several
from hbf.training.workdir import claim, locked, write_json, write_predictions
from hbf.training.writers import MetricsWriter

Steps = Callable[[TrainState, Resident, Batch, np.int32], tuple[TrainState, jax.Array]]


def train(config: ConfigDict, workdir: pathlib.Path, console: Console) -> dict[str, Any] | None:
  """Trains, or goes on training what is in the workdir, and reports the test split once, at the end.

  Args:
    config: as `configs/` make it.
    workdir: made if it is missing; holds config.json, metrics.jsonl, checkpoints/, predictions.npz and result.json.
    console: where progress is shown.

  Returns:
    What result.json holds, or None if a signal stopped the run; the same call then goes on from there.

  Raises:
    UserError: something is wrong with the config, the data or the workdir.
  """
  experiment = prepare(config, resumed=has_checkpoint(workdir / 'checkpoints'))
  with locked(workdir):
    claim(workdir, experiment.config)
    result_path = workdir / 'result.json'
    if result_path.exists():
      console.print(f'{workdir} is finished; this is its result')
      return json.loads(result_path.read_text())
    _introduce(experiment, workdir, console)
    with contextlib.closing(Checkpoints(workdir / 'checkpoints', config.checkpoint.keep)) as checkpoints:
      first = next(experiment.inputs['train'].stacks(experiment.order, 0, [1], experiment.steps_per_call))
      state, start = _start(experiment, first, checkpoints, console)
      steps_fn, compile_seconds = _compile(experiment, state, first)
      with MetricsWriter(workdir, start, config.log.tensorboard) as writer:
        with Reporter(experiment, writer, start, console) as reporter:
          state, done = _run(experiment, steps_fn, state, start, reporter, checkpoints)
        if done < experiment.clock.steps:
          console.print(f'stopped after step {done}, saved; the same command goes on from there')
          return None
        test = experiment.evaluator(state.params, experiment.inputs['test'])
        figures = {name: test.summary[name] for name in ('n', 'correct', 'accuracy', 'top5', 'nll', 'ece')}
        writer.write(done, experiment.clock.epoch(done), 'test', **figures)
    result = _result(experiment, figures, reporter.seconds, compile_seconds)
    write_predictions(workdir, test.labels, test.predictions)
    write_json(result_path, result)  # last: it says that the run is finished
    return result


def _introduce(experiment: Experiment, workdir: pathlib.Path, console: Console) -> None:
  config, sizes = experiment.config, {name: len(split) for name, split in experiment.inputs.items()}
  resident = experiment.inputs['train'].resident
  units = ''.join(f', {option} {count}' for option, count in units_of(config.model).items())
  lines = (
    f'{config.data.name}: {", ".join(f"{n:,} {name}" for name, n in sizes.items())}; '
    f'{len(experiment.dataset.classes)} classes; {"device-resident" if resident else "streaming"} input',
    f'{config.model.name}: {experiment.parameters:,} parameters{units}, '
    f'{experiment.flops_per_image / 1e6:,.1f} MFLOP an image',
    f'{experiment.clock.steps:,} steps of {config.train.batch_size} on {device_name()}; workdir {workdir}',
  )
  for line in lines:
    console.print(line, highlight=False)


def _start(
  experiment: Experiment, first: Batch, checkpoints: Checkpoints, console: Console
) -> tuple[TrainState, int]:
  """The newest checkpoint's state and step, or a fresh state, made with the first batch, and 0."""
  resident, initial = experiment.inputs['train'].resident, experiment.initial
  given = initial.params if initial else {}

  def init(resident: Resident, stack: Batch, given: Mapping[str, Any]) -> TrainState:
    batch = jax.tree.map(lambda z: z[0], stack)
    return init_state(experiment.model, experiment.optimizer, experiment.objective, resident, batch, given)

  shapes = jax.eval_shape(init, resident, first, given)
  if (step := checkpoints.latest) is not None:
    console.print(f'goes on after step {step}')
    return checkpoints.restore(step, with_sharding(shapes, experiment.mesh)), step
  if initial:
    console.print(f'starts from {initial.source}', highlight=False)
  shardings = state_sharding(experiment.mesh, shapes)
  return jax.jit(init, out_shardings=shardings)(resident, first, given), 0


def _compile(experiment: Experiment, state: TrainState, first: Batch) -> tuple[Steps, float]:
  """The train steps, compiled for these shapes and devices, and the seconds that took."""
  begin = time.perf_counter()
  steps = several(make_train_step(experiment.model, experiment.optimizer, experiment.objective))
  shardings = state_sharding(experiment.mesh, (state, state.step))
  jitted = jax.jit(steps, donate_argnums=0, out_shardings=shardings)
  compiled = jitted.lower(state, experiment.inputs['train'].resident, first, np.int32(1)).compile()
  return compiled, time.perf_counter() - begin


def _run(
  experiment: Experiment,
  steps_fn: Steps,
  state: TrainState,
  start: int,
  reporter: Reporter,
  checkpoints: Checkpoints,
) -> tuple[TrainState, int]:
  """Steps until the end or a signal; returns the state and the last step."""
  due, last, train_input = experiment.due, experiment.clock.steps, experiment.inputs['train']
  counts = experiment.clock.calls(start, experiment.steps_per_call, due.values())
  stacks = train_input.stacks(experiment.order, start, counts, experiment.steps_per_call)
  step, before = start, None
  with signals() as stopped, contextlib.closing(stacks):
    for count, stack in zip(counts, stacks, strict=True):
      state, done = steps_fn(state, train_input.resident, stack, np.int32(count))
      # One call may wait behind the running one, not more: signals are answered soon, and few batches lie in memory.
      jax.block_until_ready(before)
      step, before = step + count, done
      if due['log'](step) or step == last:
        state = reporter.report(step, state)
      validation = None
      if 'validation' in experiment.inputs and (due['evaluate'](step) or step == last):
        with reporter.paused(state):
          validation = experiment.evaluator(state.params, experiment.inputs['validation']).summary
        reporter.validation(step, validation)
      if due['checkpoint'](step) or step == last or stopped():
        with reporter.paused(state):
          _save(step, state, validation, reporter, checkpoints)
      if stopped():
        break
  return state, step


def _save(
  step: int, state: TrainState, validation: dict | None, reporter: Reporter, checkpoints: Checkpoints
) -> None:
  """Saves a state that is finite; what the log owes is written first, so that a resumed run owes nothing."""
  reporter.flush()
  check_finite(step, float(state.totals.loss), 0.0 if bool(all_finite(state.params)) else float('nan'))
  checkpoints.save(step, state, validation)


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], bool]]:
  """Turns SIGTERM and SIGINT into an answer to 'shall I stop?'."""
  received: list[int] = []
  kinds = (signal.SIGTERM, signal.SIGINT)
  before = [signal.signal(kind, lambda number, _: received.append(number)) for kind in kinds]
  try:
    yield lambda: bool(received)
  finally:
    for kind, handler in zip(kinds, before, strict=True):
      signal.signal(kind, handler)


def _result(
  experiment: Experiment, figures: dict[str, Any], train_seconds: float, compile_seconds: float
) -> dict[str, Any]:
  config, clock = experiment.config, experiment.clock
  return {
    'dataset': config.data.name,
    'model': config.model.name,
    'recipe': config.recipe,
    'seed': config.seed,
    'params': experiment.parameters,
    'flops_per_image': experiment.flops_per_image,
    'steps': clock.steps,
    'epochs': config.train.epochs,
    'split': 'test',
    **figures,
    'train_seconds': round(train_seconds, 2),
    'compile_seconds': round(compile_seconds, 2),
    'images_per_second': round(clock.steps * clock.batch_size / train_seconds, 1),
    'peak_memory_bytes': peak_memory_bytes(),
    'device': device_name(),
    'commit': commit(),
    'versions': versions(),
  }
