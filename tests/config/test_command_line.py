"""Tests of configs from the arguments of a command: forms of the flags, and one line for each mistake."""

import re
import sys

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
    # The next flag is not taken for the value.
    (['--config=digits', '--config.log.to', '--config.seed=3'], '--config.log.to needs a value: write'),
    (['--config=digits', '--config.seed', '--config.log.to=x'], '--config.seed needs a value: write'),
    (['--config=digits', '-config.data.mean', '--config.data.stratify'], '-config.data.mean needs a value'),
  ],
)
def test_a_flag_without_its_value_is_named(arguments, message):
  with pytest.raises(UserError, match=f'^{message}'):
    read_config(arguments)


MAKE = """from hbf.config.datasets import digits
def get_config(arguments=''):
  config = digits(arguments)
"""
ASIDE = "such as that of hbf.get_config('cifar10')"


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (MAKE + '  config.train.epocs = 3', "FILE, line 4: unknown config key 'epocs': did you mean 'epochs'? `pyt"),
    (MAKE + '  config.lottery = 3', "FILE, line 4: unknown config key 'lottery': `python -m hbf.config.reference`"),
    (MAKE + '  config.seed = config.sed', "FILE, line 4: unknown config key 'sed': did you mean 'seed'? `python -m"),
    (MAKE + "  config['lottery']", "FILE, line 4: unknown config key 'lottery': `python -m hbf.config.reference`"),
    (MAKE + "  config.train.epochs = 'x'", "FILE, line 4: TypeError: Could not override field 'epochs'"),
    (MAKE + '  return confg', "FILE, line 4: NameError: name 'confg' is not defined: correct the file"),
    (MAKE + "  return {}['lr']", "FILE, line 4: KeyError: 'lr': correct the file"),
    (MAKE + '  return config.to_dict()', f'get_config in FILE returns a dict: expected a config, {ASIDE}'),
    ('def get_config(:', 'FILE: SyntaxError: invalid syntax (mine.py, line 1): correct the file'),
    ('import os\nos.foo', "FILE, line 2: AttributeError: module 'os' has no attribute 'foo': correct the file"),
    ('import absent', "FILE, line 1: ModuleNotFoundError: No module named 'absent': correct the file"),
    ("open('absent.txt')", "FILE, line 1: FileNotFoundError: [Errno 2] No such file or directory: 'absent.txt'"),
    ('seed = 3', f'FILE has no function get_config: write one that returns a config, {ASIDE}'),
    ('def get_config():\n  return 3', 'FILE: TypeError: get_config() takes 0 positional arguments but 1 was given'),
    (MAKE + "  digits('model=vti')", "unknown model 'vti': did you mean 'vit'? known: "),
  ],
)
def test_a_mistake_in_a_config_file_is_a_line_that_names_it(text, message, tmp_path, monkeypatch):
  monkeypatch.delitem(sys.modules, 'config_config', raising=False)
  path = tmp_path / 'mine.py'
  path.write_text(f'{text}\n')
  with pytest.raises(UserError, match='^' + re.escape(message.replace('FILE', str(path)))) as caught:
    read_config([f'--config={path}:'])
  assert '\n' not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--config.lottery=1', "unknown config key 'lottery': `python -m hbf.config.reference` lists all keys"),
    ('--config.train.epochs.all=1', "unknown config key 'train.epochs.all': `python"),
    ('--config.=1', "a flag --config.KEY is wrong: Could not parse ''"),
    ('--config.data.transforms.x=1', 'a flag --config.KEY is wrong: tuple indices must be integers'),
    ('--config=other/mine.py', 'other/mine.py is not there: give a data set such as cifar10, or a config file'),
    ('--config=:model=vit', ':model=vit is not there: give a data set'),
  ],
)
def test_a_wrong_key_of_a_flag_is_named(flag, message):
  with pytest.raises(UserError, match=f'^{re.escape(message)}'):
    read_config(['--config=digits', flag])


def test_a_config_file_may_be_in_the_home_folder_and_read_files_beside_it(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'seed.txt').write_text('7')
  reads = "  import pathlib\n  config.seed = int(pathlib.Path(__file__).with_name('seed.txt').read_text())\n"
  (tmp_path / 'mine.py').write_text(f'{MAKE}{reads}  return config\n')
  config = read_config(['--config=~/mine.py:model=vit', '--config.model.width=16'])
  assert (config.seed, config.model.name, config.model.width) == (7, 'vit', 16) and config.is_locked
