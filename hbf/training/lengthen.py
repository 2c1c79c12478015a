"""More epochs for a run that has begun or is finished."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.training.checkpoints import latest_step
from hbf.training.durations import Clock
from hbf.training.experiment import Plan
from hbf.training.optimizer import make_schedule
from hbf.training.schema import stamp
from hbf.training.workdir import check_data, differences, load_config, read_result, write_json


def lengthen(workdir: pathlib.Path, plan: Plan, identity: Mapping[str, Any]) -> None:
  """Set the number of epochs of the run in a folder to that of a plan, if the plan has more.

  All learning rates so far must equal those of the longer run. If scores on held-out data decide about the rate or
  the end of the run, the evaluations so far must be at the same steps too. Only then has the run taken the steps that
  the longer run would have taken, and can go on. The earlier result.json is kept as result-STEPS.json.

  Args:
    workdir: the locked run folder. It stays as it is if it holds no run, or if the run's config differs from the
      plan's in more than the number of epochs.
    plan: the run of the new config.
    identity: the identity of the data, see `hbf.data.pipeline.identity`.

  Raises:
    UserError: the longer run would have taken other steps so far, the data or the teacher's weights are not those of
      the run, or the run is finished and has no checkpoint. Then nothing is changed.
  """
  if not (workdir / 'config.json').exists():
    return
  stored = load_config(workdir)
  before, after = stored.train.epochs, plan.config.train.epochs
  if after <= before or differences(workdir, _with_epochs(plan.config, before)):
    return
  check_data(workdir, identity)
  latest = latest_step(workdir / 'checkpoints') or 0
  if not latest and read_result(workdir, 'steps'):
    raise UserError(
      f'{workdir} holds a finished run of {before:g} epochs without checkpoints, so it cannot go on. For a run of '
      f'{after:g} epochs choose another --workdir'
    )
  if difference := _difference(plan, dataclasses.replace(plan.clock, epochs=before), latest):
    raise UserError(
      f'{workdir} holds a run of {before:g} epochs. A run of {after:g} epochs would have had {difference}. Start a '
      f'new run from these weights: another --workdir and --config.init_from={workdir}'
    )
  if plan.teacher:
    plan.teacher.check(workdir)
  if result := read_result(workdir, 'steps'):
    (workdir / 'result.json').rename(workdir / f'result-{result["steps"]}.json')
  write_json(workdir / 'config.json', stamp(json.loads(plan.config.to_json())))


def _with_epochs(config: ConfigDict, epochs: float) -> ConfigDict:
  changed = config.copy_and_resolve_references()
  changed.train.epochs = epochs
  return changed


def _difference(plan: Plan, clock: Clock, latest: int) -> str:
  """Describe what the run of a plan would have done otherwise until step `latest` than a run of another length.

  Args:
    plan: the run.
    clock: the length of the other run.
    latest: the number of steps to compare.

  Returns:
    A phrase, with the values that were expected. '' if both runs take the same steps.
  """
  optimizer, patience, steps = plan.config.optimizer, plan.config.train.patience, np.arange(latest)
  if not np.array_equal(_rates(make_schedule(optimizer, clock), steps), _rates(plan.schedule, steps)):
    return (
      f'other learning rates until step {latest} (schedule {optimizer.schedule}, warm-up {optimizer.warmup}), so it '
      'cannot be lengthened. Expected a constant schedule, plateau or rsqrt, or wsd before its decay, and a warm-up '
      'in steps or epochs'
    )
  uses = [f'train.patience={patience}'] * bool(patience) + ['schedule plateau'] * (optimizer.schedule == 'plateau')
  if uses and _evaluations(plan, clock, latest) != _evaluations(plan, plan.clock, latest):
    return (
      f'evaluations at other steps until step {latest} (evaluate.every {plan.config.evaluate.every}), whose '
      f'scores matter to {" and ".join(uses)}, so it cannot be lengthened. Expected a period in steps, epochs or '
      f'examples that also ends at step {clock.steps}'
    )
  return ''


def _evaluations(plan: Plan, clock: Clock, latest: int) -> list[int]:
  """Return the steps up to `latest` after which a run of a length evaluates."""
  due = clock.every('evaluate.every', plan.config.evaluate.every)
  return [step for step in range(1, latest + 1) if due(step) or step == clock.steps]


def _rates(schedule: object, steps: np.ndarray) -> np.ndarray:
  assert callable(schedule)
  return np.broadcast_to(np.asarray(schedule(steps)), steps.shape)
