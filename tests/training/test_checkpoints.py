import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from hbf.errors import UserError
from hbf.training.checkpoints import Checkpoints
from hbf.training.sharding import state_sharding
from hbf.training.state import Totals, TrainState


def state(value, devices=1):
  params = {'layer': {'kernel': jnp.full((4, 3), value)}}
  new = TrainState(jnp.asarray(int(value)), params, optax.adam(1e-3).init(params), Totals.zeros())
  return jax.device_put(new, state_sharding(Mesh(np.asarray(jax.devices()[:devices]), ('data',)), new))


@contextlib.contextmanager
def saved(folder, accuracies, keep=1):
  with contextlib.closing(Checkpoints(folder, keep)) as checkpoints:
    for step, accuracy in accuracies.items():
      checkpoints.save(step, state(step), None if accuracy is None else {'accuracy': accuracy})
  yield Checkpoints(folder, read_only=True)


def test_the_newest_and_the_best_are_kept(tmp_path):
  with saved(tmp_path, {100: 10.0, 200: 50.0, 300: 60.0, 400: 55.0, 500: 52.0}) as checkpoints:
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [300, 500]
    assert (checkpoints.latest, checkpoints.find('latest'), checkpoints.find('best')) == (500, 500, 300)


def test_unranked_checkpoints_do_not_pile_up(tmp_path):
  with saved(tmp_path, dict.fromkeys((1, 2, 3, 4)), keep=2) as checkpoints:
    assert (checkpoints.find('3'), checkpoints.find('latest')) == (3, 4)
    with pytest.raises(UserError, match=r'use latest, best or one of 3, 4'):
      checkpoints.find('1')
    with pytest.raises(UserError, match='no checkpoint has a validation accuracy'):
      checkpoints.find('best')


def test_a_folder_without_checkpoints_says_so(tmp_path):
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints, pytest.raises(UserError, match='no checkpoint in'):
    checkpoints.find('latest')


@pytest.mark.parametrize('devices', [1, 8])
def test_restores_onto_the_devices_at_hand(tmp_path, devices):
  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints.save(7, state(7, devices=9 - devices), None)
  target = jax.tree.map(jnp.zeros_like, state(0, devices))
  target = jax.device_put(target, state_sharding(Mesh(np.asarray(jax.devices()[:devices]), ('data',)), target))
  checkpoints = Checkpoints(tmp_path, read_only=True)
  restored = checkpoints.restore(7, target)
  assert jax.tree.structure(restored) == jax.tree.structure(target)
  assert all(leaf.sharding.device_set == set(jax.devices()[:devices]) for leaf in jax.tree.leaves(restored))
  assert int(restored.step) == 7
  np.testing.assert_array_equal(restored.params['layer']['kernel'], 7.0)
  np.testing.assert_array_equal(checkpoints.restore_params(7, target.params)['layer']['kernel'], 7.0)
