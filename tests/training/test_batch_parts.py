"""Tests of the number of parts in which a step computes a batch on a CPU."""

import types

import jax
import numpy as np
import pytest

from configs import shakespeare
from hbf.config.resolve import resolve
from hbf.training import batch_parts as chosen
from hbf.training.batch_parts import batch_parts
from hbf.training.experiment import make_plan, prepare
from hbf.training.sharding import make_mesh
from hbf.training.state import init_state, make_train_step

TOKENS = 4  # of an image of digits with patches of 4×4 pixels


@pytest.fixture
def parts(toy, monkeypatch):
  """Return a function from the devices, the cores and changes of a config to the number of parts."""

  def count(devices=1, cores=1, most=8 * TOKENS, model='vit', **changes):
    monkeypatch.setattr(chosen, 'cores', lambda: cores)
    monkeypatch.setattr(chosen, 'TOKENS', most)
    plan = make_plan(toy(f'model={model}', **changes))
    return batch_parts(plan.config, plan.model, (8, 8, 1), make_mesh(jax.devices()[:devices]))

  return count


def test_a_part_has_as_many_images_as_fit(parts):
  """A batch has 64 images."""
  assert parts() == 8
  assert [parts(most=images * TOKENS) for images in (15, 16, 64)] == [8, 4, 1]
  assert parts(**{'model.patch': 2}) == 32
  assert parts(**{'train.batch_size': 24}) == 3


def test_each_device_splits_its_share_of_a_batch(parts):
  assert [parts(devices=devices) for devices in (2, 4, 8)] == [4, 2, 1]


def test_a_device_with_several_cores_computes_the_whole_batch(parts):
  assert (parts(cores=2), parts(cores=4, devices=2), parts(cores=2, devices=2)) == (1, 1, 4)


def test_a_batch_stays_whole_if_parts_would_be_small(parts):
  assert parts(**{'train.batch_size': 61}) == 1  # a prime number
  assert parts(most=TOKENS - 1) == 1  # not even one image


def test_a_number_in_the_config_is_taken(parts):
  assert [parts(**{'train.accumulate': number}) for number in (1, 2)] == [1, 2]


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('option', ['model.dropout', 'model.drop_path'])
def test_random_numbers_of_a_network_do_not_depend_on_the_devices(parts, option, scan):
  changes = {'model.depth': 2, 'model.scan_layers': scan}
  assert [parts(**changes, **{option: rate}) for rate in (0.0, 0.1)] == [8, 1]


def test_numbers_of_nested_centers_are_random_too(parts):
  assert [parts(model='hyperbf', **{'model.stage2.nested': nested}) for nested in (False, True)] == [8, 1]


def test_texts_accelerators_and_several_processes_keep_whole_batches(toy, monkeypatch):
  monkeypatch.setattr(chosen, 'cores', lambda: 1)
  monkeypatch.setattr(chosen, 'TOKENS', 8 * TOKENS)
  plan, mesh = make_plan(toy('model=vit')), make_mesh(jax.devices()[:1])
  assert batch_parts(plan.config, plan.model, (8, 8, 1), mesh) == 8
  assert batch_parts(resolve(shakespeare.get_config()), plan.model, (64,), mesh) == 1
  gpu = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='gpu')]), size=1)
  assert batch_parts(plan.config, plan.model, (8, 8, 1), gpu) == 1
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert batch_parts(plan.config, plan.model, (8, 8, 1), mesh) == 1


def test_a_step_in_parts_is_the_step_of_the_whole_batch(toy, monkeypatch):
  monkeypatch.setattr(chosen, 'cores', lambda: 1)

  def totals_and_params(most):
    monkeypatch.setattr(chosen, 'TOKENS', most)
    made = prepare(toy('model=vit', **{'optimizer.name': 'sgd'}), devices=jax.devices()[:1])
    data = made.inputs['train']
    batch = jax.tree.map(lambda z: z[0], next(data.stacks(made.order, 0, [1], 1)))

    @jax.jit
    def first_step(resident, batch):
      state = init_state(made.model, made.optimizer, made.objective, resident, batch)
      return make_train_step(made.model, made.optimizer, made.objective)(state, resident, batch)

    state = first_step(data.resident, batch)
    return made.objective.accumulate, state.totals, state.params

  (parts, *found), (one, *expected) = totals_and_params(8 * TOKENS), totals_and_params(64 * TOKENS)
  assert (parts, one) == (8, 1)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)
