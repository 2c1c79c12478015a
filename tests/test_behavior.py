"""Tests of the record of behavior: it has all shipped configs, and two small ones compute what is recorded."""

import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from benchmarks import behavior

ROOT = pathlib.Path(__file__).parents[1]


def test_every_shipped_config_is_recorded():
  assert [*behavior.read()] == [*behavior.CONFIGS]


@pytest.mark.slow
def test_small_configs_compute_what_is_recorded():
  """Run in a separate process, because the tests' XLA flags and threads would give other bits."""
  command = [sys.executable, '-m', 'benchmarks.behavior', '--check', '--only=tiny-*']
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr


class Net(nn.Module):
  names: tuple[str, ...]

  @nn.compact
  def __call__(self, x):
    for name in self.names:
      x = nn.Dropout(0.5, deterministic=False, name=f'drop_{name}')(nn.Dense(8, name=name)(x))
    return x


@pytest.mark.parametrize('names', [('z', 'a', 'k'), ('first', 'second', 'third')])
def test_names_have_no_influence(names):
  def output(names):
    rngs = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    return Net(names).init_with_output(rngs, np.ones((2, 8), np.float32))[0]

  with behavior.ignore_names():
    assert np.array_equal(output(names), output(('a', 'b', 'c')))
  assert not np.array_equal(output(names), output(('a', 'b', 'c')))


def test_order_of_parameters_has_no_influence_on_the_norm():
  values = np.random.default_rng(0).lognormal(0, 4, 50).astype(np.float32)
  with behavior.ignore_names():
    norms = {float(optax.tree.norm([*np.roll(values, i)])) for i in range(5)}
  np.testing.assert_allclose([*norms], np.linalg.norm(values.astype(np.float64)), rtol=1e-6)
  assert len(norms) == 1


def test_one_bit_is_a_difference():
  theirs = np.linspace(1, 2, 20, dtype=np.float32)
  ours = theirs.copy()
  ours[6] = np.nextafter(ours[6], 9, dtype=np.float32)
  assert behavior.difference('losses', theirs, theirs, exact=True) == ''
  assert 'losses differ from step 7 on: 1 of 20' in behavior.difference('losses', ours, theirs, exact=True)
  assert behavior.difference('losses', ours, theirs, exact=False) == ''
  ours[6] = np.nan
  assert '1 of 20' in behavior.difference('losses', ours, theirs, exact=False)


def test_arrays_survive_the_file():
  array = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
  assert np.array_equal(behavior.decode(behavior.encode(array)), array)
