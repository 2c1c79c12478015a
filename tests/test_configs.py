"""Tests of shipped configs: every key is read, and every config takes a step."""

import importlib
import pathlib
import sys

import jax
import ml_collections
import pytest
from in_memory import random_source
from rich.console import Console

from hbf.config.command_line import read_config
from hbf.config.datasets import DATASETS
from hbf.config.defaults import COMMON, Key
from hbf.config.resolve import resolve
from hbf.data.datasets import Dataset
from hbf.errors import UserError
from hbf.hardware.programs import trace_programs
from hbf.models.matching import units_of
from hbf.nn.registry import MODELS
from hbf.options import whole
from hbf.tasks.classification import Classification
from hbf.training.loop import train
from tests.commands import run_each

ONE = jax.devices()[:1]
QUIET = Console(quiet=True)
SHAPES = {
  'digits': ((8, 8, 1), 10),
  'cifar10': ((32, 32, 3), 10),
  'cifar100': ((32, 32, 3), 100),
  'tiny_imagenet': ((64, 64, 3), 200),
  'image_folder': ((64, 64, 3), 3),
}
SMALL_IMAGENET = ((32, 32, 3), 1000)


@pytest.fixture
def fake_data(monkeypatch):
  def load_dataset(config):
    shape, classes = SHAPES.get(config.data.name, SMALL_IMAGENET)
    splits = {split: random_source(64, shape, classes=classes) for split in ('train', 'test')}
    return Dataset(config.data.name, tuple(map(str, range(classes))), shape, splits)

  monkeypatch.setattr(Classification, 'load_dataset', load_dataset)


def shipped(name, arguments):
  return resolve(importlib.import_module(f'configs.{name}').get_config(arguments))


SHIPPED = [(name, model, recipe) for name in SHAPES for model in ('hyperbf', 'vit') for recipe in ('memo', 'small')]
SHIPPED += [('cifar10', model, recipe) for model in ('hyperbf', 'gmlp') for recipe in ('laptop', 'strong')]
SHIPPED += [('cifar10', 'vit', 'finetune'), ('imagenet', 'hyperbf', 'plain')]
OTHERS = [('cifar10', model, 'small') for model in (*MODELS, 'softmax+hyperbf') if model not in ('hyperbf', 'vit')]
# Data sets and recipes do not depend on models, so each is tried once. The slow tests try all pairs. The other data
# sets differ from CIFAR-10 only in numbers. For the other models, the programs are traced.
USUAL = [('cifar10', 'vit', 'memo'), ('cifar10', 'hyperbf', 'laptop'), ('image_folder', 'hyperbf', 'small')]
CASES = [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in SHIPPED + OTHERS]


def shrink(config):
  config.model.update(width=16, depth=1, heads=2)
  config.model.update_from_flattened_dict(dict.fromkeys(units_of(config.model), 8))
  return config


@pytest.mark.parametrize(('name', 'model', 'recipe'), OTHERS)
def test_every_model_has_the_programs_of_a_run(name, model, recipe):
  programs = trace_programs(shrink(shipped(name, f'model={model},recipe={recipe}')), ONE)
  train_step, evaluation_step = (program.traced.out_info for program in programs.each)
  assert train_step[1].shape == ()
  assert jax.tree.leaves(evaluation_step)


@pytest.mark.parametrize(('name', 'model', 'recipe'), CASES)
def test_every_shipped_config_takes_a_step_at_toy_size(tmp_path, fake_data, name, model, recipe):
  config = shrink(shipped(name, f'model={model},recipe={recipe}'))
  config.train.update(batch_size=32, epochs=0.5)
  result = train(config, tmp_path / 'run', QUIET, ONE)
  assert result['n'] == 64
  assert result['recipe'] == recipe


def record_reads(monkeypatch):
  """Return a set that collects (section keys, key) of every read of a config."""
  read = set()
  get = ml_collections.ConfigDict.__getitem__

  def recording(self, key):
    # Copying or printing the whole config does not count as reading a key.
    caller = sys._getframe(1)
    while caller and 'config_dict' in caller.f_code.co_filename:
      if caller.f_code.co_name in (
        'copy_and_resolve_references',
        'to_json',
        'to_dict',
        'update',
        'items',
        '__iter__',
      ):
        return get(self, key)
      caller = caller.f_back
    read.add((frozenset(self.keys()), key))
    return get(self, key)

  monkeypatch.setattr(ml_collections.ConfigDict, '__getitem__', recording)
  return read


def leaves(config, prefix=''):
  for key in config.keys():  # noqa: SIM118 (iterating a ConfigDict reads it)
    value = config._fields[key]
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f'{prefix}{key}.')
    else:
      yield prefix + key, (frozenset(config.keys()), key)


# This schedule reads the keys of all others too.
ALL_KEYS = {'optimizer.schedule': 'plateau'}


def test_every_key_is_read_and_one_that_nobody_reads_is_found(tmp_path, toy, monkeypatch):
  monkeypatch.setitem(COMMON, 'train.lottery', Key(7, whole(0), 'a number'))
  config = toy(**ALL_KEYS)
  stages = ('model.stage1.', 'model.stage2.')  # passed as a whole to modules that take exactly these options
  read = record_reads(monkeypatch)
  train(config, tmp_path / 'run', QUIET, ONE)
  dead = [path for path, leaf in leaves(config) if leaf not in read and not path.startswith(stages)]
  assert dead == ['train.lottery']


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ('modl=vit', "unknown config argument 'modl': did you mean 'model'"),
    ('model=vti', "unknown model 'vti': did you mean 'vit'"),
    ('model=softmax+mpl', "unknown stage 2 'mpl': did you mean 'mlp'"),
    ('recipe=large', "unknown recipe 'large'"),
    ('model', 'needs a value'),
    ('size=huge', "unknown size 'huge'"),
  ],
)
def test_wrong_arguments_are_named(arguments, message):
  with pytest.raises(UserError, match=message):
    shipped('cifar10', arguments)


def test_sizes_set_width_depth_heads_and_what_is_matched_to_them():
  config = shipped('cifar10', 'model=vit,size=tiny')
  assert (config.model.width, config.model.depth, config.model.heads) == (192, 12, 3)
  assert config.model.stage2.hidden == shipped('cifar10', 'size=tiny').model.stage2.centers == 768


def test_a_data_set_has_its_config_without_a_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  named, *others = (
    read_config([f'--config={config}:model=vit']) for config in ('digits', 'configs/digits.py', './configs/digits.py')
  )
  assert named == shipped('digits', 'model=vit') and others == [named, named]
  (tmp_path / 'configs').mkdir()
  theirs = 'from hbf.config.datasets import digits\n\n\ndef get_config(arguments):\n  return digits("recipe=memo")\n'
  (tmp_path / 'configs' / 'digits.py').write_text(theirs)
  assert read_config(['--config=configs/digits.py:model=vit']).recipe == 'memo'  # a user's own file comes first


def test_every_file_of_configs_is_a_data_set_of_the_package():
  folder = pathlib.Path(__file__).parents[1] / 'configs'
  assert {path.stem for path in folder.glob('*.py')} == set(DATASETS)


WRONG = {
  '--config.optimzer.name=sgd': "error: unknown config key 'optimzer': did you mean 'optimizer'?",
  '--config.train.batch_size=many': 'error: flag --config.train.batch_size=many',
  '--config=configs/cifar11.py': 'configs/cifar11.py',
  '--config=cifar11': "error: unknown data set 'cifar11': did you mean 'cifar10'?",
  '--config=configs/cifar10.py:model=vti': "error: unknown model 'vti': did you mean 'vit'?",
  '--config.model.width=-16': 'error: model.width is -16: expected a whole number of 1 or more',
  '--config': 'error: --config needs a value',
  'epochs=3': "error: unexpected argument 'epochs=3'",
  '--deadline=20000': 'error: --deadline=20000 ms is not below --timeout=10 s',
}
OF_OTHERS = {'--deadline=20000': ['hbf/cli/serve.py', '--workdir=runs/x']}  # of other scripts than train.py


@pytest.fixture(scope='module')
def ended():
  """Run wrong commands. Return status, stdout and stderr by the wrong flag. '': a flag is missing."""
  commands = [*([*OF_OTHERS.get(flag, ['train.py']), flag] for flag in WRONG), ['eval.py']]
  return dict(zip([*WRONG, ''], run_each(commands), strict=True))


@pytest.mark.parametrize('flag', WRONG)
def test_a_wrong_command_ends_in_one_line(ended, flag):
  status, _, said = ended[flag]
  assert status == 1
  assert WRONG[flag] in said
  assert said.count('\n') == 1


def test_a_missing_flag_is_named(ended):
  status, _, said = ended['']
  assert status == 1
  assert said == 'error: --workdir is missing: write --workdir=VALUE; --help lists the flags\n'
