"""Tests of configs of older runs, above all those in results/."""

import functools
import json
import math
import pathlib

import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from sampled import sampled

from configs import cifar10, shakespeare
from hbf.comparison.stored import PackedRuns
from hbf.config.resolve import resolve
from hbf.data.images.prepare import PREPARATIONS
from hbf.data.text.texts import Texts
from hbf.data.text.tokenizers import read_tokenizer
from hbf.errors import UserError
from hbf.models.build import build_model, count_parameters
from hbf.tasks.registry import make_task
from hbf.training import schema
from hbf.training.schema import Change, current, stamp
from hbf.training.workdir import differences, flatten, load_config, write_json

RESULTS = pathlib.Path(__file__).parents[2] / 'results'
WITHOUT_CODE = ('claim-stage1',)  # trials of options that gained nothing; the library never had them
COMPARISONS = {
  path.parent.name: PackedRuns(path.parent)
  for path in sorted(RESULTS.glob('*/runs.jsonl'))
  if path.parent.name not in WITHOUT_CODE
}
OF_TEXTS = ('next_token', 'masked_token')
TODAY = {'classification': cifar10.get_config} | dict.fromkeys(OF_TEXTS, shakespeare.get_config)
COUNTED = {}  # parameters of models of texts
OLD = {'name': 'vit', 'width': 8, 'stage1': {}, 'stage2': {'hidden': 4, 'activation': 'relu'}}


@functools.cache
def parameters(model, classes, image_shape):
  """Return the number of parameters. It is cached, because many runs have the same model."""
  return count_parameters(build_model(ConfigDict(json.loads(model)), classes), image_shape)


def of_images(data, config):
  model = config.model.to_json()
  if data is None:  # the first runs did not store what their data were
    known = PREPARATIONS[config.data.name].images
    return parameters(model, known.classes, known.image_shape)
  return parameters(model, len(data['classes']), tuple(data['image_shape']))


def of_texts(data, config):
  key = (config.task, config.model.to_json(), config.data.to_json(), json.dumps(data['tokenizer']))
  if key not in COUNTED:
    task = make_task(config, Texts(config.data.name, read_tokenizer(data['tokenizer']), {}))
    COUNTED[key] = count_parameters(task.make_model(config.model), task.shape)
  return COUNTED[key]


@functools.cache
def keys_of_today(task, model):
  return flatten(resolve(TODAY[task](f'model={model}')).to_dict()).keys()


def stored_configs(comparison):
  """Return the configs as the runs wrote them, by run."""
  lines = map(json.loads, (RESULTS / comparison / 'runs.jsonl').read_text().splitlines())
  return {line['run']: line['config'] for line in lines if 'config' in line}


def test_there_are_runs():
  assert sum(len(runs.names()) for runs in COMPARISONS.values()) > 250


@pytest.mark.parametrize('comparison', sampled(COMPARISONS, every=4))
def test_every_committed_run_is_the_model_that_it_was(comparison):
  """The translated config has exactly today's keys, and its model has as many parameters as the run had."""
  runs = COMPARISONS[comparison]
  for run, stored in stored_configs(comparison).items():
    config, gone = runs.config(run), 0
    assert flatten(config.to_dict()).keys() == keys_of_today(config.task, config.model.name), run
    if config.model.get('pool') == 'sequence' and stored.get('version', 0) < 11:
      gone = math.prod(schema.GONE['pool/bias'])
    if result := runs.result(run):
      found = (of_texts if config.task in OF_TEXTS else of_images)(runs.data(run), config)
      assert found + gone == result['params'], run


def test_what_a_run_was_before_there_was_a_choice_is_not_todays_default(tmp_path):
  """The first runs had the same learning rate for centers as for other parameters. Today's default factor is √D."""
  stored = stored_configs('rivals')['cifar10-hyperbf-0']
  del stored['optimizer']['centre_rate']
  write_json(tmp_path / 'config.json', stored)
  assert load_config(tmp_path).optimizer.center_rate == 1.0
  asked = COMPARISONS['rivals'].config('cifar10-hyperbf-0')
  assert differences(tmp_path, asked) == 'optimizer.center_rate is 1.0 there, 8.0 here'


@pytest.mark.parametrize(
  ('flip', 'crop', 'transforms'),
  [
    (True, 4, (('flip',), ('shift', 4))),
    (False, 1, (('shift', 1),)),
    (True, 0, (('flip',),)),
    (False, 0, ()),
  ],
)
def test_flip_and_crop_became_transforms(flip, crop, transforms):
  found = current({'version': 2, 'data': {'flip': flip, 'crop': crop}, 'model': {'name': 'vit'}})
  assert found['data']['transforms'] == transforms and not {'flip', 'crop'} & found['data'].keys()


def test_a_run_with_the_flip_and_crop_of_before_is_the_one_that_is_asked_for_today(tmp_path):
  config = json.loads(resolve(cifar10.get_config()).to_json())
  del config['data']['transforms'], config['data']['mix']
  config['data'].update(flip=True, crop=4)
  (tmp_path / 'config.json').write_text(json.dumps({'version': 2, **config}))
  assert differences(tmp_path, resolve(cifar10.get_config())) == ''


def test_signed_widths_became_a_kernel():
  stage2 = {'kernel': 'gaussian', 'widths': 'signed', 'metric': 'bilinear'}
  found = current({'version': 10, 'model': {'name': 'hyperbf', 'stage1': {}, 'stage2': stage2}})['model']['stage2']
  assert found['kernel'] == 'signed_gaussian' and found['sigma_per'] == 'center'


def test_balls_of_before_have_an_absolute_radius():
  stage2 = {'kernel': 'ball_gelu'}
  found = current({'version': 12, 'model': {'name': 'hyperbf', 'stage1': {}, 'stage2': stage2}})['model']['stage2']
  assert found == {'kernel': 'ball_gelu', 'radius': 'absolute', 'coefficients': 'constant'}


@pytest.mark.parametrize(
  ('before', 'after'),
  [('places+mlp', 'positional+mlp'), ('hyperbf', 'hyperbf'), ('softmax+hyperbf', 'softmax+hyperbf')],
)
def test_stage_places_became_positional(before, after):
  assert current({'version': 18, 'model': {'name': before}})['model'] == {'name': after}


@pytest.mark.parametrize(('before', 'after'), [(0, ()), (2, (2,))])
def test_tokens_can_be_merged_before_several_blocks(before, after):
  found = current({'version': 19, 'task': 'classification', 'model': {'name': 'vit', 'merge': before}})
  assert found['model']['merge'] == after


@pytest.mark.parametrize(('before', 'after'), [(1, 0), (4, 4)])
def test_a_batch_in_one_part_is_no_choice_of_the_user(before, after):
  found = current(
    {'version': 21, 'task': 'classification', 'model': {'name': 'vit'}, 'train': {'accumulate': before}}
  )
  assert found['train']['accumulate'] == after


def test_a_config_of_today_is_left_as_it_is():
  config = resolve(cifar10.get_config()).to_dict()
  assert current(stamp(config)) == config


def test_a_list_of_the_file_is_a_tuple_again():
  config = resolve(cifar10.get_config()).to_dict()
  config['data']['transforms'] = (('flip',), ('shift', 4))
  assert current(json.loads(json.dumps(stamp(config)))) == config


def test_changes_rename_remove_and_add_in_their_part_only():
  changes = (
    Change(
      added={'model': {'pool': 'cls'}, 'model.stage2:mlp': {'scale': 1.0}, 'model.stage2:hyperbf': {'other': 1}}
    ),
    Change(
      renamed={'model.stage2:mlp': {'hidden': 'units'}, 'model.stage1:hyperbf': {'width': 'sigma'}},
      removed={'model.stage2:mlp': {'nearest': 0}},
    ),
    Change(added={'model.stage2:mlp': {'units': 7}, 'new': {'key': 2}}),
  )
  stored = {'model': {**OLD, 'stage2': {**OLD['stage2'], 'nearest': 0}}}
  before = json.dumps(stored)
  found = flatten_dict(current(stored, changes), sep='.')
  assert json.dumps(stored) == before
  assert found['model.stage2.units'] == 4
  assert (found['model.pool'], found['model.stage2.scale'], found['new.key']) == ('cls', 1.0, 2)
  names = {key.split('.')[-1] for key in found}
  assert names == {'name', 'width', 'stage1', 'units', 'activation', 'pool', 'scale', 'key'} - {'stage1'}
  assert flatten_dict(current({'version': 2, 'model': OLD}, changes), sep='.')['model.stage2.hidden'] == 4


def test_an_option_that_is_gone_and_was_in_use_is_named(tmp_path):
  changes = (Change(removed={'model.stage2:mlp': {'nearest': 0}}),)
  with pytest.raises(UserError, match=r'model\.stage2\.nearest=16, an option that is gone'):
    current({'model': {**OLD, 'stage2': {'nearest': 16}}}, changes)
  stored = stored_configs('rivals')['cifar10-hyperbf-0']
  stored['model']['stage2']['nearest'] = 8
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  with pytest.raises(UserError, match=r'model\.stage2\.nearest=8, an option that is gone'):
    load_config(tmp_path)


def test_a_config_of_a_newer_version_is_refused(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps({'version': schema.VERSION + 1, 'model': OLD}))
  with pytest.raises(UserError, match=f'{tmp_path}/config.json: its config is of version {schema.VERSION + 1}'):
    load_config(tmp_path)
