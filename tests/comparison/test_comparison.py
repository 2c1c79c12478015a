"""Tests of `hbf compare` as a user runs it: killed and restarted, extended, and reported from the logs."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from rich.console import Console

from hbf import cli
from hbf.comparison import runs
from hbf.comparison.compare import compare, report
from hbf.comparison.devices import Device
from hbf.comparison.grid import Arm, Comparison, Grid
from hbf.comparison.stored import open_runs
from hbf.comparison.table import read_rows
from hbf.comparison.tune import Trial
from hbf.errors import UserError
from hbf.training.workdir import load_config, read_predictions
from tests.commands import run_each

ROOT = pathlib.Path(__file__).parents[2]
TOY = ('--config.model.width=16', '--config.model.depth=1', '--config.model.heads=2', '--config.train.epochs=2.0')
ARMS = ('vit', 'fast: vit optimizer.learning_rate=0.02')
ONE_DEVICE = os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=1')
ENVIRONMENT = os.environ | {'XLA_FLAGS': ONE_DEVICE, 'PYTHONPATH': str(ROOT)}


@pytest.fixture(scope='module')
def asked(digits_dir):
  """Return the comparison of most tests: two arms with two seeds."""
  return Comparison(('configs/digits.py',), ARMS, (0, 1), (f'--config.data.dir={digits_dir}', *TOY))


def command(workdir, asked, *more):
  """Return the command for a comparison, with more flags."""
  flags = [f'--workdir={workdir}', *(f'--config={config}' for config in asked.configs), *asked.overrides]
  flags += [*(f'--arm={arm}' for arm in asked.arms), f'--seeds={",".join(map(str, asked.seeds))}']
  return [sys.executable, '-m', 'hbf', 'compare', *flags, *more]


def run(command, folder):
  return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


def scores(workdir):
  """Return the results of a comparison, without times and memory."""
  rows = json.loads((workdir / 'comparison.json').read_text())
  learned = ('params', 'flops_per_image', 'steps', 'n', 'correct', 'accuracy', 'nll', 'ece')
  for row in rows:
    row['results'] = {seed: {key: result[key] for key in learned} for seed, result in row['results'].items()}
  return rows


@pytest.fixture(scope='module')
def finished(tmp_path_factory, asked):
  """Return the folder and output of an uninterrupted comparison, run outside the repository."""
  folder = tmp_path_factory.mktemp('elsewhere')
  done = run(command('grid', asked), folder)
  assert done.returncode == 0, done.stderr
  return folder / 'grid', done.stdout


@pytest.fixture
def copied(finished, tmp_path):
  """Return a copy of the logs and results of the finished comparison."""
  left = shutil.ignore_patterns('checkpoints', 'comparison.*', 'curves.png', 'logs')
  return shutil.copytree(finished[0], tmp_path / 'copy', ignore=left)


def test_runs_are_ordinary_workdirs_and_the_table_is_theirs(finished):
  workdir, shown = finished
  rows = scores(workdir)
  assert [row['label'] for row in rows] == ['vit', 'fast']
  for row in rows:
    for seed, result in row['results'].items():
      path = workdir / f'digits-{row["label"]}-{seed}'
      config, stored = load_config(path), json.loads((path / 'result.json').read_text())
      assert (config.seed, stored['correct'], stored['split']) == (int(seed), result['correct'], 'test')
      labels, predictions = read_predictions(path).values()
      assert (len(labels), int((labels == predictions).sum())) == (stored['n'], stored['correct'])
    accuracies = [result['accuracy'] for result in row['results'].values()]
    assert row['mean'] == pytest.approx(np.mean(accuracies))
    assert row['sd'] == pytest.approx(np.std(accuracies, ddof=1))
    assert re.search(rf'^\| {row["label"]} +\|', shown, re.MULTILINE)
    assert f'**{row["mean"]:.2f}** ({row["sd"]:.2f})' in shown
  for row in json.loads((workdir / 'comparison.json').read_text()):
    result = row['results']['0']
    assert result['train_operations'] == 3 * result['flops_per_image'] * 64 * result['steps']
    assert f'| {result["train_operations"]:.2e} '.replace('e+', 'e') in shown
  assert rows[0]['difference'] is None
  difference = rows[1]['difference']
  assert difference['estimate'] == pytest.approx(rows[1]['mean'] - rows[0]['mean'])
  assert difference['low'] <= difference['estimate'] <= difference['high']
  assert (workdir / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert (workdir / 'comparison.md').read_text().strip() == shown.strip()


def test_a_trial_is_measured_on_held_out_images_at_the_end(finished):
  log = [json.loads(line) for line in (finished[0] / 'digits-fast-1' / 'metrics.jsonl').read_text().splitlines()]
  last = {split: [line for line in log if line['split'] == split][-1] for split in ('train', 'validation')}
  about = {'label': 'fast', 'number': 0, 'seed': 1, 'options': {}, 'arm': 'fast: vit', 'like': 'vit', 'arguments': ()}
  trial = Trial(
    held_out=None,
    loss=None,
    failed='not run yet',
    group='digits',
    task='classification',
    run='digits-fast-1',
    **about,
  )
  trial = trial.measured(open_runs(finished[0]))
  assert (trial.held_out, trial.loss, trial.failed) == (last['validation']['accuracy'], last['train']['loss'], '')


def test_the_report_comes_from_the_logs_alone(finished, copied, capsys):
  workdir, shown = finished
  report(copied, 'test')
  assert capsys.readouterr().out == shown
  for name in ('comparison.json', 'comparison.md', 'curves.png'):
    assert (copied / name).read_bytes() == (workdir / name).read_bytes()


@pytest.mark.parametrize('kind', [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_killed_at_work_and_run_again_it_ends_with_the_same_table(finished, asked, tmp_path, kind):
  workdir = tmp_path / 'grid'
  asked = dataclasses.replace(asked, arms=ARMS[:1], seeds=(0,))
  again = command(workdir, asked, '--config.checkpoint.every=5steps')
  process = subprocess.Popen(again, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
  while process.poll() is None and not list(workdir.glob('digits-vit-0/checkpoints/[0-9]*')):
    time.sleep(0.05)
  process.send_signal(kind)
  _, errors = process.communicate(timeout=120)
  assert process.returncode == (-kind if kind == signal.SIGKILL else 0), errors
  assert not list(workdir.glob('digits-vit-0/result.json'))
  done = run(again, ROOT)  # at once, while the run of the killed one may still be at work
  assert done.returncode == 0, done.stderr
  (row,), (whole, _) = scores(workdir), scores(finished[0])
  assert row['results'] == {'0': whole['results']['0']}


@pytest.mark.slow
def test_what_is_asked_later_joins_the_table_and_a_run_that_fails_is_named(finished, copied, asked, capsys):
  bad = ('bad: vit optimizer.learning_rate=1e9 optimizer.clip=0.0',)
  assert not compare(Comparison(asked.configs, bad, (0,), asked.overrides), copied, [Device()])
  shown, told = capsys.readouterr()
  assert re.search(r'digits-bad-0: FAILED \(error: training diverged', told)
  assert re.search(r'digits bad, seed 0: error: training diverged', shown)
  vit, fast, last = scores(copied)
  assert [vit, fast] == scores(finished[0])
  assert (last['label'], last['mean'], last['results']) == ('bad', None, {})
  assert last['difference'] is None  # it has nothing to differ with


TRAIN = """
import os, pathlib, sys
workdir = pathlib.Path(sys.argv[-1].removeprefix('--workdir='))
if 'killed' in workdir.name:
  print('step 7', flush=True)
  os.kill(os.getpid(), 9)
if 'failing' in workdir.name:
  sys.exit('error: it can not be')
workdir.mkdir()
(workdir / 'result.json').write_text('{"accuracy": 50.0}')
"""


def test_runs_that_fail_or_are_killed_are_reported_and_the_others_go_on(tmp_path, monkeypatch, capsys):
  script = tmp_path / 'train.py'
  script.write_text(TRAIN)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, str(script)))
  grid = Grid(tuple(Arm('digits', label, ()) for label in ('killed', 'failing', 'sound')), (0,))
  for done in (0, 1):  # the second call tries again what has no result
    assert runs.run_all(grid, tmp_path, [Device()], Console(file=sys.stdout))
    assert f'{done} runs finished, {3 - done} to do' in capsys.readouterr().out
    assert not runs.all_finished(grid, tmp_path)
    assert [row.failed for row in read_rows(grid, tmp_path)] == [
      {0: 'error: ended by signal 9'},
      {0: 'error: it can not be'},
      {},
    ]
  assert runs.all_finished(Grid(grid.arms[2:], (0,)), tmp_path)
  logs = {path.name: path.read_text() for path in (tmp_path / 'logs').glob('digits-failing-0.*')}
  assert logs == dict.fromkeys(('digits-failing-0.1.log', 'digits-failing-0.log'), 'error: it can not be\n')


def watched(monkeypatch, answers):
  """Let runs be in use as `answers` says, call by call, by name of the run. After the last one it is done."""

  def in_use(path):
    if not answers.get(path.name):
      return False
    answer = answers[path.name].pop(0)
    if not answers[path.name]:
      path.mkdir(exist_ok=True)
      (path / 'result.json').write_text('{}')
    return answer

  monkeypatch.setattr(runs, 'in_use', in_use)
  monkeypatch.setattr(runs, 'POLL_SECONDS', 0.01)


def test_a_device_is_kept_for_a_run_that_a_killed_comparison_left(tmp_path, monkeypatch):
  """It still trains, and on a GPU there is no room for another."""
  answers = {'digits-left-0': [True, True, True]}
  watched(monkeypatch, answers)
  started = []

  class Process(runs._Process):
    def __init__(self, run, *others):
      started.append((run.name, answers['digits-left-0'][:]))
      super().__init__(run, *others)

  monkeypatch.setattr(runs, '_Process', Process)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', TRAIN))
  grid = Grid(tuple(Arm('digits', label, ()) for label in ('left', 'sound')), (0,))
  assert runs.run_all(grid, tmp_path, [Device()], Console(file=sys.stdout))
  assert started == [('digits-sound-0', [])]  # and the other one did not start at all


def test_a_run_that_finds_its_folder_in_use_is_awaited(tmp_path, monkeypatch, capsys):
  """A killed comparison leaves a run that has not locked its folder yet."""
  watched(monkeypatch, {'digits-failing-0': [False, True, True]})
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', TRAIN))
  grid = Grid((Arm('digits', 'failing', ()),), (0,))
  assert runs.run_all(grid, tmp_path, [Device()], Console(file=sys.stdout))
  told = capsys.readouterr().out
  assert 'digits-failing-0: another process still trains it' in told and 'FAILED' not in told
  assert told.count('started') == 1 and runs.all_finished(grid, tmp_path)


def test_a_run_that_is_stopped_as_it_starts_has_not_failed(tmp_path, monkeypatch, capsys):
  @contextlib.contextmanager
  def signals():  # none until the run has started
    before = iter([False, False])
    yield lambda: next(before, True)

  monkeypatch.setattr(runs, 'signals', signals)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', 'import time; time.sleep(60)'))
  assert not runs.run_all(Grid((Arm('digits', 'vit', ()),), (0,)), tmp_path, [Device()], Console(file=sys.stdout))
  told = capsys.readouterr().out
  assert 'digits-vit-0: stopped as it started' in told and 'FAILED' not in told


def test_a_core_with_a_run_of_another_comparison_is_named(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  core = Device('cpu', min(os.sched_getaffinity(0)))
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', 'import time; time.sleep(60)'))
  (tmp_path / 'one').mkdir()
  other = runs._Process(runs.PendingRun('other', ()), tmp_path / 'one', core)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', TRAIN))
  for name, beside in (('two', ' beside another run, so both are slow'), ('three', '')):
    (tmp_path / name).mkdir()
    runs.run_all(Grid((Arm('digits', 'vit', ()),), (0,)), tmp_path / name, [core], Console(file=sys.stdout))
    said = capsys.readouterr().out.replace('\n', ' ')
    assert f'started on {core}{beside}, 0 more to do' in said and 'finished after' in said
    other._process.kill()  # as if its comparison were killed too: the lock ends with the run
    other._process.wait()


def test_an_error_stops_the_runs(tmp_path, monkeypatch):
  """An error is, for example, that of a damaged log, which `hbf compare --prune` reads."""
  started = []

  class Process(runs._Process):
    def __init__(self, *arguments):
      super().__init__(*arguments)
      started.append(self._process)

  def damaged(name):
    raise UserError(f'{name} is damaged')

  monkeypatch.setattr(runs, '_Process', Process)
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', 'import time; time.sleep(60)'))
  with pytest.raises(UserError, match='digits-vit-0 is damaged'):
    runs.run_all(
      Grid((Arm('digits', 'vit', ()),), (0,)), tmp_path, [Device()], Console(file=sys.stdout), prune=damaged
    )
  assert started[0].wait(10) == -signal.SIGTERM


def test_a_signal_to_the_group_of_a_comparison_reaches_its_runs_once(tmp_path, monkeypatch):
  """At the second SIGTERM a run would end at once, and save nothing."""
  monkeypatch.setattr(runs, 'TRAIN', (sys.executable, '-c', 'import time; time.sleep(60)'))
  process = runs._Process(runs.PendingRun('one', ()), tmp_path, Device())
  assert os.getpgid(process._process.pid) != os.getpgid(0)
  process.stop()
  assert process._process.wait(10) == -signal.SIGTERM


def test_another_config_is_refused_before_anything_runs(copied, asked):
  before = {path: path.stat().st_mtime_ns for path in copied.rglob('*')}
  other = Comparison(asked.configs, asked.arms, (0,), (*asked.overrides, '--config.optimizer.learning_rate=0.1'))
  with pytest.raises(UserError, match=r'digits-vit-0 holds a run of another config \(optimizer.learning_rate'):
    compare(other, copied, [Device()])
  assert {path: path.stat().st_mtime_ns for path in copied.rglob('*')} == before


def test_other_data_are_refused_before_anything_runs(copied, asked):
  """The same config may find other files in its folder, and old results are not those of the new data."""
  files = list(copied.glob('*/data.json'))
  stored = json.loads(files[0].read_text())
  for path in files:
    path.write_text(json.dumps(stored | {'fingerprint': 'other'}))
  again = dataclasses.replace(asked, seeds=(0, 1, 2))
  with pytest.raises(UserError, match=r'digits-vit-0 has other data than the data of this call \(as many examples'):
    compare(again, copied, [Device()])
  files[0].write_text(json.dumps(stored))
  with pytest.raises(UserError, match=r'digits-.* has other data than .*/digits-.*: choose another --workdir'):
    compare(again, copied, [Device()])
  assert not (copied / 'digits-vit-2').exists()


def test_a_wrong_flag_is_one_line_and_leaves_nothing(asked, tmp_path):
  done = run(command(tmp_path / 'grid', asked, '--preset=mmo'), ROOT)
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr.startswith("error: unknown preset 'mmo': did you mean 'memo'")
  assert done.stderr.count('\n') == 1
  assert not (tmp_path / 'grid').exists()


def test_a_key_without_a_value_is_one_line(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['compare', '--config.seed', '--config.model.width=3'])
  with pytest.raises(SystemExit, match='1'):
    cli.take_overrides()
  assert capsys.readouterr().err == 'error: --config.seed needs a value: write --config.seed=VALUE\n'


def test_the_value_of_a_key_may_follow_after_a_space(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['compare', '--config', 'digits', '--config.model.width', '8', '--seeds', '0'])
  assert cli.take_overrides() == ['--config.model.width=8']
  assert sys.argv == ['compare', '--config=digits', '--seeds', '0']


def test_a_flag_with_one_dash_is_known_by_its_key(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['compare', '-config.data.validation=0.2', '-noconfig.data.stratify'])
  assert cli.take_overrides() == ['--config.data.validation=0.2', '--noconfig.data.stratify']


def test_a_flag_that_would_do_nothing_is_refused_before_anything_runs(tmp_path):
  needs = {'space=seed=1|2': 'tune', 'sampler=random': 'tune', 'prune': 'tune', 'split=validation': 'report'}
  commands = [['hbf/cli/compare.py', f'--workdir={tmp_path / "grid"}', f'--{flag}'] for flag in needs]
  searches = [['--preset=laptop-tune'], ['--preset=laptop-tune', '--tuned=x'], ['--tune=2', '--tuned=x']]
  commands += [['hbf/cli/compare.py', f'--workdir={tmp_path / "grid"}', *search] for search in searches]
  *refused, one, other, both = run_each(commands)
  assert one == [1, '', 'error: preset laptop-tune is a search: add its number of trials, such as --tune=12\n']
  assert other == one and both[2].startswith('error: --tune searches options, and --tuned takes those that a search')
  for ended, (flag, needed) in zip(refused, needs.items(), strict=True):
    name = flag.partition('=')[0]
    assert ended == [1, '', f'error: --{name} needs --{needed}: add it, or leave --{name} out\n']
  assert not (tmp_path / 'grid').exists()
