"""Tests of joined comparisons: their folder is one comparison with the runs of all."""

import json

import pytest

from hbf.comparison.grid import Arm, Grid
from hbf.comparison.join import join, main
from hbf.comparison.pack import pack
from hbf.comparison.table import read_rows
from hbf.config.command_line import read_config
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.training.schema import stamp
from hbf.training.workdir import held, write_json

ARMS = {name: Arm('cifar10', name, (f'--config=cifar10:model={name}',)) for name in ('vit', 'hyperbf', 'gmlp')}
ARMS['memo-gmlp'] = Arm('cifar10', 'memo-gmlp', ('--config=cifar10:model=gmlp,recipe=memo',))


def comparison(folder, labels, seeds):
  """Write a comparison whose runs are finished. Return its folder."""
  grid = Grid(tuple(ARMS[label] for label in labels), seeds)
  folder.mkdir()
  grid.save(folder)
  for arm, seed in grid.runs():
    run = folder / arm.run_name(seed)
    (run / 'checkpoints').mkdir(parents=True)
    (run / 'checkpoints' / 'state').write_text(f'{folder.name} {run.name}')
    write_json(run / 'config.json', stamp(json.loads(arm.config(seed).to_json())))
    about = {'recipe': 'small', 'epochs': 2.0, 'device': 'a cpu', 'params': 1000, 'flops_per_image': 1e6}
    write_json(run / 'result.json', about | {'accuracy': 50.0 + seed})
  return folder


def test_a_joined_folder_is_one_comparison(tmp_path, capsys):
  here = comparison(tmp_path / 'here', ['vit', 'hyperbf'], (0, 1))
  there = comparison(tmp_path / 'there', ['gmlp', 'vit'], (2,))
  assert main([str(here), str(there), str(tmp_path / 'both')]) == 0
  assert 'both has 6 runs: cifar10-hyperbf-0, ' in capsys.readouterr().out
  grid = Grid.load(tmp_path / 'both')
  assert grid == Grid((ARMS['vit'], ARMS['hyperbf'], ARMS['gmlp']), (0, 1, 2))
  rows = read_rows(grid, tmp_path / 'both')
  scores = {row.label: sorted(seed for seed in row.results) for row in rows}
  assert scores == {'vit': [0, 1, 2], 'hyperbf': [0, 1], 'gmlp': [2]}
  assert (tmp_path / 'both/cifar10-vit-2/checkpoints/state').read_text() == 'there cifar10-vit-2'
  assert (here / 'cifar10-vit-0/result.json').exists()


def test_packed_runs_join_without_checkpoints_and_without_runs_that_have_no_result(tmp_path, capsys):
  here = comparison(tmp_path / 'here', ['vit'], (0, 1))
  (here / 'cifar10-vit-0' / 'printed.log').write_text('printed')
  (here / 'cifar10-vit-1' / 'result.json').unlink()
  pack(here, tmp_path / 'packed')
  there = comparison(tmp_path / 'there', ['vit'], (1,))
  assert main([str(tmp_path / 'packed'), str(there), str(tmp_path / 'both')]) == 0
  assert capsys.readouterr().err == 'left out, because without a result: cifar10-vit-1\n'
  assert sorted(path.name for path in (tmp_path / 'both').iterdir()) == [
    'cifar10-vit-0',
    'cifar10-vit-1',
    'grid.json',
  ]
  assert sorted(read_rows(Grid.load(tmp_path / 'both'), tmp_path / 'both')[0].results) == [0, 1]
  assert (tmp_path / 'both/cifar10-vit-0/printed.log').read_text() == 'printed'
  assert not (tmp_path / 'both/cifar10-vit-0/checkpoints').exists()
  assert (tmp_path / 'both/cifar10-vit-1/checkpoints').exists()


def test_what_the_runs_printed_is_joined(tmp_path):
  """A run without a result has no other place for the reason."""
  here, there = comparison(tmp_path / 'here', ['vit'], (0,)), comparison(tmp_path / 'there', ['gmlp'], (0,))
  (there / 'cifar10-gmlp-0' / 'result.json').unlink()
  (there / 'logs').mkdir()
  (there / 'logs' / 'cifar10-gmlp-0.log').write_text('error: training diverged\n')
  pack(there, tmp_path / 'packed')
  for number, second in enumerate((there, tmp_path / 'packed')):
    join([here, second], tmp_path / str(number))
    rows = read_rows(Grid.load(tmp_path / str(number)), tmp_path / str(number))
    assert rows[1].failed == {0: 'error: training diverged'}


def test_comparisons_on_other_data_are_not_joined(tmp_path):
  here, there = comparison(tmp_path / 'here', ['vit'], (0,)), comparison(tmp_path / 'there', ['gmlp'], (1,))
  for run, fingerprint in ((here / 'cifar10-vit-0', 'a'), (there / 'cifar10-gmlp-1', 'b')):
    write_json(run / 'data.json', {'name': 'cifar10', 'fingerprint': fingerprint})
  with pytest.raises(UserError, match=r'here/cifar10-vit-0 has other data than .*there/cifar10-gmlp-1 \(as many'):
    join([here, there], tmp_path / 'both')
  write_json(there / 'cifar10-gmlp-1' / 'data.json', {'name': 'cifar10', 'fingerprint': 'a'})
  join([here, there], tmp_path / 'both')


def test_comparisons_with_other_recipes_are_not_joined(tmp_path):
  here, there = comparison(tmp_path / 'here', ['vit'], (0,)), comparison(tmp_path / 'there', ['memo-gmlp'], (1,))
  with pytest.raises(UserError, match=r'arms of cifar10:model=vit, and .*recipe=memo differs .*: join comparisons'):
    join([here, there], tmp_path / 'both')
  assert not (tmp_path / 'both').exists()


def test_what_cannot_be_joined_is_refused_and_leaves_nothing(tmp_path):
  here, target = comparison(tmp_path / 'here', ['vit'], (0, 1)), tmp_path / 'both'
  there = comparison(tmp_path / 'there', ['vit'], (1,))
  with pytest.raises(UserError, match=r'here and .*there both have the run cifar10-vit-1: remove one'):
    join([here, there], target)
  other = comparison(tmp_path / 'other', ['vit'], (2,))
  with held(other / 'cifar10-vit-2'), pytest.raises(UserError, match='cifar10-vit-2 is in use by another process'):
    join([here, other], target)
  wider = read_config([*ARMS['vit'].arguments, '--config.model.width=96', '--config.seed=2'])
  write_json(other / 'cifar10-vit-2' / 'config.json', stamp(json.loads(resolve(wider).to_json())))
  with pytest.raises(UserError, match=r'vit-2 holds a run of another config .*width is 96.*: join comparisons whose'):
    join([here, other], target)
  (tmp_path / 'none').mkdir()
  with pytest.raises(UserError, match='none is not a comparison'):
    join([here, tmp_path / 'none'], target)
  with pytest.raises(UserError, match='there exists: choose another folder'):
    join([here], there)
  pack(comparison(tmp_path / 'more', ['vit'], (0, 3)), packed := tmp_path / 'packed')
  with pytest.raises(UserError, match=r'here and .*packed both have the run cifar10-vit-0: remove one'):
    join([here, packed], target)
  pack(other, tmp_path / 'wide')
  with pytest.raises(UserError, match=r'wide/cifar10-vit-2 holds a run of another config'):
    join([here, tmp_path / 'wide'], target)
  assert not list(tmp_path.glob('both*'))
