"""The start of a run: check everything, claim the run folder, restore or initialize the state, compile the steps."""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from hbf.config.resolve import resolve
from hbf.data.pipeline.inputs import Batch, Resident
from hbf.evaluation.tables import say
from hbf.models.matching import units_of
from hbf.tasks.registry import make_task
from hbf.training import processes
from hbf.training.checkpoints import Checkpoints, latest_step
from hbf.training.experiment import Experiment, Plan, prepare
from hbf.training.lengthen import lengthen
from hbf.training.machine import device_name
from hbf.training.pictures import Histograms, make_histograms, training_images, wants_pictures
from hbf.training.programs import compile_quickly, jit_steps, make_init
from hbf.training.sharding import batch_sharding, state_sharding, with_sharding
from hbf.training.state import TrainState, former_state
from hbf.training.stopwatch import Stopwatch
from hbf.training.units import UnitReport, make_unit_report
from hbf.training.workdir import check_place, claim, flatten, locked, with_measured
from hbf.training.writers import validation_scores

# Config keys that may differ between the processes of a run: each process may find its data in another place.
PER_PROCESS = ('data.dir', 'data.root')

Steps = Callable[[TrainState, Resident, Batch, np.int32], tuple[TrainState, jax.Array]]


def prepare_run(
  config: ConfigDict, workdir: pathlib.Path, devices: Sequence[jax.Device] | None, dataset: Any
) -> tuple[Experiment, dict[str, Any]]:
  """Return everything that a run needs, and the identity of its data (`hbf.data.pipeline.identity`).

  Raises:
    UserError: the config, the data or the path of the run folder is not valid. Or the processes have different
      configs or data. Nothing is written.
  """
  with processes.raise_everywhere():
    check_place(workdir)
    config = with_measured(resolve(config), workdir)
  resumed = processes.on_first_process(
    lambda: bool(config.init_from) and latest_step(workdir / 'checkpoints') is not None
  )
  if jax.process_count() > 1:
    _check_same(config, dataset)
  experiment = prepare(config, resumed, devices, dataset)
  with processes.raise_everywhere():
    return experiment, experiment.task.identity()


def _check_same(config: ConfigDict, dataset: Any) -> None:
  """Check that all processes have the same config and data."""
  flat = flatten(json.loads(config.to_json()))
  processes.check_same({key: value for key, value in flat.items() if key not in PER_PROCESS})
  processes.on_first_process(lambda: bool(make_task(config, dataset)))  # this prepares missing data for all others
  with processes.raise_everywhere():
    fingerprint = make_task(config, dataset).identity()['fingerprint']
  processes.check_same({'the fingerprint of the data': fingerprint})


@contextlib.contextmanager
def claimed(workdir: pathlib.Path, plan: Plan, identity: Mapping[str, Any]) -> Iterator[None]:
  """Lock the run folder, and write the plan's config and the data's identity into it.

  If the folder has them already, check that they are equal. If the stored config differs only by fewer epochs, it
  gets the plan's number of epochs (`lengthen`). If there is a teacher, write or compare its checksum too
  (`Teacher.claim`). Only the first process does all this.
  """
  with contextlib.ExitStack() as stack:
    with processes.raise_everywhere():
      if processes.is_first():
        stack.enter_context(locked(workdir))
        lengthen(workdir, plan, identity)
        claim(workdir, plan.config, identity)
        if plan.teacher:
          plan.teacher.claim(workdir)
    yield


def introduce(experiment: Experiment, workdir: pathlib.Path, console: Console) -> None:
  """Print on the console which network is trained, on which data and on which devices."""
  config, sizes = experiment.config, {name: len(split) for name, split in experiment.inputs.items()}
  resident = experiment.inputs['train'].resident
  unit = experiment.task.unit
  units = ''.join(f', {option} {count}' for option, count in units_of(config.model).items())
  teacher, parts = experiment.teacher, experiment.objective.accumulate
  lines = (
    f'{config.data.name}: {", ".join(f"{n:,} {name}" for name, n in sizes.items())}; '
    f'{experiment.task.description}; {"device-resident" if resident else "streaming"} input',
    f'{config.model.name}: {experiment.parameters:,} parameters{units}, '
    f'{experiment.flops_per_unit / 1e6:,.1f} MFLOP {"a" if unit == "token" else "an"} {unit}',
    *([f'learns from {teacher.network.origin} of {teacher.source}, {teacher.words()}'] if teacher else []),
    f'{experiment.clock.steps:,} steps of {config.train.batch_size}{f" in {parts} parts" if parts > 1 else ""} on '
    f'{device_name(experiment.mesh.devices.flat)}; workdir {workdir}',
  )
  for line in lines:
    say(console, line)
  warmup, steps = experiment.clock.to_steps('optimizer.warmup', config.optimizer.warmup), experiment.clock.steps
  if warmup >= steps:
    say(
      console,
      f'warning: optimizer.warmup={config.optimizer.warmup} is {warmup:,} steps, and the run has {steps:,}: the '
      f'learning rate only rises, to {steps / warmup:.0%} of its peak; set a shorter warm-up',
    )


def open_checkpoints(experiment: Experiment, workdir: pathlib.Path) -> contextlib.closing[Checkpoints]:
  """Return a context manager that opens the run's checkpoints and closes them at its end."""
  ranks, config = experiment.task.scores[0], experiment.config.checkpoint
  scores = dict(processes.on_first_process(lambda: [*validation_scores(workdir, ranks, config.rank).items()]))
  return contextlib.closing(Checkpoints(workdir / 'checkpoints', config.keep, ranks, scores))


@dataclasses.dataclass(frozen=True)
class Begun:
  """A run that is ready for its next step.

  Attributes:
    state: the state after `step` steps.
    step: the number of steps taken so far.
    stopwatch: the stopwatch for the steps, which has counted the steps so far.
    take_steps: the compiled function that takes several steps (`hbf.training.state.repeat_step`).
    compile_seconds: the seconds that the compilation of the steps took.
    units: a function from parameters to the percentages of dead, constant and doubled units
      (`hbf.training.units`). None if they are not logged.
    histograms: a function from parameters to histograms (`hbf.training.pictures`). None if no logger takes them.
    images: training images for the loggers, uint8 [n, H, W, C]. None if no logger takes them or the run continues.
  """

  state: TrainState
  step: int
  stopwatch: Stopwatch
  take_steps: Steps
  compile_seconds: float
  units: UnitReport | None
  histograms: Histograms | None
  images: np.ndarray | None


def begin(
  experiment: Experiment, checkpoints: Checkpoints, stopped: Callable[[], bool], console: Console
) -> Begun | None:
  """Restore or initialize the state, and compile all programs. Return None if `stopped` returns True meanwhile.

  The steps compile in a thread, because all other programs together take as long to compile.
  """
  first = next(experiment.inputs['train'].stacks(experiment.first_order, 0, [1], experiment.steps_per_call))
  with jax.set_mesh(experiment.mesh):
    shapes, initialize = initialization(experiment, first)
    with futures.ThreadPoolExecutor(1) as pool:
      compiling = pool.submit(compile_steps, experiment, shapes, first)
      state, step, stopwatch = restore_or_init(experiment, shapes, initialize, checkpoints, console)
      compile_evaluations(experiment, shapes.params)
      units = make_unit_report(experiment, shapes.params, first) if experiment.config.log.units else None
      compiled = compiling.result()
    processes.barrier(experiment.mesh)
  if stopped():
    say(console, f'stopped before step {step + 1}; the same command goes on from there')
    return None
  pictures = wants_pictures(experiment)
  histograms = make_histograms(experiment) if pictures else None
  images = training_images(experiment, first) if pictures and not step else None
  return Begun(state, step, stopwatch, *compiled, units, histograms, images)


def initialization(experiment: Experiment, first: Batch) -> tuple[TrainState, Callable[[], TrainState]]:
  """Return the shapes of the state with their shardings, and a function that makes a fresh state.

  `first` is the first stack of batches (`hbf.data.pipeline.inputs`). Fresh parameters may depend on its first batch.
  """
  init, mesh = make_init(experiment, experiment.objective), experiment.mesh
  arguments = experiment.inputs['train'].resident, first, experiment.initial.params if experiment.initial else {}
  shapes = with_sharding(jax.eval_shape(init, *arguments), mesh)

  def initialize() -> TrainState:
    compiled = compile_quickly(jax.jit(init, out_shardings=state_sharding(mesh, shapes)).lower(*arguments))
    processes.barrier(mesh)
    return compiled(*arguments)

  return shapes, initialize


def restore_or_init(
  experiment: Experiment,
  shapes: TrainState,
  initialize: Callable[[], TrainState],
  checkpoints: Checkpoints,
  console: Console,
) -> tuple[TrainState, int, Stopwatch]:
  """Return the state, step and stopwatch of the newest readable checkpoint, or of a fresh run at step 0.

  Args:
    experiment: the run.
    shapes: the shapes of the state, with their shardings.
    initialize: a function that makes a fresh state.
    checkpoints: the saved states.
    console: where the run says if it continues or begins.
  """
  if processes.on_first_process(lambda: checkpoints.latest) is not None:
    former = former_state(experiment.optimizer, shapes)
    former = former and with_sharding(former, experiment.mesh)
    found = checkpoints.restore_newest(shapes, former)
    for step, path in found.damaged.items():
      say(console, f'checkpoint {step} cannot be read; set aside as {path}')
    say(console, f'goes on after step {found.step}')
    return found.state, found.step, Stopwatch(**found.about)
  if experiment.initial:
    say(console, f'starts from {experiment.initial.source}')
  return initialize(), 0, Stopwatch()


def compile_evaluations(experiment: Experiment, params: Any) -> None:
  """Compile the evaluation. `params` has the shapes of the parameters, with their shardings."""
  test, sharding = experiment.splits['test'], batch_sharding(experiment.mesh)
  for evaluator in filter(None, (experiment.evaluator, experiment.copies_evaluator)):
    evaluator.compile(params, *experiment.task.abstract_inputs(test, sharding, evaluator.batch_size))


def compile_steps(experiment: Experiment, shapes: TrainState, first: Batch) -> tuple[Steps, float]:
  """Compile the function that takes several steps, for states of these shapes and for stacks like `first`.

  Return the compiled function, and the seconds that the compilation took.
  """
  begin = time.perf_counter()
  jitted = jit_steps(experiment, experiment.objective, experiment.mesh, shapes)
  with jax.set_mesh(experiment.mesh):  # a thread does not know the mesh of another
    compiled = jitted.lower(shapes, experiment.resident, first, np.int32(1)).compile()
  return compiled, time.perf_counter() - begin
