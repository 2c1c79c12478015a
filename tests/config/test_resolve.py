"""Tests that keys which depend on other keys are filled once, after all overrides."""

import pytest

from configs import cifar10, shakespeare
from hbf.config.command_line import read_config
from hbf.config.resolve import resolve
from hbf.models.matching import units_of


def test_the_rate_and_the_number_of_centers_follow_an_overridden_width():
  config = read_config(['--config=configs/cifar10.py', '--config.model.width=256'])
  assert config.optimizer.center_rate == 16.0
  assert config.model.stage2.centers == 1024


def test_a_value_that_is_given_stays():
  flags = ['--config.model.width=256', '--config.optimizer.center_rate=3', '--config.model.stage2.centers=12']
  config = read_config(['--config=configs/cifar10.py', *flags])
  assert (config.optimizer.center_rate, config.model.stage2.centers) == (3.0, 12)


def test_the_last_value_of_a_key_counts_even_if_it_is_a_tuple():
  transforms = ["(('flip',),('shift',4))", "(('flip',),('erase',0.5))"]
  config = read_config(['--config=cifar10', *(f'--config.data.transforms={value}' for value in transforms)])
  assert config.data.transforms == (('flip',), ('erase', 0.5))


@pytest.mark.parametrize(
  ('arguments', 'units'),
  [
    ('model=vit', {'stage2.hidden': 128}),
    ('model=vit,recipe=memo', {'stage2.hidden': 64}),
    ('model=unified', {'stage1.memory': 128}),
    ('model=gated', {'stage1.hidden': 106}),
    ('model=gmlp,size=tiny', {'stage1.hidden': 96}),
    ('model=mixer,size=small', {'stage2.hidden': 128}),
  ],
)
def test_units_follow_the_width_in_every_model(arguments, units):
  config = cifar10.get_config(arguments)
  config.model.width = 32
  assert units_of(resolve(config).model) == units


def test_the_expansion_can_be_chosen():
  config = resolve(read_config(['--config=configs/cifar10.py:model=mixer', '--config.model.expansion=2.5']))
  assert (config.model.stage1.hidden, config.model.stage2.hidden) == (20, 160)
  assert 'expansion' not in config.model


@pytest.mark.parametrize('get_config', [cifar10.get_config, shakespeare.get_config])
def test_resolving_changes_no_config_and_is_done_once(get_config):
  config = get_config()
  resolved = resolve(config)
  assert config.optimizer.center_rate is None and config.model.stage2.centers is None
  assert resolve(resolved) == resolved and resolved.is_locked
