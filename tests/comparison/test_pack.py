"""Tests of packed comparisons: nothing is lost, and they are read like run folders."""

import dataclasses
import json

import numpy as np
import pytest

from configs import cifar10
from hbf.comparison import tune
from hbf.comparison.compare import compare
from hbf.comparison.devices import Device
from hbf.comparison.grid import Arm, Comparison, Grid
from hbf.comparison.held_out import held_out_table
from hbf.comparison.pack import main, pack, unpack
from hbf.comparison.stored import PackedRuns, RunFolders, open_runs
from hbf.comparison.table import as_json, markdown, read_rows
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.training.schema import stamp
from hbf.training.workdir import held, read_predictions, write_json, write_predictions

GRID = Grid(tuple(Arm('cifar10', label, ()) for label in ('vit', 'a.b+c', 'bad')), (0, 1))
FINISHED = [arm.run_name(seed) for arm, seed in GRID.runs() if arm.label != 'bad']
CONFIG = stamp(json.loads(resolve(cifar10.get_config()).to_json()))
LABELS = np.arange(300, dtype=np.int32) % 10


def write_run(run, seed):
  """Write the files that a finished run leaves."""
  run.mkdir()
  write_json(run / 'config.json', CONFIG | {'seed': seed})
  write_json(run / 'data.json', {'name': 'cifar10', 'classes': ['a', 'b'], 'fingerprint': 'f'})
  lines = [
    {'step': 1, 'epoch': 0.1234, 'split': 'train', 'loss': float('nan'), 'accuracy': 1 / 3, 'sigmas': {'x': [1.5]}},
    {'step': 1, 'epoch': 0.1234, 'split': 'validation', 'accuracy': 50.0 + seed, 'top5': 9, 'nll': 0.1, 'ece': 1e-9},
  ]
  (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  predictions = np.where(np.random.default_rng(len(run.name) + seed).random(300) < 0.6, LABELS, 9 - LABELS)
  write_predictions(run, {'labels': LABELS, 'predictions': predictions, 'nll': predictions / np.float32(7)})
  about = {'recipe': 'small', 'epochs': 2.0, 'device': 'a cpu', 'params': 1000, 'flops_per_image': 1e6}
  write_json(run / 'result.json', about | {'accuracy': 100 * float((predictions == LABELS).mean())})


@pytest.fixture
def folder(tmp_path):
  """Return the folder of a comparison of two arms with two seeds. One run has failed, and another has not started."""
  folder = tmp_path / 'runs'
  (folder / 'logs').mkdir(parents=True)
  GRID.save(folder)
  for run in FINISHED:
    write_run(folder / run, int(run[-1]))
  (folder / 'cifar10-vit-1' / 'nested.json').write_text('{"rows": [1]}\n')
  (folder / 'cifar10-vit-1' / 'checkpoints').mkdir()
  (folder / 'logs' / 'cifar10-bad-0.log').write_text('error: training diverged\n')
  for name in ('.lock', 'comparison.md', 'curves.png', 'grid.json.tmp'):
    (folder / name).write_text(name)
  return folder


@pytest.fixture
def packed(folder, tmp_path):
  pack(folder, tmp_path / 'packed')
  return tmp_path / 'packed'


def rewritten(packed, change):
  """Rewrite the lines of the packed runs, changed by a function."""
  path = packed / 'runs.jsonl'
  path.write_text('\n'.join(change(path.read_text().splitlines())))
  return PackedRuns(packed)


def test_an_unpacked_run_without_a_result_keeps_the_reason(packed, tmp_path):
  unpack(packed, tmp_path / 'again')
  before, after = open_runs(packed), open_runs(tmp_path / 'again')
  names = [arm.run_name(seed) for arm, seed in GRID.runs()]
  assert [after.failure(name) for name in names] == [before.failure(name) for name in names]
  assert after.failure('cifar10-bad-0') == 'error: training diverged'


def test_a_folder_beside_the_target_is_left_alone(folder, tmp_path):
  (tmp_path / 'packed.tmp').mkdir()
  pack(folder, tmp_path / 'packed')
  assert (tmp_path / 'packed.tmp').exists()


def test_nothing_is_lost(folder, packed):
  before, after = open_runs(folder), open_runs(packed)
  assert isinstance(before, RunFolders) and isinstance(after, PackedRuns)
  assert sorted(after.names()) == sorted(arm.run_name(seed) for arm, seed in GRID.runs())
  for name in [*after.names(), 'unknown']:
    assert after.failure(name) == before.failure(name)
    for part in ('config', 'data', 'result', 'metrics'):
      assert str(getattr(after, part)(name)) == str(getattr(before, part)(name)), part  # NaN is not equal to itself
    arrays, others = before.predictions(name), after.predictions(name)
    assert (arrays is None) == (others is None) == (name not in FINISHED)
    for kind in arrays or ():
      np.testing.assert_array_equal(others[kind], arrays[kind])
  first = json.loads((packed / 'runs.jsonl').read_text().splitlines()[0])
  assert first['config'] == json.loads((folder / first['run'] / 'config.json').read_text())
  assert (first['group'], first['label'], first['seed']) == ('cifar10', 'vit', 0)
  files = {path.name: path for path in packed.iterdir()}
  assert files.keys() == {'runs.jsonl', 'predictions.npz', 'grid.json', 'curves.png', 'cifar10-vit-1-nested.json'}
  assert files['cifar10-vit-1-nested.json'].read_text() == '{"rows": [1]}\n'


def test_tables_are_the_same(folder, packed):
  rows, others = read_rows(GRID, folder), read_rows(Grid.load(packed), packed)
  assert rows[1].difference and rows[2].failed == {0: 'error: training diverged', 1: 'not run yet'}
  assert (markdown(others), as_json(others)) == (markdown(rows), as_json(rows))
  assert held_out_table(GRID, packed) == held_out_table(GRID, folder)


def test_equal_arrays_are_kept_once_and_integers_small(packed):
  with np.load(packed / 'predictions.npz') as arrays:
    kept = {key: array.dtype for key, array in arrays.items()}
  assert [key for key in kept if key.endswith('labels')] == ['cifar10-vit-0/labels']
  assert {dtype for key, dtype in kept.items() if not key.endswith('nll')} == {np.dtype(np.int8)}
  assert len(kept) == 1 + 2 * len(FINISHED)


def test_trials_of_a_search_are_measured_from_either(folder, tmp_path):
  (folder / 'grid.json').unlink()
  empty = dict.fromkeys(field.name for field in dataclasses.fields(tune.Trial))
  about = empty | {'label': 'vit', 'number': 0, 'seed': 1, 'options': {}, 'failed': '', 'arm': 'vit', 'like': 'vit'}
  about |= {'group': 'cifar10', 'task': 'classification', 'arguments': ()}
  trials = [tune.Trial(**about | {'run': f'cifar10-{label}'}) for label in ('vit-1', 'bad-0')]
  write_json(folder / tune.TUNING, {'trials': [dataclasses.asdict(trial) for trial in trials]})
  pack(folder, tmp_path / 'packed')
  before, after = ([trial.measured(open_runs(place)) for trial in trials] for place in (folder, tmp_path / 'packed'))
  assert str(after) == str(before)
  assert (after[0].held_out, after[1].diverged) == (51.0, True)


def test_the_command_says_what_is_not_in_it(folder, tmp_path, capsys):
  assert main([str(folder), str(tmp_path / 'packed')]) == 0
  told = capsys.readouterr().err.splitlines()
  assert told == ['without a result: cifar10-bad-0, cifar10-bad-1', 'left out: checkpoints/, logs/']


def test_what_cannot_be_packed_is_refused_and_leaves_nothing(folder, packed, tmp_path):
  other = tmp_path / 'other'
  (tmp_path / 'none').mkdir()
  with pytest.raises(UserError, match=r'none has no runs: give the --workdir'):
    pack(tmp_path / 'none', other)
  with pytest.raises(UserError, match='packed is packed already'):
    pack(packed, other)
  with pytest.raises(UserError, match='packed exists: choose another folder'):
    pack(folder, packed)
  with held(folder / FINISHED[0]), pytest.raises(UserError, match=f'{FINISHED[0]} is in use by another process'):
    pack(folder, other)
  (folder / 'cifar10-vit-1-nested.json').touch()
  with pytest.raises(
    UserError, match=r'vit-1/nested\.json and another file would both be cifar10-vit-1-nested\.json'
  ):
    pack(folder, other)
  (folder / FINISHED[0] / 'config.json').write_text('{')
  with pytest.raises(UserError, match=r'config\.json is damaged'):
    pack(folder, other)
  assert not list(tmp_path.glob('other*'))


def test_runs_are_not_added_to_packed_ones(packed):
  before = sorted(packed.iterdir())
  for ask in (lambda: compare(Comparison(), packed, [Device()]), lambda: tune.tune(Comparison(), 1, packed, [])):
    with pytest.raises(UserError, match='packed is packed, and no runs can be added: unpack it by python -m'):
      ask()
  assert sorted(packed.iterdir()) == before


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    (lambda lines: [*lines[:2], lines[2][:50]], r'line 3 of .*runs\.jsonl is damaged'),
    (lambda lines: [lines[0], '{}'], r'line 2 of .* is damaged \(it lacks run\)'),
    (lambda lines: [lines[0], lines[0]], r'two lines have the run cifar10-vit-0\): restore it from a copy'),
    (
      lambda lines: ['{"run": "cifar10-vit-0", "result": [1]}'],
      r'the result of .* \(expected a JSON object, found list',
    ),
    (lambda lines: ['{"run": "cifar10-vit-0", "result": {"n": 1}}'], r'the result of .* \(it lacks accuracy\)'),
    (
      lambda lines: ['{"run": "cifar10-vit-0", "config": {"version": 999}}'],
      r'runs\.jsonl: its config is of version',
    ),
    (
      lambda lines: ['{"run": "cifar10-vit-0", "predictions": {"labels": "x"}}'],
      r'predictions\.npz .*\(it lacks x\)',
    ),
  ],
  ids=['cut', 'nameless', 'twice', 'type', 'figure', 'newer', 'array'],
)
def test_damage_is_named(packed, change, said):
  with pytest.raises(UserError, match=said):
    runs = rewritten(packed, change)
    runs.result('cifar10-vit-0', 'accuracy')
    runs.config('cifar10-vit-0')
    runs.predictions('cifar10-vit-0')


def test_without_predictions_intervals_are_left_out(packed):
  (packed / 'predictions.npz').unlink()
  rows = read_rows(GRID, packed)
  assert [row.difference for row in rows] == [None] * 3 and rows[1].mean


def test_unpacked_runs_are_the_finished_ones_as_they_were(folder, packed, tmp_path):
  assert unpack(packed, tmp_path / 'again') == [arm.run_name(seed) for arm, seed in GRID.runs() if arm.label == 'bad']
  again = tmp_path / 'again'
  assert RunFolders(again).names() == sorted(FINISHED)
  assert (again / 'cifar10-vit-1' / 'nested.json').read_text() == '{"rows": [1]}\n'
  assert Grid.load(again) == GRID
  for run in FINISHED:
    for name in ('config.json', 'data.json', 'result.json', 'metrics.jsonl'):
      assert (again / run / name).read_text() == (folder / run / name).read_text()
    before, after = (read_predictions(root / run) for root in (folder, again))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
  pack(again, tmp_path / 'twice')
  finished = Grid(GRID.arms[:2], GRID.seeds)
  assert as_json(read_rows(finished, tmp_path / 'twice')) == as_json(read_rows(finished, packed))


def test_what_cannot_be_unpacked_is_a_line(folder, packed, tmp_path):
  with pytest.raises(UserError, match=r'runs is not packed: it has no runs.jsonl'):
    unpack(folder, tmp_path / 'again')
  with pytest.raises(UserError, match='exists: choose another folder'):
    unpack(packed, folder)
