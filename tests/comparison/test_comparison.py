"""compare.py as its user runs it: killed and run again, with a run that fails, and its report from the logs alone."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from hbf.comparison import runs
from hbf.comparison.grid import Arm, Grid
from hbf.comparison.table import read_rows
from hbf.training.workdir import load_config, read_predictions

ROOT = pathlib.Path(__file__).parents[2]
TOY = ('--config.model.width=16', '--config.model.depth=1', '--config.model.heads=2', '--config.train.epochs=2.0')


@pytest.fixture
def command(digits_dir):
  def make(workdir, *arguments, config='configs/digits.py'):
    data = f'--config.data.dir={digits_dir}'
    return [sys.executable, 'compare.py', f'--workdir={workdir}', f'--config={config}', data, *TOY, *arguments]

  return make


def run(command):
  environment = os.environ | {'XLA_FLAGS': ''}
  return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def figures(workdir):
  """What a comparison found, without times and memory."""
  rows = json.loads((workdir / 'comparison.json').read_text())
  learned = ('params', 'flops_per_image', 'steps', 'n', 'correct', 'accuracy', 'nll', 'ece')
  for row in rows:
    row['results'] = {seed: {key: result[key] for key in learned} for seed, result in row['results'].items()}
  return rows


ARMS = ('--arm=vit', '--arm=wide: hyperbf model.stage2.width_scale=2.0', '--seeds=0,1')


@pytest.fixture(scope='module')
def finished(tmp_path_factory, digits_dir):
  """A comparison of two arms and two seeds that nothing disturbed."""
  workdir = tmp_path_factory.mktemp('comparison') / 'grid'
  data = f'--config.data.dir={digits_dir}'
  base = [sys.executable, 'compare.py', f'--workdir={workdir}', '--config=configs/digits.py', data, *TOY]
  done = run([*base, *ARMS])
  assert done.returncode == 0, done.stderr
  return workdir, done.stdout


def test_runs_are_ordinary_workdirs_and_the_table_is_theirs(finished):
  workdir, shown = finished
  rows = figures(workdir)
  assert [row['label'] for row in rows] == ['vit', 'wide']
  for row in rows:
    for seed, result in row['results'].items():
      path = workdir / f'digits-{row["label"]}-{seed}'
      config, stored = load_config(path), json.loads((path / 'result.json').read_text())
      assert (config.seed, stored['correct'], stored['split']) == (int(seed), result['correct'], 'test')
      labels, predictions = read_predictions(path)
      assert (len(labels), int((labels == predictions).sum())) == (stored['n'], stored['correct'])
    accuracies = [result['accuracy'] for result in row['results'].values()]
    assert row['accuracy'] == pytest.approx(np.mean(accuracies))
    assert row['sd'] == pytest.approx(np.std(accuracies, ddof=1))
    assert f'| {row["label"]} |' in shown
    assert f'**{row["accuracy"]:.2f}** ({row["sd"]:.2f})' in shown
  assert rows[0]['seeds_difference'] is None
  difference = rows[1]['accuracy'] - rows[0]['accuracy']
  for kind in ('seeds_difference', 'images_difference'):
    interval = rows[1][kind]
    assert interval['estimate'] == pytest.approx(difference)
    assert interval['low'] <= difference <= interval['high']
  assert (workdir / 'curves.png').read_bytes().startswith(b'\x89PNG')
  assert (workdir / 'comparison.md').read_text().strip() == shown.strip()


def test_the_report_comes_from_the_logs_alone(finished, tmp_path):
  workdir, shown = finished
  copy = tmp_path / 'copy'
  shutil.copytree(workdir, copy, ignore=shutil.ignore_patterns('checkpoints', 'comparison.*', 'curves.png', 'logs'))
  done = run([sys.executable, 'compare.py', f'--workdir={copy}', '--report'])
  assert (done.returncode, done.stdout) == (0, shown)
  for name in ('comparison.json', 'comparison.md', 'curves.png'):
    assert (copy / name).read_bytes() == (workdir / name).read_bytes()


@pytest.mark.parametrize('kind', [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_killed_at_random_and_run_again_it_ends_with_the_same_table(finished, command, tmp_path, kind):
  workdir = tmp_path / 'grid'
  killed = command(workdir, *ARMS, '--config.checkpoint.every=5steps')
  seconds = random.uniform(2, 25)
  process = subprocess.Popen(killed, cwd=ROOT, env=os.environ | {'XLA_FLAGS': ''}, stderr=subprocess.PIPE, text=True)
  time.sleep(seconds)
  process.send_signal(kind)
  _, errors = process.communicate(timeout=120)
  assert process.returncode in (0, -kind), errors  # -SIGTERM: it came before Python had begun to listen
  done = run(killed)  # at once, while a run of the killed one may still be at work
  assert done.returncode == 0, (seconds, done.stderr)
  assert figures(workdir) == figures(finished[0]), seconds
  again = run(killed)
  assert '4 runs finished, 0 to do' in again.stderr


def test_a_run_that_fails_is_reported_and_the_others_go_on(command, tmp_path):
  workdir = tmp_path / 'grid'
  arms = (
    '--arm=bad: vit optimizer.learning_rate=1e9 optimizer.clip=0.0',
    '--arm=vit',
    '--seeds=0',
    '--devices=cpu:0',
  )
  done = run(command(workdir, *arms))
  assert done.returncode == 1
  assert re.search(r'digits-bad-0: FAILED \(error: training diverged', done.stderr)
  assert re.search(r'digits bad, seed 0: error: training diverged', done.stdout)
  bad, vit = figures(workdir)
  assert (bad['accuracy'], bad['results'], vit['results']['0']['n']) == (None, {}, 355)
  assert vit['seeds_difference'] is None  # there is nothing to differ from


def test_a_run_that_is_killed_is_reported_as_such(tmp_path, monkeypatch):
  script = tmp_path / 'train.py'
  script.write_text('import os; print("step 7", flush=True); os.kill(os.getpid(), 9)')
  monkeypatch.setattr(runs, 'TRAIN', script)
  grid = Grid((Arm('digits', 'vit', ()),), (0,))
  with open(os.devnull, 'w') as quiet:
    assert runs.run_all(grid, tmp_path, [runs.Device()], Console(file=quiet))
  (row,) = read_rows(grid, tmp_path)
  assert row.failed == {0: 'error: ended by signal 9'}


def test_another_config_is_refused_before_anything_runs(finished, command):
  workdir = finished[0]
  before = {path: path.stat().st_mtime_ns for path in workdir.rglob('*')}
  done = run(command(workdir, *ARMS, '--config.optimizer.learning_rate=0.1'))
  assert done.returncode == 1
  assert re.fullmatch(
    r'error: .*digits-vit-0 holds a run of another config \(optimizer.learning_rate .*\n', done.stderr
  )
  assert {path: path.stat().st_mtime_ns for path in workdir.rglob('*')} == before


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--preset=mmo'], "unknown preset 'mmo': did you mean 'memo'"),
    (['--arm=vit', '--seeds=1-3'], '--seeds=1-3 is not a list'),
    (['--arm=vit', '--config.train.epoch=3'], "unknown config key 'epoch': did you mean 'epochs'"),
    (['--arm=vit', '--config.seed'], '--config.seed needs a value'),
    ([], 'a comparison needs a config, an arm and a seed'),
  ],
)
def test_wrong_flags_are_one_line_and_leave_nothing(command, tmp_path, arguments, message):
  done = run(command(tmp_path / 'grid', *arguments))
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr.count('\n') == 1, done.stderr
  assert message in done.stderr
  assert not (tmp_path / 'grid').exists()
