"""The result of a finished run: result.json and predictions.npz."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hbf.training.experiment import Experiment, gradients_per_step, training_operations
from hbf.training.machine import commit, device_name, peak_memory_bytes, versions
from hbf.training.state import TrainState
from hbf.training.stopwatch import Stopwatch
from hbf.training.workdir import write_json, write_predictions


def make_result(
  experiment: Experiment,
  scores: Mapping[str, Any],
  stopwatch: Stopwatch,
  compile_seconds: float,
  step: int,
  state: TrainState,
) -> dict[str, Any]:
  """Return the content of result.json.

  Args:
    experiment: the finished run.
    scores: the scores of the test split.
    stopwatch: the stopwatch that timed the steps.
    compile_seconds: the seconds that the compilation of the steps took.
    step: the last step of the run.
    state: the state after this step.
  """
  config, clock, task = experiment.config, experiment.clock, experiment.task
  # Only the steps that were timed. A checkpoint of older code does not store the time of the steps before it.
  units = stopwatch.steps * clock.batch_size * task.units
  return {
    'task': config.task,
    'dataset': config.data.name,
    'model': config.model.name,
    'recipe': config.recipe,
    'seed': config.seed,
    'params': experiment.parameters,
    f'flops_per_{task.unit}': experiment.flops_per_unit,
    'steps': step,
    'epochs': config.train.epochs if step == clock.steps else round(clock.epoch(step), 4),
    **({'planned_steps': clock.steps} if config.train.patience else {}),
    'train_operations': training_operations(
      experiment.flops_per_unit * task.units, clock, experiment.teacher_flops, gradients_per_step(config), step
    ),
    **({} if state.skips is None else {'skipped': int(state.skips.total)}),
    'split': 'test',
    **scores,
    'train_seconds': round(stopwatch.seconds, 2),
    'compile_seconds': round(compile_seconds, 2),
    f'{task.unit}s_per_second': round(units / stopwatch.seconds, 1) if stopwatch.steps else 0.0,
    'peak_memory_bytes': peak_memory_bytes(experiment.mesh.local_devices),
    'device': device_name(experiment.mesh.devices.flat),
    'commit': commit(),
    'versions': versions(),
  }


def write_result(
  workdir: pathlib.Path, result: dict[str, Any], predictions: Mapping[str, np.ndarray]
) -> dict[str, Any]:
  """Write predictions.npz and then result.json, which marks the run as finished. Return `result`."""
  write_predictions(workdir, predictions)
  write_json(workdir / 'result.json', result)
  return result
