"""The run that many tests read."""

import pytest
from toy_runs import EVERYTHING, ONE, QUIET

from hbf.training.loop import train


@pytest.fixture(scope='session')
def finished(tmp_path_factory, toy):
  """Return the workdir, config and result of an uninterrupted run. Tests that change the folder must copy it."""
  changes = {'model.dropout': 0.1, 'train.average': 0.9, 'optimizer.minimum_rate': 0.1, 'optimizer.layer_decay': 0.8}
  changes |= {
    'train.epochs': 2.0,
    'log.every': '7steps',
    'evaluate.batch_size': 16,
    'evaluate.copies': 'mirror',
    'log.units': True,
  }
  config = toy(**changes, **EVERYTHING)
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  return workdir, config, train(config, workdir, QUIET, ONE)
