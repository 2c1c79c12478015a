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
from hbf.training.experiment import Plan
from hbf.training.optimizer import make_schedule
from hbf.training.schema import stamp
from hbf.training.workdir import check_data, differences, load_config, read_result, write_json


def lengthen(workdir: pathlib.Path, plan: Plan, identity: Mapping[str, Any]) -> None:
  """Set the number of epochs of the run in a folder to that of a plan, if the plan has more.

  All learning rates so far must equal those of the longer run. Only then has the run taken the steps that the longer
  run would have taken, and can go on. The earlier result.json is kept as result-STEPS.json.

  Args:
    workdir: the locked run folder. It stays as it is if it holds no run, or if the run's config differs from the
      plan's in more than the number of epochs.
    plan: the run of the new config.
    identity: the identity of the data, see `hbf.data.pipeline.identity`.

  Raises:
    UserError: a learning rate so far would be another in the longer run, or the data are not those of the run. Then
      nothing is changed.
  """
  if not (workdir / 'config.json').exists():
    return
  stored = load_config(workdir)
  before, after = stored.train.epochs, plan.config.train.epochs
  if after <= before or differences(workdir, _with_epochs(plan.config, before)):
    return
  check_data(workdir, identity)
  latest = latest_step(workdir / 'checkpoints') or 0
  schedule, steps = make_schedule(stored.optimizer, dataclasses.replace(plan.clock, epochs=before)), np.arange(latest)
  plateau = stored.optimizer.schedule == 'plateau'  # the last evaluation may have another time in the longer run
  if plateau or not np.array_equal(_rates(schedule, steps), _rates(plan.schedule, steps)):
    raise UserError(
      f'{workdir} holds a run of {before:g} epochs. A run of {after:g} epochs would have had other learning rates '
      f'until step {latest} (schedule {stored.optimizer.schedule}, warm-up {stored.optimizer.warmup}), so it cannot '
      'be lengthened. Expected a constant schedule or rsqrt, or wsd before its decay, and a warm-up in steps or '
      f'epochs. Start a new run from these weights: another --workdir and --config.init_from={workdir}'
    )
  if result := read_result(workdir, 'steps'):
    (workdir / 'result.json').rename(workdir / f'result-{result["steps"]}.json')
  write_json(workdir / 'config.json', stamp(json.loads(plan.config.to_json())))


def _with_epochs(config: ConfigDict, epochs: float) -> ConfigDict:
  changed = config.copy_and_resolve_references()
  changed.train.epochs = epochs
  return changed


def _rates(schedule: object, steps: np.ndarray) -> np.ndarray:
  assert callable(schedule)
  return np.broadcast_to(np.asarray(schedule(steps)), steps.shape)
