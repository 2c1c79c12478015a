"""Tests of grids: the commands that they run, and the requests that they refuse."""

import dataclasses
import json
import pathlib

import pytest

from hbf.comparison import devices
from hbf.comparison.compare import compare
from hbf.comparison.devices import ALLOTMENTS, RESERVE, Device, parse_devices
from hbf.comparison.grid import (
  Arm,
  Comparison,
  Grid,
  arms_with_other_units,
  arms_with_own_epochs,
  make_grid,
  parse_seeds,
  published_for,
  with_arms,
)
from hbf.comparison.presets import PRESETS
from hbf.comparison.stored import check_runs
from hbf.errors import UserError
from hbf.models.build import flops_per_example
from hbf.training.experiment import make_plan, training_operations
from hbf.training.schema import stamp
from hbf.training.workdir import write_json

ROOT = pathlib.Path(__file__).parents[2]
CONFIG, NOTHING = 'configs/digits.py:recipe=small', Grid()


@pytest.fixture
def grid_of(digits_dir):
  def make(
    *arms,
    seeds=(0, 1),
    match=True,
    config='configs/digits.py:recipe=small',
    overrides=(),
    published=None,
    before=NOTHING,
  ):
    overrides = (f'--config.data.dir={digits_dir}', *overrides)
    return make_grid(Comparison((config,), arms, seeds, overrides, published or {}, match), before)

  return make


@pytest.fixture
def asked_of(digits_dir):
  """Return a function that makes comparisons of one config and one seed."""
  return lambda *arms, **changes: Comparison((CONFIG,), arms, (0,), (f'--config.data.dir={digits_dir}',), **changes)


def test_an_arm_is_a_train_command(grid_of):
  grid = grid_of('vit', 'wide-gelu: vit model.stage2.activation=gelu model.dropout=0.1')
  arm = grid.arms[1]
  assert (arm.group, arm.label, arm.run_name(3)) == ('digits', 'wide-gelu', 'digits-wide-gelu-3')
  config = arm.config(3)
  assert (config.seed, config.model.name, config.model.dropout) == (3, 'vit', 0.1)
  assert config.model.stage2.activation == 'gelu'


def test_what_follows_from_the_width_follows_an_arms_own(grid_of):
  arms = ('hyperbf', 'wide: hyperbf model.width=256')
  narrow, wide = (arm.config(0) for arm in grid_of(*arms, match=False).arms)
  assert (narrow.optimizer.center_rate, wide.optimizer.center_rate) == (8.0, 16.0)
  assert (narrow.model.stage2.centers, wide.model.stage2.centers) == (256, 1024)


def test_arms_have_the_parameters_of_the_first(grid_of):
  arms = ('hyperbf', 'vit', 'full: hyperbf model.stage2.metric=full', 'heads: hyperbf model.stage2.heads=4')
  matched, given = grid_of(*arms), grid_of(*arms, match=False)
  first, *others = [make_plan(arm.config(0)).parameters for arm in matched.arms]
  assert all(abs(other - first) <= 0.01 * first for other in others)
  assert matched.arms[1] == given.arms[1]  # close enough as it is
  unmatched = [make_plan(arm.config(0)).parameters for arm in given.arms]
  assert max(unmatched) > 1.01 * first


def operations(arm):
  """Return the number of training operations of an arm."""
  plan = make_plan(arm.config(0))
  return training_operations(flops_per_example(plan.model, plan.task.shape), plan.clock)


def test_arms_have_the_operations_of_the_first_in_whole_steps(asked_of):
  arms = ('vit', 'gated', 'half: vit train.batch_size=32', 'own: vit train.epochs=3.0')
  first, gated, half, own = make_grid(asked_of(*arms, operations='match')).arms
  plain = make_grid(asked_of(*arms)).arms
  assert (first, own) == (plain[0], plain[3])
  assert operations(plain[1]) > 1.03 * operations(first)  # or this would test nothing
  assert all(abs(operations(arm) / operations(first) - 1) < 0.005 for arm in (gated, half))
  assert make_grid(with_arms(asked_of(*arms, operations='match'), ['gated'])).arms == (gated,)
  assert arms_with_own_epochs(asked_of(*arms, operations='match')) == ['own']


def test_a_budget_in_operations_sets_the_epochs_of_every_arm(asked_of):
  arms = make_grid(asked_of('vit', 'gated', operations='2e12')).arms
  assert all(abs(operations(arm) / 2e12 - 1) < 0.005 for arm in arms)


def test_a_first_arm_above_the_limit_gets_fewer_units_and_so_do_the_others(asked_of):
  limit = make_plan(make_grid(asked_of('vit')).arms[0].config(0)).parameters * 0.9
  arms = make_grid(asked_of('vit', 'hyperbf', parameters=round(limit))).arms
  assert all(abs(make_plan(arm.config(0)).parameters / limit - 1) < 0.01 for arm in arms)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'operations': '1e8'}, r'digits vit: 1e\+08 training operations are no whole number of steps.*a step takes'),
    ({'operations': 'much'}, "operations is 'much': expected 'match' or a number"),
    ({'operations': '1e400'}, "operations is '1e400': expected 'match' or a number"),
    ({'parameters': 1000}, r'vit can not have 1,000 parameters to within 1%: it has [\d,]+ with stage2.hidden=1;'),
    (
      {'parameters': 1000, 'match': False},
      r'digits vit has [\d,]+ parameters, and the comparison allows 1,000: choose a smaller width or depth',
    ),
  ],
)
def test_a_budget_that_no_size_meets_names_both_sides(asked_of, changes, message):
  with pytest.raises(UserError, match=message):
    make_grid(asked_of('vit', **changes))


def test_a_grid_comes_back_as_it_was(grid_of, tmp_path):
  grid = grid_of('vit', 'hyperbf', published={'digits/hyperbf': 97.5})
  grid.save(tmp_path)
  assert Grid.load(tmp_path) == Grid.stored(tmp_path) == grid
  assert [arm.published for arm in grid.arms] == [None, 97.5]


def test_the_memos_table_is_six_arms_with_its_figures(monkeypatch):
  preset = PRESETS['memo']
  labels = {f'{config.split("/")[1].split(".")[0]}/{arm}' for config in preset.configs for arm in preset.arms}
  assert labels == set(preset.published)
  assert len(preset.seeds) >= 3


@pytest.mark.parametrize(
  ('changes', 'left'),
  [
    ({}, {'digits/vit', 'digits/hyperbf'}),
    ({'configs': ('digits:recipe=small',), 'seeds': (7,)}, {'digits/vit', 'digits/hyperbf'}),
    ({'overrides': ('--config.data.dir=x',)}, {'digits/vit', 'digits/hyperbf'}),
    ({'arms': ('vit', 'hyperbf: hyperbf model.depth=2')}, {'digits/vit'}),
    ({'configs': ('digits:recipe=laptop',)}, set()),
    ({'overrides': ('--config.train.epochs=1.0',)}, set()),
    ({'match': False}, set()),
  ],
)
def test_published_scores_stand_beside_the_runs_of_the_preset_only(changes, left):
  preset = Comparison((CONFIG,), ('vit', 'hyperbf'), published={'digits/vit': 90.0, 'digits/hyperbf': 97.5})
  assert published_for(preset, dataclasses.replace(preset, **changes)).keys() == left


def test_a_folder_has_one_config_of_a_name(grid_of):
  """Otherwise arms of two recipes would stand in one table, each with its difference from the first."""
  before = grid_of('vit')
  with pytest.raises(UserError, match=r'has arms of configs/digits\.py:model=vit,recipe=small, and --config=digits:'):
    grid_of('gmlp', config='digits:recipe=laptop', before=before)
  assert before.union(grid_of('gmlp', config='digits:recipe=small', before=before)).seeds == before.seeds


def test_units_that_matching_replaces_are_known(asked_of):
  asked = asked_of('vit', 'own: vit model.stage2.hidden=7', 'same: vit model.stage2.hidden=256')
  assert arms_with_other_units(asked, make_grid(asked)) == {asked.arms[1]: 'model.stage2.hidden=7 becomes 256'}


@pytest.mark.parametrize(
  ('arms', 'message'),
  [
    (['vit', 'vit'], "arm 'vit' is given twice"),
    (['vti'], "unknown model 'vti': did you mean 'vit'"),
    (['a: vit model.stage2.hiden=3'], "unknown config key 'hiden': did you mean 'hidden'"),
    (['a: vit gelu'], "'gelu' is not key=value"),
    (['vit', 'a: vit seed=3'], 'arm a has --config.seed=3, but the seeds of the runs come from --seeds: leave'),
    (['a b: vit'], 'needs a label of letters'),
    (['wide:'], "arm 'wide:' names no model"),
    (['../up: vit'], 'needs a label of letters'),
    (['vit', 'a: vit model.heads=5'], 'heads'),
    (['vit', 'a: vit optimizer.name=adam'], "unknown optimizer.name 'adam': did you mean 'adamw'"),
    (['vit', 'a: vit train.epochs=0.0'], 'train.epochs is 0.0: expected a number above 0'),
    ([], 'needs at least one config, one arm and one seed'),
  ],
)
def test_wrong_arms_are_refused(grid_of, arms, message):
  with pytest.raises(UserError, match=message):
    grid_of(*arms)


@pytest.mark.parametrize('flag', ['--config.seed=7', '-config.seed=7'])
def test_a_seed_for_all_arms_is_refused_because_each_run_has_its_own(grid_of, flag):
  with pytest.raises(UserError, match=f'arm vit has {flag}, but the seeds of the runs come from --seeds'):
    grid_of('vit', overrides=[flag])


def test_wrong_configs_are_refused(grid_of):
  with pytest.raises(UserError, match='names a model: give models with'):
    grid_of('vit', config='configs/digits.py:model=vit')
  with pytest.raises(UserError, match=r'configs/nothing\.py'):
    grid_of('vit', config='configs/nothing.py')
  with pytest.raises(UserError, match='two configs are called digits'):
    make_grid(Comparison(('configs/digits.py', 'configs/digits.py:recipe=memo'), ('vit',)))


def test_two_arms_may_not_share_the_folder_of_a_run(grid_of):
  before = Grid((Arm('digits-a', 'vit', ()),))
  with pytest.raises(UserError, match='two arms would have the run digits-a-vit-0: rename a config or an arm'):
    grid_of('a-vit: vit', before=before)
  assert grid_of('vit', before=Grid((Arm('digits', 'vit', ()),))).arms  # the same arm again


def test_data_that_are_not_there_are_named_with_the_command_that_gets_them(tmp_path):
  preset = PRESETS['memo']
  with pytest.raises(UserError, match=f'python -m hbf prepare cifar10 --dir {tmp_path}'):
    make_grid(dataclasses.replace(preset, overrides=(f'--config.data.dir={tmp_path}',)))


def test_runs_of_another_config_are_refused_and_those_of_the_same_are_not(grid_of, tmp_path):
  grid = grid_of('vit', 'hyperbf')
  grid.save(tmp_path)
  config = grid.arms[1].config(1)
  config.data.update(mean=(0.3,), std=(0.4,))  # as measured by a run
  (tmp_path / 'digits-hyperbf-1').mkdir()
  write_json(tmp_path / 'digits-hyperbf-1' / 'config.json', stamp(json.loads(config.to_json())))
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
    Grid.stored(tmp_path)
  with pytest.raises(UserError, match=r'no grid\.json'):
    Grid.load(tmp_path)


def test_a_call_that_was_killed_at_its_start_leaves_an_empty_comparison(tmp_path):
  (tmp_path / '.lock').touch()
  assert Grid.stored(tmp_path) == NOTHING


def test_seeds_and_devices_are_lists():
  assert parse_seeds('0,12') == (0, 12)
  assert parse_seeds('') == ()
  with pytest.raises(UserError, match='has the seed 4294967296: expected numbers from 0 to 4294967295'):
    parse_seeds('0,4294967296')
  assert parse_devices('') == (Device(),)
  assert parse_devices('gpu:0,gpu:3') == (Device('gpu', 0), Device('gpu', 3))
  for text in ('0, 1', 'a', '-1', '1,'):
    with pytest.raises(UserError, match='not a list of numbers'):
      parse_seeds(text)
  for text, message in (('gpu', 'not like gpu:0'), ('cpu:0,cpu:0', 'core twice'), ('cpu:4711', 'not a core')):
    with pytest.raises(UserError, match=message):
      parse_devices(text)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
  """Return a function that sets the number of GPUs that JAX finds, and the error. They are four at first."""

  def set_count(*found):
    monkeypatch.setattr(devices, 'count_gpus', lambda: found)

  set_count(4, '')
  return set_count


def test_a_gpu_that_jax_does_not_find_is_refused(gpus):
  gpus(1, '')
  with pytest.raises(UserError, match=r'^gpu:1 is not there: JAX finds only gpu:0\. Give other --devices'):
    parse_devices('gpu:0,gpu:1')
  gpus(0, 'RuntimeError: no CUDA')
  with pytest.raises(UserError, match=r'^gpu:0 is not there: JAX finds no GPU \(RuntimeError: no CUDA\)\. Give'):
    parse_devices('gpu:0')


def test_a_machine_that_lets_jax_use_the_cpu_only_has_no_gpu(monkeypatch):
  monkeypatch.undo()
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  count, error = devices.count_gpus()
  assert count == 0 and 'gpu' in error


@pytest.fixture
def allot(monkeypatch):
  """Return a function that sets environment variables for the allotted GPUs. All others of them are unset."""
  for name in ALLOTMENTS:
    monkeypatch.delenv(name, raising=False)
  return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


@pytest.mark.parametrize('name', ALLOTMENTS)
@pytest.mark.parametrize('allotted', ['4,5', 'GPU-8e3b, GPU-77c1', 'MIG-1/2/0,MIG-1/3/0'])
def test_gpus_are_counted_among_those_that_are_allotted(allot, name, allotted):
  allot(**{name: allotted})
  both = parse_devices('gpu:0,gpu:1')
  assert [device.environment() for device in both] == [{name: entry.strip()} for entry in allotted.split(',')]
  with pytest.raises(UserError, match=f'gpu:2 is not there: {name}={allotted} allots 2 GPUs'):
    parse_devices('gpu:2')


def test_where_nothing_is_allotted_gpus_are_counted_as_they_are(allot):
  assert Device('gpu', 3).environment() == {'CUDA_VISIBLE_DEVICES': '3'}


def test_several_runs_share_a_gpu_that_is_given_several_times(allot, monkeypatch):
  monkeypatch.delenv(RESERVE, raising=False)
  *both, alone = [device.environment() for device in parse_devices('gpu:0,gpu:0,gpu:1')]
  assert both == [{'CUDA_VISIBLE_DEVICES': '0', RESERVE: 'false'}] * 2 and alone == {'CUDA_VISIBLE_DEVICES': '1'}
  allot(**{RESERVE: 'true'})
  assert parse_devices('gpu:0,gpu:0')[0].environment() == {'CUDA_VISIBLE_DEVICES': '0'}


def test_an_allotment_of_no_gpu_has_none(allot):
  allot(CUDA_VISIBLE_DEVICES='')
  with pytest.raises(UserError, match='allots 0 GPUs'):
    parse_devices('gpu:0')


def test_later_arms_and_seeds_join_those_that_are_there(grid_of):
  before = grid_of('vit', 'wide: vit model.width=72', seeds=(0, 2))
  later = grid_of('hyperbf', 'wide: vit model.width=80', seeds=(1,), before=before)
  union = before.union(later)
  assert [arm.label for arm in union.arms] == ['vit', 'wide', 'hyperbf']
  assert union.seeds == (0, 1, 2)
  assert union.arms == (before.arms[0], later.arms[1], later.arms[0])
  assert NOTHING.union(before) == before == before.union(grid_of('vit', seeds=(2,), before=before))


def test_an_arm_asked_for_again_keeps_what_others_report_of_it(grid_of):
  before = grid_of('vit', 'hyperbf', published={'digits/hyperbf': 97.5})
  again = grid_of('hyperbf', seeds=(3,), before=before)
  assert [arm.published for arm in before.union(again).arms] == [None, 97.5]


def test_an_arm_that_joins_has_the_parameters_of_the_first_that_is_there(grid_of):
  arms = ('vit', 'full: hyperbf model.stage2.metric=full', 'gmlp')
  before = grid_of(*arms)
  for asked in (arms[1:], arms[2:], (arms[2], arms[0])):
    later = grid_of(*asked, before=before)
    assert before.union(later) == before


def test_one_arm_of_a_preset_has_the_parameters_that_it_has_beside_the_others(digits_dir):
  arms = ('vit', 'wide: vit model.stage2.activation=swiglu', 'gmlp')
  preset = Comparison((CONFIG,), arms, (0,), (f'--config.data.dir={digits_dir}',))
  whole = make_grid(preset).arms
  assert make_grid(with_arms(preset, ['gmlp'])).arms == whole[2:]
  assert make_grid(with_arms(preset, ['wide', 'other: gmlp'])).arms[0] == whole[1]
  assert with_arms(dataclasses.replace(preset, like='mixer'), ['gmlp']).like == 'mixer'
  alone = make_grid(Comparison(preset.configs, ('gmlp',), (0,), preset.overrides)).arms
  assert alone != whole[2:]  # or this would test nothing
  assert make_grid(with_arms(preset, ['gmlp']), Grid(whole[2:], (0,))).arms == whole[2:]  # the same command again
  assert with_arms(preset, []) == dataclasses.replace(preset, like='vit')
  assert make_grid(with_arms(preset, []), Grid(whole[2:], (0,))).arms == whole  # the folder had one arm before


def test_an_arm_asked_for_anew_may_not_differ_from_its_runs_of_other_seeds(grid_of, tmp_path):
  before = grid_of('vit', seeds=(0,))
  (tmp_path / 'digits-vit-0').mkdir()
  write_json(tmp_path / 'digits-vit-0' / 'config.json', stamp(json.loads(before.arms[0].config(0).to_json())))
  before.save(tmp_path)
  asked = Comparison((CONFIG,), ('vit',), (1,), (*before.arms[0].arguments[1:], '--config.train.epochs=7.0'))
  with pytest.raises(UserError, match=r'digits-vit-0 holds a run of another config \(train\.epochs is'):
    compare(asked, tmp_path, [Device()])
  assert Grid.load(tmp_path) == before


def test_the_grids_of_committed_comparisons_are_read():
  found = [Grid.load(path.parent) for path in (ROOT / 'results').glob('*/grid.json')]
  assert found
  assert all(grid.arms and grid.seeds for grid in found)


def test_the_rates_are_those_of_every_arm_alike():
  arms = [label.partition(':')[0] for label in PRESETS['rates'].arms]
  of_small = [label.partition(':')[0] for label in PRESETS['small'].arms]
  assert sorted(arms) == sorted(f'{arm}-{rate}' for arm in of_small for rate in ('2e-3', '4e-3', '8e-3'))


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


def test_epochs_are_refused_beside_a_number_of_operations():
  request = Comparison((CONFIG,), ('vit',), (0,), ('--config.train.epochs=1.0',), operations='1e10')
  with pytest.raises(
    UserError, match=r'1e10 training operations, and --config\.train\.epochs=1\.0 sets another length'
  ):
    make_grid(request)
  for operations in ('', 'match'):
    assert make_grid(dataclasses.replace(request, operations=operations)).arms[0].config(0).train.epochs == 1
