"""Given parameters as a run's workdir."""

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hbf.errors import UserError
from hbf.training.average import with_average
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import Experiment
from hbf.training.state import Totals, TrainState
from hbf.training.workdir import claim, locked


def write(workdir: pathlib.Path, experiment: Experiment, params: Mapping[str, Any]) -> None:
  """Makes the workdir of a run of these parameters that has taken no step.

  Raises:
    UserError: something is there already.
  """
  if workdir.exists():
    raise UserError(f'{workdir} exists: choose another --workdir, or remove it')
  params = jax.tree.map(jnp.asarray, params)
  state = TrainState(jnp.zeros((), jnp.int32), params, experiment.optimizer.init(params), Totals.zeros())
  with locked(workdir):
    claim(workdir, experiment.config, experiment.task.identity())
    with contextlib.closing(Checkpoints(workdir / 'checkpoints')) as checkpoints:
      checkpoints.save(0, with_average(state, experiment.config.train.average))
