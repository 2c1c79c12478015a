"""Run folders for parameters that were trained elsewhere."""

import contextlib

import jax
import numpy as np
import pytest
from toy_runs import ONE, QUIET

from hbf.cli import convert as cli
from hbf.models.build import abstract_params
from hbf.training import convert, startup
from hbf.training.checkpoints import Checkpoints
from hbf.training.experiment import prepare

# A state with all that it may have.
FULL = {'train.accumulate': 2, 'log.noise_scale': True, 'train.average': 0.9, 'optimizer.skip': 2}


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--export', '--heads=2'], '--heads does not go with --export: leave one of them out'),
    (['--export', '--config=cifar10'], '--config does not go with --export'),
    (['--average'], '--average needs --export: add it'),
    (['--checkpoint=3'], '--checkpoint needs --export'),
  ],
)
def test_flags_that_would_do_nothing_are_refused(flags, message, capsys):
  assert cli.main(['x.npz', '--workdir=nowhere', *flags]) == 1
  assert message in capsys.readouterr().err


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
