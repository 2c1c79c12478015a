"""Schedule plateau: as optax's, and the same in a run that is interrupted. These runs also log the noise scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from toy_runs import ONE, QUIET, assert_same_run

from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY, NLL
from hbf.training.experiment import make_plan
from hbf.training.loop import train
from hbf.training.plateau import plateau_scale
from hbf.training.writers import read_metrics


@pytest.mark.parametrize(('patience', 'minimum'), [(1, 0.0), (2, 0.0), (3, 0.25)])
def test_the_factor_is_that_of_optax(patience, minimum):
  values = np.random.default_rng(patience).integers(0, 6, 40) / 8  # with ties
  rule = optax.contrib.reduce_on_plateau(0.5, patience, rtol=0.0, atol=1e-9, min_scale=minimum)
  update, state = jax.jit(lambda state, value: rule.update({}, state, value=value)[1]), rule.init({'w': jnp.zeros(1)})
  ours = functools.partial(plateau_scale, patience=patience, factor=0.5, minimum=minimum)
  for count in range(1, len(values) + 1):
    state = update(state, values[count - 1])
    assert ours(values[:count], NLL) == float(state.scale)
    assert ours(-values[:count], ACCURACY) == float(state.scale)
  assert ours([], NLL) == 1 and float(state.scale) < 0.5


CHANGES = {
  'data.validation': 0.1,
  'optimizer.schedule': 'plateau',
  'optimizer.plateau_patience': 1,
  'optimizer.plateau_factor': 0.5,
  'optimizer.learning_rate': 0.3,  # so that some evaluation is worse than the one before
  'optimizer.warmup': '2steps',
  'optimizer.name': 'sgd',
  'evaluate.every': '3steps',
  'log.every': '3steps',
  'log.noise_scale': True,
  'train.accumulate': 2,
  'train.average': 0.9,
  'train.steps_per_call': 1,
}


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_rates_and_norms(toy, tmp_path):
  config = toy('model=identity', **CHANGES)
  assert train(config, tmp_path / 'whole', QUIET, ONE)
  assert train(config, tmp_path / 'parts', QUIET, ONE, callbacks=[lambda step, *_: step == 16]) is None
  assert train(config, tmp_path / 'parts', QUIET, ONE)
  assert_same_run(tmp_path / 'whole', tmp_path / 'parts')

  lines = read_metrics(tmp_path / 'whole')
  scores = [line['accuracy'] for line in lines if line['split'] == 'validation']
  logged = [line for line in lines if line['split'] == 'train']
  optimizer = config.optimizer
  rule = {
    'patience': optimizer.plateau_patience,
    'factor': optimizer.plateau_factor,
    'minimum': optimizer.minimum_rate,
  }
  expected = [0.3 * plateau_scale(scores[:count], ACCURACY, **rule) for count in range(len(logged))]
  np.testing.assert_allclose([line['learning_rate'] for line in logged], expected, rtol=1e-6)
  assert min(expected) < 0.3
  assert all(line['gradient_variance'] > 0 for line in logged)


def test_a_run_without_held_out_data_has_no_plateau(toy):
  with pytest.raises(UserError, match=r'schedule is plateau, but no data are held out .*set data.validation above 0'):
    make_plan(toy(**{**CHANGES, 'data.validation': 0.0}))
