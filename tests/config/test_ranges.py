"""Tests that every value is checked before anything is written. Messages have key, value and allowed values."""

import importlib

import pytest
from flax.traverse_util import flatten_dict
from test_golden_configs import GOLDEN

from hbf.config.defaults import IMAGES, TEXTS, keys, stage_keys
from hbf.config.resolve import check, resolve
from hbf.errors import UserError
from hbf.nn.registry import STAGE1, STAGE2, stage_options, stage_values
from hbf.training.experiment import make_plan

NO_RATE = 'expected a number from 0 to below 1'
NO_SHARE = 'expected a number from 0 to 1'
NOT_POSITIVE = 'expected a number above 0'
NEGATIVE = 'expected a number of 0 or more'
NO_COUNT = 'expected a whole number of 1 or more'
NO_NUMBER = 'expected a whole number of 0 or more'
BAD = [
  ('optimizer.learning_rate', -1.0, f'{NEGATIVE}; set it to one, such as 0.001'),
  ('optimizer.learning_rate', float('nan'), NEGATIVE),
  ('optimizer.momentum', 2.0, NO_RATE),
  ('optimizer.second_momentum', 1.0, NO_RATE),
  ('optimizer.weight_decay', -5.0, NEGATIVE),
  ('optimizer.center_rate', -3.0, f'{NEGATIVE}; set it to one'),
  ('optimizer.sigma_rate', -1.0, NEGATIVE),
  ('optimizer.clip', -1.0, NEGATIVE),
  ('optimizer.layer_decay', 1.5, NO_SHARE),
  ('optimizer.minimum_rate', 2.0, NO_SHARE),
  ('optimizer.warmup', '300%', 'expected a duration such as 500steps, .* and at most 100%; set it to one, such as'),
  ('optimizer.name', 'adam', "unknown optimizer.name 'adam': did you mean 'adamw'"),
  ('model.dropout', 1.5, NO_RATE),
  ('model.drop_path', -0.1, NO_RATE),
  ('model.layer_scale', -1.0, NEGATIVE),
  ('model.norm_epsilon', -1.0, NOT_POSITIVE),
  ('model.depth', 0, NO_COUNT),
  ('model.heads', 0, NO_COUNT),
  ('model.patch', 0, NO_COUNT),
  ('model.patch', -4, NO_COUNT),
  ('model.width', -16, NO_COUNT),
  ('model.expansion', -4.0, NOT_POSITIVE),
  ('model.pool', 'clss', "unknown model.pool 'clss': did you mean 'cls'"),
  ('model.dtype', 'float16', "unknown model.dtype 'float16'"),
  ('model.stage1.kernel', 'gausian', "unknown model.stage1.kernel 'gausian': did you mean 'gaussian'"),
  ('model.stage1.sigma_scale', 0.0, NOT_POSITIVE),
  ('model.stage1.memory', -1, NO_NUMBER),
  ('model.stage2.sigma_scale', -2.0, NOT_POSITIVE),
  ('model.stage2.centers', 0, NO_COUNT),
  ('model.stage2.centers', -3, NO_COUNT),
  ('model.stage2.coefficients_scale', -0.1, NEGATIVE),
  ('data.image_size', -8, NO_NUMBER),
  ('data.workers', -1, NO_NUMBER),
  ('data.input', 'disk', "unknown data.input 'disk'"),
  ('data.mean', (0.5, 1.5), 'expected a number from 0 to 1 for each channel'),
  ('data.std', (0.0,), 'expected a number above 0 for each channel'),
  ('data.validation', 1.5, NO_RATE),
  ('train.epochs', 0.0, NOT_POSITIVE),
  ('train.epochs', float('inf'), NOT_POSITIVE),
  ('train.steps_per_call', -1, NO_NUMBER),
  ('train.accumulate', -1, NO_NUMBER),
  ('train.average', 1.0, NO_RATE),
  ('train.label_smoothing', -0.1, NO_SHARE),
  ('evaluate.batch_size', 0, NO_COUNT),
  ('checkpoint.keep', 0, NO_COUNT),
  ('checkpoint.every', '1 month', 'expected a duration above 0 such as'),
  ('log.every', '0steps', 'expected a duration above 0 such as'),
  ('mesh.data', 0, f'{NO_COUNT}, or -1'),
  ('seed', 2**32, 'expected a whole number from 0 to 4294967295; set it to one, such as 0'),
  ('seed', -1, 'expected a whole number from 0 to 4294967295'),
]


@pytest.mark.parametrize(('key', 'value', 'expected'), BAD)
def test_a_value_out_of_range_is_named_with_what_was_expected(toy, key, value, expected):
  said = expected if expected.startswith('unknown') else rf'^{key} is .*: {expected}'
  with pytest.raises(UserError, match=said) as refused:
    make_plan(toy(**{key: value}))
  assert expected.startswith('unknown') or f'is {value!r}: ' in str(refused.value)


@pytest.mark.parametrize(
  ('lacking', 'message'),
  [
    ('train.patience', '^the config lacks train.patience: begin with a whole one, such as that of hbf.get_config'),
    ('model.stage1', '^the config lacks model.stage1: begin'),
    ('train', r'^the config lacks train\.\w+, train\.\w+, train\.\w+ and [0-9]+ more: begin'),
  ],
)
def test_a_config_without_a_key_is_refused(toy, lacking, message):
  config, (*section, name) = toy().unlock(), lacking.split('.')
  del (config[section[0]] if section else config)[name]
  with pytest.raises(UserError, match=message):
    make_plan(config)


def test_an_unknown_task_is_named(toy):
  with pytest.raises(UserError, match=r"^unknown task 'clasification': did you mean 'classification'"):
    make_plan(toy(task='clasification'))


@pytest.mark.parametrize(
  ('model', 'option', 'value', 'expected'),
  [
    ('vit', 'stage2.hidden', 0, NO_COUNT),
    ('vit', 'stage2.output_scale', -1.0, NEGATIVE),
    ('gmlp', 'stage1.norm_epsilon', -1.0, NOT_POSITIVE),
    ('gmlp', 'stage1.attention', -1, NO_NUMBER),
    ('gated', 'stage1.hidden', 0, NO_COUNT),
    ('linear', 'stage1.random_features', 0, NO_COUNT),
    ('pooling', 'stage1.window', 2, 'expected an odd number of 1 or more'),
    ('convolution+mlp', 'stage1.window', 2, 'expected an odd number of 1 or more'),
  ],
)
def test_options_of_the_other_stages_have_their_ranges_too(toy, model, option, value, expected):
  with pytest.raises(UserError, match=rf'^model\.{option} is {value}: {expected}'):
    make_plan(toy(f'model={model}', **{f'model.{option}': value}))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'data.mean': (0.5, 0.5), 'data.std': (0.2, 0.2)},
      r'data\.mean is \(0\.5, 0\.5\): .* for each channel, .* have 1;',
    ),
    ({'data.validation': 0.0001}, r'data\.validation is 0\.0001, less than one of the 1442 examples of train'),
  ],
)
def test_what_only_the_data_tell_is_checked_with_them(toy, changes, message):
  with pytest.raises(UserError, match=message):
    make_plan(toy(**changes))


def test_a_key_that_nobody_declared_is_refused(toy):
  config = toy()
  with config.unlocked():
    config.train.epoch = 3.0
  with pytest.raises(UserError, match=r"unknown config key 'train\.epoch': did you mean 'train\.epochs'"):
    make_plan(config)


@pytest.mark.parametrize('name', GOLDEN)
def test_every_key_of_every_shipped_config_declares_its_values_and_has_one_of_them(name):
  path, _, arguments = GOLDEN[name].partition(':')
  config = importlib.import_module(f'configs.{path.removesuffix(".py")}').get_config(arguments)
  known = keys(config.task) | stage_keys(config.model.name)
  assert flatten_dict(config.to_dict(), sep='.').keys() == known.keys()
  check(resolve(config))


@pytest.mark.parametrize('name', [*STAGE1, *STAGE2])
def test_every_option_of_every_stage_declares_its_values(name):
  for model in ([f'{name}+none'] if name in STAGE1 else []) + ([f'identity+{name}'] if name in STAGE2 else []):
    for options, values in zip(stage_options(model, 1), stage_values(model), strict=True):
      assert options.keys() == values.keys()


def test_every_key_has_a_meaning():
  assert all(key.meaning for task in (IMAGES, TEXTS) for key in (keys('classification') | task).values())
