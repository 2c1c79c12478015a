import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from toy_runs import ONE, QUIET

from hbf.evaluation.unit_health import correlations, doubled
from hbf.training.loop import train
from hbf.training.units import MANY, WORSE, UnitWarnings
from hbf.training.writers import read_metrics


def units(workdir):
  return {line['step']: line['block0'] for line in read_metrics(workdir) if line['split'] == 'units'}


def test_a_run_logs_its_units_at_the_start_and_at_each_evaluation(toy, tmp_path):
  """Three devices share a batch of 48 images, but could not share the images of the report evenly."""
  config = toy(**{'train.epochs': 2.0, 'train.batch_size': 48, 'log.units': True})
  train(config, tmp_path / 'run', QUIET, jax.devices()[:3])
  evaluated = [line['step'] for line in read_metrics(tmp_path / 'run') if line['split'] == 'validation']
  found = units(tmp_path / 'run')
  assert [*found] == [0, *evaluated]
  assert all(faults.keys() == {'dead', 'constant', 'doubled'} for faults in found.values())
  assert found[0]['dead'] == found[0]['constant'] == 0


@pytest.mark.slow
def test_units_that_are_dead_at_first_are_warned_about(toy, tmp_path):
  console = Console(record=True, width=300)
  published = {'kernel': 'signed_gaussian', 'metric': 'bilinear', 'normalization': 'none', 'sigma_scale': 1e-4}
  changes = {f'model.stage2.{option}': value for option, value in published.items()}
  changes |= {'model.stage2.centers_init': 'normal', 'optimizer.learning_rate': 0.0}
  train(toy(**changes, **{'train.epochs': 0.1, 'log.units': True}), tmp_path / 'run', console, ONE)
  assert units(tmp_path / 'run')[0]['dead'] > MANY
  assert 'of the units of block0, ' in console.export_text()


def test_warnings_come_at_first_and_when_it_gets_worse():
  warn = UnitWarnings()

  def lines(dead, constant):
    return len(warn({'block0': {'dead': dead, 'constant': constant, 'doubled': 0.0}}))

  assert lines(MANY - 1, 0) == 0
  assert lines(MANY - 1, WORSE - 1) == 0
  assert lines(MANY - 1, WORSE) == 1
  assert lines(MANY - 1, WORSE) == 0
  assert lines(MANY - 1, 2 * WORSE) == 1


def test_a_unit_is_doubled_by_its_copy_but_not_by_a_constant():
  responses = jax.random.normal(jax.random.key(0), (50, 5)).at[:, 3].set(1.0)
  responses = responses.at[:, 2].set(3 * responses[:, 0] + 7).at[:, 4].set(1.0)
  np.testing.assert_allclose(correlations(responses)[:2, :2], np.corrcoef(responses[:, :2].T), atol=1e-6)
  assert doubled(correlations(responses)).tolist() == [False, False, True, False, False]
  assert jnp.isfinite(correlations(responses)).all()
