"""Run folders for parameters that were trained elsewhere."""

import contextlib

import jax
import numpy as np
from toy_runs import ONE, QUIET

from hbf.models.build import abstract_params
from hbf.training import convert, startup
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import prepare

# A state with all that it may have.
FULL = {'train.accumulate': 2, 'log.noise_scale': True, 'train.average': 0.9, 'optimizer.skip': 2}


def test_a_written_run_goes_on_whatever_its_state_has(toy, tmp_path):
  experiment = prepare(toy('model=vit', **FULL), devices=ONE)
  params = jax.tree.map(lambda z: np.full(z.shape, 0.5, z.dtype), abstract_params(experiment.model, (8, 8, 1)))
  convert.write(tmp_path / 'run', experiment, params)
  first = next(experiment.inputs['train'].stacks(experiment.order, 0, [1], 1))
  shapes, initialize = startup.initialization(experiment, first)
  assert all(part is not None for part in vars(shapes).values())
  with contextlib.closing(Checkpoints(tmp_path / 'run' / 'checkpoints')) as checkpoints:
    state, step, _ = startup.restore_or_init(experiment, shapes, initialize, checkpoints, QUIET)
  assert step == 0
  for found in (state.params, state.average):
    jax.tree.map(np.testing.assert_array_equal, found, params)
