"""Grids: what they ask train.py for, and what they refuse before anything runs."""

import json

import pytest

from configs.comparisons import PRESETS
from hbf.comparison.grid import Grid, check_runs, make_grid, parse_seeds
from hbf.comparison.runs import Device, parse_devices
from hbf.errors import UserError
from hbf.training.experiment import make_plan
from hbf.training.workdir import claim


@pytest.fixture
def grid_of(digits_dir):
  def make(*arms, seeds=(0, 1), match=True, config='configs/digits.py:recipe=small', overrides=(), published=None):
    overrides = (f'--config.data.dir={digits_dir}', *overrides)
    return make_grid([config], arms, overrides, seeds, match, published or {})

  return make


def test_an_arm_is_a_train_command(grid_of):
  grid = grid_of(
    'vit', 'wide-gelu: vit model.stage2.activation=gelu model.dropout=0.1', overrides=['--config.seed=7']
  )
  arm = grid.arms[1]
  assert (arm.group, arm.label, arm.run(3)) == ('digits', 'wide-gelu', 'digits-wide-gelu-3')
  config = arm.config(3)
  assert (config.seed, config.model.name, config.model.dropout) == (3, 'vit', 0.1)
  assert config.model.stage2.activation == 'gelu'


def test_arms_have_the_parameters_of_the_first(grid_of):
  arms = ('hyperbf', 'vit', 'full: hyperbf model.stage2.metric=full', 'heads: hyperbf model.stage2.heads=4')
  matched, given = grid_of(*arms), grid_of(*arms, match=False)
  first, *others = [make_plan(arm.config(0)).parameters for arm in matched.arms]
  assert all(abs(other - first) <= 0.01 * first for other in others)
  assert matched.arms[1] == given.arms[1]  # close enough as it is
  unmatched = [make_plan(arm.config(0)).parameters for arm in given.arms]
  assert max(unmatched) > 1.01 * first


def test_a_grid_comes_back_as_it_was(grid_of, tmp_path):
  grid = grid_of('vit', 'hyperbf', published={'digits/hyperbf': 97.5})
  grid.save(tmp_path)
  assert Grid.load(tmp_path) == grid
  assert [arm.published for arm in grid.arms] == [None, 97.5]


def test_the_memos_table_is_six_arms_with_its_figures(monkeypatch):
  preset = PRESETS['memo']
  labels = {f'{config.split("/")[1].split(".")[0]}/{arm}' for config in preset.configs for arm in preset.arms}
  assert labels == set(preset.published)
  assert len(preset.seeds) >= 3


@pytest.mark.parametrize(
  ('arms', 'message'),
  [
    (['vit', 'vit'], "arm 'vit' is given twice"),
    (['vti'], "unknown model 'vti': did you mean 'vit'"),
    (['a: vit model.stage2.hiden=3'], "unknown config key 'hiden': did you mean 'hidden'"),
    (['a: vit gelu'], "'gelu' is not key=value"),
    (['a b: vit'], 'needs a label of letters'),
    (['../up: vit'], 'needs a label of letters'),
    (['vit', 'a: vit model.heads=5'], 'heads'),
    (['vit', 'a: vit optimizer.name=adam'], "unknown optimizer.name 'adam': did you mean 'adamw'"),
    (['vit', 'a: vit train.epochs=0.0'], 'train.epochs must be more than 0'),
    ([], 'needs a config, an arm and a seed'),
  ],
)
def test_wrong_arms_are_refused(grid_of, arms, message):
  with pytest.raises(UserError, match=message):
    grid_of(*arms)


def test_wrong_configs_are_refused(grid_of):
  with pytest.raises(UserError, match='names a model: arms do that'):
    grid_of('vit', config='configs/digits.py:model=vit')
  with pytest.raises(UserError, match=r'configs/nothing\.py'):
    grid_of('vit', config='configs/nothing.py')
  with pytest.raises(UserError, match='two configs are called digits'):
    make_grid(['configs/digits.py', 'configs/digits.py:recipe=memo'], ['vit'], [], [0], True, {})


def test_data_that_are_not_there_are_named_with_the_command_that_gets_them(tmp_path):
  preset = PRESETS['memo']
  with pytest.raises(UserError, match=f'python -m hbf.data.prepare cifar10 --dir {tmp_path}'):
    make_grid(preset.configs, preset.arms, [f'--config.data.dir={tmp_path}'], preset.seeds, True, preset.published)


def test_runs_of_another_config_are_refused_and_those_of_the_same_are_not(grid_of, tmp_path):
  grid = grid_of('vit', 'hyperbf')
  grid.save(tmp_path)
  config = grid.arms[1].config(1)
  config.data.update(mean=(0.3,), std=(0.4,))  # as measured by a run
  (tmp_path / 'digits-hyperbf-1').mkdir()
  claim(tmp_path / 'digits-hyperbf-1', config)
  check_runs(grid, tmp_path)
  check_runs(grid_of('vit', 'hyperbf', seeds=(0, 1, 2)), tmp_path)
  other = grid_of('vit', 'hyperbf', overrides=['--config.optimizer.learning_rate=0.5'])
  before = sorted(path.name for path in tmp_path.rglob('*'))
  with pytest.raises(
    UserError, match=r'digits-hyperbf-1 holds a run of another config \(optimizer\.learning_rate is'
  ):
    check_runs(other, tmp_path)
  assert sorted(path.name for path in tmp_path.rglob('*')) == before


def test_a_folder_that_is_no_comparison_is_left_alone(grid_of, tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  with pytest.raises(UserError, match='is not a comparison'):
    check_runs(grid_of('vit'), tmp_path)
  with pytest.raises(UserError, match=r'no grid\.json'):
    Grid.load(tmp_path)


def test_seeds_and_devices_are_lists():
  assert parse_seeds('0,12') == (0, 12)
  assert parse_seeds('') == ()
  assert parse_devices('') == (Device(),)
  assert parse_devices('gpu:0,gpu:3') == (Device('gpu', 0), Device('gpu', 3))
  assert Device('gpu', 3).environment()['CUDA_VISIBLE_DEVICES'] == '3'
  for text in ('0, 1', 'a', '-1', '1,'):
    with pytest.raises(UserError, match='not a list of numbers'):
      parse_seeds(text)
  for text, message in (('gpu', 'not like gpu:0'), ('gpu:0,gpu:0', 'twice'), ('cpu:4711', 'not a core')):
    with pytest.raises(UserError, match=message):
      parse_devices(text)


def test_the_saved_grid_is_plain_json(grid_of, tmp_path):
  grid_of('vit').save(tmp_path)
  stored = json.loads((tmp_path / 'grid.json').read_text())
  assert stored['seeds'] == [0, 1]
  assert stored['arms'][0]['arguments'][0] == '--config=configs/digits.py:model=vit,recipe=small'


def test_configs_are_found_from_any_folder(grid_of, tmp_path, monkeypatch):
  here = grid_of('vit')
  monkeypatch.chdir(tmp_path)
  assert grid_of('vit') == here
  (tmp_path / 'configs').mkdir()
  (tmp_path / 'configs' / 'digits.py').write_text('raise ValueError("the one of this folder")')
  with pytest.raises(UserError, match='the one of this folder'):
    grid_of('vit')
