"""Real runs of a toy model on the digits."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from hbf.errors import UserError
from hbf.models.build import abstract_params
from hbf.training.checkpoints import Checkpoints
from hbf.training.evaluate import evaluate_workdir
from hbf.training.experiment import prepare, with_sharding
from hbf.training.loop import train
from hbf.training.reporter import Diverged, Reporter
from hbf.training.writers import read_metrics

ROOT = pathlib.Path(__file__).parents[2]
QUIET = Console(file=open(os.devnull, 'w'))  # noqa: SIM115 (lives as long as the tests)
TIMES = ('images_per_second', 'seconds')


@pytest.fixture(autouse=True)
def one_device(use_devices):
  use_devices(1)


def timeless(workdir):
  return [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(workdir)]


def params_of(workdir, config):
  experiment = prepare(config)
  checkpoints = Checkpoints(workdir / 'checkpoints', read_only=True)
  abstract = with_sharding(abstract_params(experiment.model, (8, 8, 1)), experiment.mesh)
  return jax.tree.map(np.asarray, checkpoints.restore_params(checkpoints.find('latest'), abstract))


def assert_same_run(first, second, config):
  """Bit for bit the same parameters and metrics."""
  jax.tree.map(np.testing.assert_array_equal, params_of(first, config), params_of(second, config))
  assert timeless(first) == timeless(second)


def test_a_run_leaves_what_the_contract_says(tmp_path, toy):
  result = train(toy(), tmp_path, QUIET)
  keys = 'dataset model recipe seed params flops_per_image steps epochs split n correct accuracy top5 nll ece '
  keys += 'train_seconds compile_seconds images_per_second peak_memory_bytes device commit versions'
  assert list(result) == keys.split()
  assert json.loads((tmp_path / 'result.json').read_text()) == result
  assert result['accuracy'] == pytest.approx(100 * result['correct'] / result['n'])
  lines = read_metrics(tmp_path)
  assert {line['split'] for line in lines} == {'train', 'validation', 'test'}
  assert [line['step'] for line in lines if line['split'] == 'train'] == [5, 10, 15, 20, 21]
  assert all('images_per_second' in line for line in lines if line['split'] == 'train')
  evaluation = evaluate_workdir(tmp_path, 'latest', 'test')
  assert evaluation.result['correct'] == result['correct']
  assert json.loads((tmp_path / 'eval-test-21.json').read_text()) == evaluation.result


def test_a_finished_run_is_not_touched_again(tmp_path, toy):
  first = train(toy(), tmp_path, QUIET)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*') if path.is_file() and path.name != '.lock'}
  assert train(toy(), tmp_path, QUIET) == first
  assert before == {path: path.stat().st_mtime_ns for path in before}


def test_training_learns(tmp_path, toy):
  changes = {'train.epochs': 8.0, 'model.width': 32, 'model.stage2.centres': 32, 'data.crop': 0}
  train(toy(**changes), tmp_path, QUIET)
  accuracy = [line['accuracy'] for line in read_metrics(tmp_path) if line['split'] == 'validation']
  assert accuracy[-1] > 60  # ten classes


def stop_at(monkeypatch, stop):
  """Sends this process SIGTERM when step `stop` is reported."""
  report = Reporter.report

  def reporting(self, step, state):
    if step == stop:
      os.kill(os.getpid(), signal.SIGTERM)
    return report(self, step, state)

  monkeypatch.setattr(Reporter, 'report', reporting)


@pytest.mark.parametrize('arguments', ['model=hyperbf', pytest.param('model=vit', marks=pytest.mark.slow)])
def test_sigterm_saves_and_the_same_call_goes_on_exactly(tmp_path, toy, monkeypatch, arguments):
  """Also if the parts cut the steps into other calls."""
  config = toy(arguments, **{'model.dropout': 0.1, 'train.epochs': 2.0, 'log.every': '7steps'})
  train(config, tmp_path / 'whole', QUIET)
  with monkeypatch.context() as patch:
    stop_at(patch, 14)
    config.train.steps_per_call = 4
    assert train(config, tmp_path / 'parts', QUIET) is None
  assert not (tmp_path / 'parts' / 'result.json').exists()
  config.train.steps_per_call = 1
  assert train(config, tmp_path / 'parts', QUIET) is not None
  assert_same_run(tmp_path / 'whole', tmp_path / 'parts', config)


@pytest.mark.slow
def test_a_run_goes_on_with_its_blocks_in_another_form(tmp_path, toy, monkeypatch):
  config = toy(**{'model.depth': 2, 'optimizer.name': 'sgd'})
  train(config, tmp_path / 'whole', QUIET)
  with monkeypatch.context() as patch:
    stop_at(patch, 10)
    config.model.update(scan_layers=True, remat=True)
    assert train(config, tmp_path / 'parts', QUIET) is None
  config.model.update(scan_layers=False, remat=False)
  assert train(config, tmp_path / 'parts', QUIET) is not None
  whole, parts = (params_of(tmp_path / name, config) for name in ('whole', 'parts'))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), whole, parts)


@pytest.mark.parametrize('kind', ['device', pytest.param('stream', marks=pytest.mark.slow)])
def test_kill_9_in_an_epoch_changes_nothing(tmp_path, toy, digits_dir, kind):
  changes = {'train.epochs': 6.0, 'checkpoint.every': '8steps', 'log.every': '3steps', 'data.input': kind}
  changes |= {'model.width': 16, 'model.depth': 1, 'model.heads': 2, 'model.stage2.centres': 12}
  changes |= {'data.dir': str(digits_dir), 'evaluate.every': '1epoch', 'data.workers': 1, 'train.steps_per_call': 2}
  flags = [f'--config.{key}={value}' for key, value in changes.items()]
  environment = os.environ | {'XLA_FLAGS': ''}

  def start(workdir):
    command = [sys.executable, 'train.py', f'--workdir={workdir}', *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

  assert start(tmp_path / 'whole').wait() == 0
  killed = start(tmp_path / 'killed')
  while not any(line['step'] >= 33 for line in read_metrics(tmp_path / 'killed')):
    assert killed.poll() is None, 'the run ended before it could be killed'
    time.sleep(0.01)
  killed.kill()
  assert killed.wait() == -signal.SIGKILL
  assert not (tmp_path / 'killed' / 'result.json').exists()
  assert start(tmp_path / 'killed').wait() == 0
  assert_same_run(tmp_path / 'whole', tmp_path / 'killed', toy(**changes))


def test_both_inputs_train_the_same_model(tmp_path, toy):
  results = {}
  for kind in ('device', 'stream'):
    config = toy(**{'data.input': kind, 'data.workers': 0})
    train(config, tmp_path / kind, QUIET)
    results[kind] = params_of(tmp_path / kind, config)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results['device'], results['stream'])


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path, toy):
  results = {}
  for parts in (1, 4):
    config = toy(**{'train.accumulate': parts, 'optimizer.name': 'sgd'})
    train(config, tmp_path / str(parts), QUIET)
    results[parts] = params_of(tmp_path / str(parts), config)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results[1], results[4])


def test_device_count_does_not_matter(tmp_path, toy, use_devices):
  results = {}
  for count in (1, 2):
    use_devices(count)
    config = toy(**{'optimizer.name': 'sgd', 'train.epochs': 0.2})
    train(config, tmp_path / str(count), QUIET)
    results[count] = params_of(tmp_path / str(count), config)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), results[2], results[1])


def test_divergence_stops_the_run_and_leaves_a_finite_checkpoint(tmp_path, toy):
  changes = {'optimizer.name': 'sgd', 'optimizer.clip': 0.0, 'optimizer.learning_rate': 1e30}
  changes |= {'optimizer.warmup': '12steps', 'checkpoint.every': '1steps', 'optimizer.schedule': 'constant'}
  config = toy(**changes)
  with pytest.raises(Diverged, match='not finite at step'):
    train(config, tmp_path, QUIET)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_of(tmp_path, config)))
  assert not (tmp_path / 'result.json').exists()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.batch_size': 60}, r'train.batch_size 60 cannot be shared by 8 devices: use a multiple of 8, such as 56'),
    ({'train.batch_size': 4096}, r'more than the 1298 examples'),
    ({'model.heads': 3}, r'a width of 16 is not divisible by 3 heads'),
    ({'model.patch': 3}, r"patches of 3 pixels don't divide images of 8×8"),
    ({'model.name': 'vit'}, r"unknown option of stage 1 'softmax' 'kernel'"),
    ({'model.pool': 'clss'}, r"unknown pool 'clss': did you mean 'cls'"),
    ({'model.dtype': 'float16'}, r"unknown model.dtype 'float16'"),
    ({'model.stage1.kernel': 'gausian'}, r"unknown kernel 'gausian': did you mean 'gaussian'"),
    ({'model.stage2.metric': 'diag'}, r"unknown metric 'diag'"),
    ({'model.stage2.normalisation': 'softmax'}, r"unknown normalisation 'softmax'"),
    ({'model.stage2.centres_init': 'k-means'}, r"unknown centres_init 'k-means': did you mean 'kmeans'"),
    ({'model.stage2.width': 'token'}, r"unknown width 'token'"),
    ({'data.name': 'digit'}, r"unknown data set 'digit': did you mean 'digits'"),
    ({'data.input': 'disk'}, r"unknown data.input 'disk'"),
    ({'data.validation': 1.5}, r'data.validation is the part of train held out'),
    ({'data.mean': (0.5,)}, r'give both data.mean and data.std'),
    ({'train.steps_per_call': -1}, r'train.steps_per_call must be 1 or more'),
    ({'train.epochs': 0.0}, r'train.epochs must be more than 0'),
    ({'optimizer.name': 'adam'}, r"unknown optimizer.name 'adam': did you mean 'adamw'"),
    ({'checkpoint.every': '1 month'}, r"checkpoint.every: '1 month' isn't a duration"),
  ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path, toy, use_devices, changes, message):
  use_devices(8)
  with pytest.raises(UserError, match=message):
    train(toy(**changes), tmp_path / 'run', QUIET)
  assert not (tmp_path / 'run').exists()


def test_a_workdir_of_another_config_is_left_as_it_is(tmp_path, toy):
  train(toy(), tmp_path, QUIET)
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  with pytest.raises(UserError, match='holds a run of another config'):
    train(toy(seed=1), tmp_path, QUIET)
  assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize(
  ('checkpoint', 'split', 'message'), [('9', 'test', 'no checkpoint'), ('latest', 'tests', "did you mean 'test'")]
)
def test_evaluation_names_what_there_is(tmp_path, toy, checkpoint, split, message):
  train(toy(), tmp_path, QUIET)
  with pytest.raises(UserError, match=message):
    evaluate_workdir(tmp_path, checkpoint, split)
