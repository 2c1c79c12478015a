"""Tests of more epochs for a run that has begun or is finished."""

import json
import shutil

import jax
import numpy as np
import pytest
from toy_runs import ONE, QUIET, assert_same_run, params_of, save_untrained, stop_at, timeless

from hbf.errors import UserError
from hbf.training import startup
from hbf.training.experiment import prepare
from hbf.training.loop import train
from hbf.training.workdir import load_config

CONSTANT = {'optimizer.schedule': 'constant', 'optimizer.warmup': '3steps', 'train.average': 0.9}


@pytest.fixture(scope='module')
def config(toy):
  return lambda epochs, **changes: toy('model=hyperbf', **{'train.epochs': epochs}, **CONSTANT | changes)


@pytest.fixture(scope='module')
def whole(config, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  train(config(1.0), workdir, QUIET, ONE)
  return workdir


def test_a_finished_run_goes_on_exactly(config, whole, tmp_path):
  first = train(config(0.5), tmp_path, QUIET, ONE)
  result = train(config(1.0), tmp_path, QUIET, ONE)
  assert_same_parameters(tmp_path, whole)
  assert result['correct'] == json.loads((whole / 'result.json').read_text())['correct']
  assert json.loads((tmp_path / f'result-{first["steps"]}.json').read_text()) == first
  assert load_config(tmp_path).train.epochs == 1.0
  assert train(config(1.0), tmp_path, QUIET, ONE) == result  # it is finished


@pytest.mark.slow
def test_a_stopped_run_goes_on_exactly(config, whole, tmp_path):
  with pytest.MonkeyPatch.context() as patch:
    stop_at(patch, 5)
    assert train(config(0.5), tmp_path, QUIET, ONE) is None
  assert train(config(1.0), tmp_path, QUIET, ONE) is not None
  assert_same_run(tmp_path, whole)


def assert_same_parameters(one, other):
  for average in (False, True):
    jax.tree.map(np.testing.assert_array_equal, params_of(one, average), params_of(other, average))


@pytest.fixture
def described(whole, tmp_path):
  """Return a function that copies the finished run and changes keys in its config.json."""

  def make(changes):
    folder = shutil.copytree(whole, tmp_path / 'copy')
    stored = json.loads((folder / 'config.json').read_text())
    for key, value in changes.items():
      section, name = key.split('.')
      stored[section][name] = value
    (folder / 'config.json').write_text(json.dumps(stored))
    return folder

  return make


def test_a_finished_run_without_checkpoints_is_refused(config, whole, tmp_path):
  """It would begin anew, and its log would be lost."""
  folder = shutil.copytree(whole, tmp_path / 'copy', ignore=shutil.ignore_patterns('checkpoints'))
  assert_refused(folder, config(2.0), 'holds a finished run of 1 epochs without checkpoints, so it cannot go on')


@pytest.mark.parametrize('changes', [
  {'optimizer.schedule': 'cosine'},
  {'optimizer.warmup': '10%'},
  {'optimizer.schedule': 'wsd', 'optimizer.decay': '60%'},
], ids=str)  # fmt: skip
def test_other_learning_rates_so_far_are_refused(config, described, changes):
  assert_refused(
    described(changes),
    config(2.0, **changes),
    r'cannot be lengthened. Expected a constant schedule.*--config.init_from=',
  )


@pytest.mark.parametrize('changes', [
  {'train.patience': 3, 'evaluate.every': '8steps'},  # the shorter run also evaluates at its end, step 21
  {'optimizer.schedule': 'plateau', 'evaluate.every': '50%'},
], ids=str)  # fmt: skip
def test_scores_at_other_steps_are_refused_if_the_run_depends_on_them(config, described, changes):
  assert_refused(
    described(changes),
    config(2.0, **changes),
    r'evaluations at other steps until step 21 .* Expected a period in steps',
  )


@pytest.mark.parametrize('changes', [
  {'evaluate.every': '8steps'},
  {'train.patience': 3, 'optimizer.schedule': 'plateau'},  # with an evaluation after each epoch
], ids=str)  # fmt: skip
def test_scores_at_the_same_steps_or_of_no_use_allow_more_epochs(config, described, changes):
  assert_lengthened(described(changes), config(2.0, **changes))


@pytest.mark.slow
def test_a_rate_that_follows_the_scores_goes_on_exactly(config, tmp_path):
  changes = {'optimizer.schedule': 'plateau', 'optimizer.plateau_patience': 1, 'train.patience': 9}
  changes |= {'evaluate.every': '0.25epochs', 'optimizer.learning_rate': 0.1, 'optimizer.plateau_factor': 0.5}
  for epochs, folder in ((1.0, 'run'), (2.0, 'run'), (2.0, 'whole')):
    train(config(epochs, **changes), tmp_path / folder, QUIET, ONE)
  assert_same_parameters(tmp_path / 'run', tmp_path / 'whole')
  rates = [line['learning_rate'] for line in timeless(tmp_path / 'run') if line['split'] == 'train']
  assert rates[-1] < rates[0]


def test_wsd_may_go_on_before_its_decay(config, described):
  changes = {'optimizer.schedule': 'wsd', 'optimizer.decay': '1steps'}  # the decay has not begun at its start
  assert_lengthened(described(changes), config(2.0, **changes))


def test_a_run_that_stopped_before_its_first_checkpoint_may_become_longer(config, described):
  folder = described({})
  shutil.rmtree(folder / 'checkpoints')
  (folder / 'result.json').unlink()
  assert_lengthened(folder, config(2.0))


def test_a_teacher_with_other_weights_is_refused(config, described, tmp_path):
  save_untrained(config(1.0), tmp_path / 'teacher')
  changes = {'train.teacher': str(tmp_path / 'teacher'), 'train.teacher_weight': 0.5}
  folder = described(changes)
  (folder / 'teacher.json').write_text('{"sha256": "another"}')
  assert_refused(folder, config(2.0, **changes), r'holds other weights than when the run in .* began')


def assert_refused(folder, longer, message):
  before = contents(folder)
  with pytest.raises(UserError, match=message):
    train(longer, folder, QUIET, ONE)
  assert contents(folder) == before


def assert_lengthened(folder, config):
  identity = json.loads((folder / 'data.json').read_text())
  with startup.claimed(folder, prepare(config, devices=ONE), identity):
    assert load_config(folder).train.epochs == config.train.epochs and not (folder / 'result.json').exists()


def test_fewer_epochs_and_other_keys_are_another_run(config, whole):
  with pytest.raises(UserError, match=r'train.epochs is 1.0 there, 0.5 here'):
    train(config(0.5), whole, QUIET, ONE)
  with pytest.raises(UserError, match=r'seed is 0 there, 1 here; train.epochs is 1.0 there, 2.0 here'):
    train(config(2.0, seed=1), whole, QUIET, ONE)


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != '.lock'}
