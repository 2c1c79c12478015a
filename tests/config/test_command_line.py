"""Tests of configs from the arguments of a command: forms of the flags, and one line for each mistake."""

import pytest

from hbf.config.command_line import read_config
from hbf.errors import UserError


def test_a_value_may_follow_its_flag_after_a_space():
  spaced = ['--config', 'digits:model=vit', '--config.seed', '3', '--config.data.stratify', 'False', '-config.log.to']
  equal = ['--config=digits:model=vit', '--config.seed=3', '--config.data.stratify=False', '--config.log.to=']
  assert read_config([*spaced, '']) == read_config(equal)
  assert read_config([*spaced, '']).seed == 3


def test_the_last_value_counts_even_after_a_space():
  first, last = "(('flip',),('shift',4))", "(('flip',),('erase',0.5))"
  config = read_config(['--config=digits', f'--config.data.transforms={first}', '--config.data.transforms', last])
  assert config.data.transforms == (('flip',), ('erase', 0.5))


def test_a_flag_that_is_true_needs_no_value():
  assert read_config(['--config=digits', '--config.data.stratify', '--config.seed=3']).data.stratify


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--config'], '--config needs a value: give a data set, such as --config=cifar10, or a config file'),
    (['--config', '--config.seed=1'], '--config needs a value'),
    (['--config='], '--config needs a value'),
    (['--config=digits', '--config.seed'], '--config.seed needs a value: write --config.seed=VALUE'),
  ],
)
def test_a_flag_without_its_value_is_named(arguments, message):
  with pytest.raises(UserError, match=f'^{message}'):
    read_config(arguments)
