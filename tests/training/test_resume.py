"""Tests of interrupted runs: the same call continues them, and the result is that of an uninterrupted run."""

import errno
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console
from toy_runs import ONE, QUIET, assert_same_run, assert_timed, damage, params_of, stop_at, timeless

from hbf.data.images import levels
from hbf.data.pipeline.inputs import Input
from hbf.data.pipeline.order import EvalOrder
from hbf.errors import UserError
from hbf.training.checkpoints import Checkpoints
from hbf.training.loop import train
from hbf.training.reporter import Reporter
from hbf.training.writers import MetricsWriter

TRAIN = """
import json, os, signal, sys
import jax
from ml_collections import ConfigDict
from rich.console import Console
from hbf.training.loop import train
from hbf.training.reporter import Reporter

report = Reporter.report

def reporting(self, step, state):
  if step == int(sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)
  return report(self, step, state)

Reporter.report = reporting
if __name__ == '__main__':
  train(ConfigDict(json.loads(sys.argv[1])), __import__('pathlib').Path(sys.argv[2]), Console(), jax.devices()[:1])
"""


@pytest.fixture(scope='module')
def stopped(finished, tmp_path_factory):
  """Return the workdir of a run like the finished one that was stopped after step 14, with more steps in a call."""
  config = finished[1].copy_and_resolve_references()
  config.train.steps_per_call, config.checkpoint.every, config.checkpoint.keep = 4, '5steps', 9
  workdir = tmp_path_factory.mktemp('stopped') / 'run'
  with pytest.MonkeyPatch.context() as patch:
    stop_at(patch, 14)
    assert train(config, workdir, QUIET, ONE) is None
  assert not (workdir / 'result.json').exists()
  return workdir


@pytest.fixture
def parts(stopped, tmp_path):
  """Return a copy of the stopped run."""
  return shutil.copytree(stopped, tmp_path / 'run')


def goes_on(finished, workdir, callbacks=()):
  """Continue a run to its end, and check that it equals the finished one. Return its output."""
  whole, config, result = finished
  said = io.StringIO()
  found = train(config, workdir, Console(file=said, width=1000), ONE, callbacks=callbacks)
  assert found['correct'] == result['correct']
  assert_same_run(whole, workdir)
  assert_timed(found, config, result['steps'])
  return said.getvalue()


def test_what_is_said_to_be_saved_is_complete_before_signals_kill_again(finished, tmp_path, monkeypatch):
  """Ctrl-C reaches a run of a comparison twice: from the terminal, and from the comparison that started it."""
  _, config, _ = finished
  complete = []

  class Listening(io.StringIO):
    def write(self, text):
      if 'saved; the same command' in text:
        complete.append([path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir() if path.name.isdigit()])
      return super().write(text)

  stop_at(monkeypatch, 7)
  assert train(config, tmp_path / 'run', Console(file=Listening(), width=1000), ONE) is None
  assert complete == [['7']]


def test_a_run_goes_on_from_the_newest_checkpoint_that_can_be_read(finished, parts):
  damage(parts / 'checkpoints', 14)
  said = goes_on(finished, parts)
  assert f'checkpoint 14 cannot be read; set aside as {parts}/checkpoints/14.damaged\ngoes on after step 10' in said
  assert (parts / 'checkpoints' / '14.damaged').is_dir()


def test_if_no_checkpoint_can_be_read_the_run_says_so_and_leaves_them(finished, parts):
  for step in (5, 10, 14):
    damage(parts / 'checkpoints', step)
  with pytest.raises(UserError, match=r'no checkpoint in .* can be read'):
    train(finished[1], parts, QUIET, ONE)
  assert sorted(path.name for path in (parts / 'checkpoints').iterdir()) == ['10', '14', '5']


def test_after_sigterm_and_a_full_disk_told_in_a_line_the_same_call_goes_on_exactly(finished, parts, monkeypatch):
  """The parts differ in the number of steps in a call. The images are not measured again."""
  monkeypatch.setattr(levels, 'statistics', None)

  def write(self, step, epoch, split, **values):
    self._file.write('{"step": 15, "epo')  # as much as there was room for
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(MetricsWriter, 'write', write)
    with pytest.raises(UserError, match=r'run could not be written: no space left on device\. Make room and'):
      train(finished[1], parts, QUIET, ONE)
  assert (parts / 'metrics.jsonl').read_text().endswith('"epo')
  assert 'goes on after step 14' in goes_on(finished, parts)


@pytest.mark.parametrize(
  ('split', 'step', 'pass_'), [('validation', 21, 1), pytest.param('test', 41, 2, marks=pytest.mark.slow)]
)
def test_sigterm_during_evaluation_is_answered_within_two_batches(
  finished, tmp_path, monkeypatch, split, step, pass_
):
  """The evaluation is of the parameters, or of their average. The continued run repeats it for the callbacks too."""
  config = finished[1].copy_and_resolve_references()
  examples = {'validation': 144, 'test': finished[2]['n']}[split]
  batches, passes, after, scored = Input.batches, [], [], []

  def watch(step, metrics, state):
    scored.extend([step] * ('validation' in metrics))

  def interrupting(self, order, start, stop):
    asked = isinstance(order, EvalOrder) and order.examples == examples
    passes.extend([1] * asked)
    for number, batch in enumerate(batches(self, order, start, stop)):
      if asked and len(passes) >= pass_:
        if number == 2:
          os.kill(os.getpid(), signal.SIGTERM)
        if number >= 2:
          after.append(number)
      yield batch

  with monkeypatch.context() as patch:
    patch.setattr(Input, 'batches', interrupting)
    assert train(config, tmp_path, QUIET, ONE, callbacks=[watch]) is None
  assert 1 <= len(after) <= 2 and len(passes) == pass_
  assert Checkpoints(tmp_path / 'checkpoints', read_only=True).latest == step
  assert (split, step) not in [(line['split'], line['step']) for line in timeless(tmp_path)]
  assert f'goes on after step {step}' in goes_on(finished, tmp_path, [watch])
  assert scored == [21, 41]


@pytest.mark.parametrize('kind', ['device', pytest.param('stream', marks=pytest.mark.slow)])
def test_kill_9_in_an_epoch_changes_nothing(finished, tmp_path, kind):
  config = finished[1].copy_and_resolve_references()
  config.update_from_flattened_dict({'checkpoint.every': '8steps', 'data.input': kind, 'data.workers': 1})
  workdir = tmp_path / 'run'
  (tmp_path / 'train_and_die.py').write_text(TRAIN)  # a file, as the stream's processes import it
  command = [sys.executable, tmp_path / 'train_and_die.py', config.to_json(), workdir, '28']
  environment = os.environ | {'PYTHONPATH': os.getcwd()}
  assert subprocess.run(command, env=environment, capture_output=True).returncode == -signal.SIGKILL
  assert not (workdir / 'result.json').exists()
  assert Checkpoints(workdir / 'checkpoints', read_only=True).latest in (
    16,
    21,
    24,
  )  # the last may not have been complete
  if kind == 'device':
    goes_on(finished, workdir)
    return
  train(config, workdir, QUIET, ONE)
  train(config, tmp_path / 'whole', QUIET, ONE)
  assert_same_run(tmp_path / 'whole', workdir)


@pytest.mark.slow
def test_a_reader_that_dies_ends_the_run_in_an_error_and_leaves_its_checkpoints(finished, parts, monkeypatch):
  report = Reporter.report

  def killing(self, step, state):
    if step == 21:
      multiprocessing.active_children()[0].kill()
    return report(self, step, state)

  monkeypatch.setattr(Reporter, 'report', killing)
  config = finished[1].copy_and_resolve_references()
  config.update_from_flattened_dict({'checkpoint.every': '5steps', 'data.input': 'stream', 'data.workers': 1})
  with pytest.raises(UserError, match='a process that reads images died'):
    train(config, parts, QUIET, ONE)
  assert not multiprocessing.active_children()
  assert Checkpoints(parts / 'checkpoints', read_only=True).latest in (20, 25)  # a batch was on its way
  monkeypatch.setattr(Reporter, 'report', report)
  assert train(config, parts, QUIET, ONE)['n'] == finished[2]['n']


@pytest.mark.slow
def test_a_run_goes_on_with_its_blocks_in_another_form(tmp_path, toy, monkeypatch):
  config = toy(**{'model.depth': 2, 'optimizer.name': 'sgd', 'log.units': True})
  train(config, tmp_path / 'whole', QUIET, ONE)
  with monkeypatch.context() as patch:
    stop_at(patch, 10)
    config.model.update(scan_layers=True, remat=True)
    assert train(config, tmp_path / 'parts', QUIET, ONE) is None
  config.model.update(scan_layers=False, remat=False)
  assert train(config, tmp_path / 'parts', QUIET, ONE) is not None
  whole, parts = (params_of(tmp_path / name) for name in ('whole', 'parts'))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole, parts)


def test_a_run_without_times_in_its_checkpoint_counts_the_steps_that_it_times(finished, parts):
  """Older checkpoints have no times."""
  for path in (parts / 'checkpoints').glob('*/_CHECKPOINT_METADATA'):
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {'custom_metadata': {}}))
  config = finished[1]
  result = train(config, parts, QUIET, ONE)
  assert_timed(result, config, result['steps'] - 14)
