import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from hbf.errors import UserError
from hbf.training.average import averaging, check_average, with_average
from hbf.training.sharding import make_mesh, replicated, state_sharding
from hbf.training.state import Diverged, Totals, TrainState, check_finite_state, repeat_step


def take_the_next(state, resident, batch):
  """Take a step whose new parameters are simply those in the batch."""
  del resident
  return state.replace(step=state.step + 1, params={'kernel': batch['params']})


def decaying(decay):
  return ConfigDict(
    {'train': {'average': decay}, 'optimizer': {'name': 'adamw'}, 'checkpoint': {'rank': 'parameters'}}
  )


@pytest.mark.parametrize(('decay', 'devices'), [(0.6, 1), (0.999, 8)], ids=['reached', 'on the way'])
def test_the_average_is_the_recursion_over_the_parameters_of_each_step(decay, devices):
  """The expected recursion has the decay min(decay, (1 + t) / (10 + t)), in float64. Each call donates the state."""
  config = decaying(decay)
  drawn = np.random.default_rng(0).normal(size=(31, 5, 3)).astype(np.float32)
  mesh = make_mesh(jax.devices()[:devices])
  begin = TrainState(jnp.zeros((), jnp.int32), {'kernel': jnp.asarray(drawn[0])}, (), Totals.zeros())
  begin = jax.device_put(begin, replicated(mesh))
  state = jax.jit(lambda state: with_average(state, config))(begin)
  sharding = state_sharding(mesh, (state, state.step))
  steps = jax.jit(repeat_step(averaging(take_the_next, config)), donate_argnums=0, out_shardings=sharding)
  for first, count in ((1, 10), (11, 3), (14, 17)):
    rest = np.zeros((17, *drawn.shape[1:]), np.float32)
    rest[:count] = drawn[first : first + count]
    state, _ = steps(state, None, {'params': jnp.asarray(rest)}, count)
  expected = drawn[0].astype(np.float64)
  for t, params in enumerate(drawn[1:].astype(np.float64), start=1):
    kept = min(decay, (1 + t) / (10 + t))
    expected = kept * expected + (1 - kept) * params
  assert int(state.step) == 30
  np.testing.assert_array_equal(state.params['kernel'], drawn[-1])
  np.testing.assert_allclose(state.average['kernel'], expected, rtol=1e-5, atol=1e-6)
  assert state.average['kernel'].sharding.device_set == {*mesh.devices.flat}


def test_without_a_decay_state_and_step_are_what_they_were():
  state = TrainState(jnp.zeros((), jnp.int32), {}, (), Totals.zeros())
  config = decaying(0.0)
  assert with_average(state, config) is state and averaging(take_the_next, config) is take_the_next


def test_two_averages_are_refused():
  config = decaying(0.9)
  check_average(config)
  config.optimizer.name = 'schedule_free'
  with pytest.raises(UserError, match=r'schedule_free keeps an average of its own, and train.average is 0.9: set it'):
    check_average(config)


def test_an_average_that_is_not_kept_cannot_rank():
  config = decaying(0.0)
  config.checkpoint.rank = 'average'
  with pytest.raises(UserError, match=r'checkpoint.rank is average, and train.average is 0: set train.average'):
    check_average(config)
  config.optimizer.name = 'schedule_free'
  check_average(config)


@pytest.mark.parametrize('spoilt', [None, 'params', 'average'])
def test_a_state_is_finite_only_if_its_average_is_finite_too(spoilt):
  fine, spoiled = {'kernel': jnp.ones(2)}, {'kernel': jnp.array([1.0, jnp.nan])}
  state = TrainState(jnp.zeros((), jnp.int32), fine, (), Totals.zeros(), fine)
  if spoilt is None:
    check_finite_state(1, state)
  else:
    with pytest.raises(Diverged, match='not finite at step 1'):
      check_finite_state(1, dataclasses.replace(state, **{spoilt: spoiled}))
