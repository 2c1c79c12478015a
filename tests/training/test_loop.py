"""Tests of real runs of a toy model on the digits."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import shutil
import signal
import time
import types

import jax
import numpy as np
import pytest
from rich.console import Console
from toy_runs import ONE, QUIET, assert_timed, params_of, stop_at

from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY, CLASSIFICATION
from hbf.tasks import classification, images
from hbf.training import loop, startup
from hbf.training.checkpoints import Checkpoints
from hbf.training.evaluate import Evaluation, evaluate_workdir
from hbf.training.experiment import prepare
from hbf.training.loop import train
from hbf.training.state import Diverged
from hbf.training.workdir import load_config, read_predictions, with_measured
from hbf.training.writers import read_metrics, validation_scores


def files_in(workdir):
  return {path: path.stat().st_mtime_ns for path in workdir.rglob('*') if path.is_file() and path.name != '.lock'}


def test_a_run_leaves_what_the_contract_says(finished):
  workdir, _, result = finished
  keys = 'task dataset model recipe seed params flops_per_image steps epochs train_operations split '
  keys += 'n correct accuracy top5 nll ece '
  keys += 'average copies train_seconds compile_seconds images_per_second peak_memory_bytes device commit versions'
  assert list(result) == keys.split()
  assert json.loads((workdir / 'result.json').read_text()) == result
  assert result['accuracy'] == pytest.approx(100 * result['correct'] / result['n'])
  assert result['device'].startswith('1 × cpu')
  lines = read_metrics(workdir)
  assert {line['split'] for line in lines} == {'train', 'units', 'validation', 'test'}
  assert [line['step'] for line in lines if line['split'] == 'train'] == [7, 14, 21, 28, 35, 41]
  classes = json.loads((workdir / 'data.json').read_text())['classes']
  assert len(classes) == 10
  config = json.loads((workdir / 'config.json').read_text())
  assert config['optimizer']['center_rate'] == config['model']['width'] ** 0.5  # resolved, as all of it is
  assert 'expansion' not in config['model']


def test_an_evaluation_with_copies_has_a_file_of_its_own(tmp_path):
  scores = {'split': 'test', 'checkpoint': 3, 'evaluated': 'average'}
  for copies in ('', 'mirror'):
    Evaluation(scores, classification, copies).save(tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'eval-test-3-average-mirror.json',
    'eval-test-3-average.json',
  ]


def test_the_error_of_a_callback_is_raised_even_if_the_run_cannot_be_saved_after_it(monkeypatch, tmp_path):
  def fail(*_):
    raise KeyError('mine')

  def call_and_fail(config, workdir, console, devices, dataset, users, stopped):
    users(1, {}, None, last=False)
    raise Diverged('the loss is not finite')

  monkeypatch.setattr(loop, '_train', call_and_fail)
  with pytest.raises(KeyError, match='mine') as raised:
    train(None, tmp_path, QUIET, callbacks=[fail])
  assert isinstance(raised.value.__context__, Diverged)


def test_to_write_a_trace_is_no_training_time():
  did = []

  class Profile:
    def is_due(self, step):
      return step == 3

    def __call__(self, step, state):
      did.append(step)

  @contextlib.contextmanager
  def paused():
    did.append('pause')
    yield
    did.append('go on')

  for step in (2, 3):
    loop._profile(
      types.SimpleNamespace(profiler=Profile(), stopwatch=types.SimpleNamespace(paused=paused)), step, None
    )
  assert did == ['pause', 3, 'go on']


@pytest.mark.parametrize(('warmup', 'said'), [('2epochs', True), ('0.5epochs', False)])
def test_a_warm_up_longer_than_the_run_is_said(toy, tmp_path, warmup, said):
  printed = io.StringIO()
  experiment = prepare(toy('model=vit', **{'optimizer.warmup': warmup, 'train.epochs': 1.0}), devices=ONE)
  startup.introduce(experiment, tmp_path, Console(file=printed, width=500))
  assert ('warning: optimizer.warmup=2epochs is ' in printed.getvalue()) is said


@pytest.mark.parametrize(('parts', 'said'), [(1, 'steps of 64 on 1 × cpu'), (4, 'steps of 64 in 4 parts on 1 × cpu')])
def test_the_parts_of_a_batch_are_said(toy, tmp_path, parts, said):
  printed = io.StringIO()
  experiment = prepare(toy('model=vit', **{'train.accumulate': parts}), devices=ONE)
  startup.introduce(experiment, tmp_path, Console(file=printed, width=500))
  assert said in printed.getvalue()


def test_times_agree_with_each_other(finished):
  workdir, config, result = finished
  assert_timed(result, config, result['steps'])
  lines = [line for line in read_metrics(workdir) if line['split'] == 'train']
  ends = [(0, 0.0), *((line['step'], line['seconds']) for line in lines)]
  for line, ((before, begin), (step, end)) in zip(lines, itertools.pairwise(ends), strict=True):
    seconds = (step - before) * config.train.batch_size / line['images_per_second']
    assert end - begin == pytest.approx(seconds, abs=0.011)  # both are rounded


def test_the_log_tells_how_wide_the_kernels_become(finished):
  workdir, *_ = finished
  told = [line['sigmas']['block0'] for line in read_metrics(workdir) if line['split'] == 'train']
  for stage in ('stage1', 'stage2'):
    end = np.exp(np.asarray(params_of(workdir)['block0'][stage]['log_sigma'], np.float64)).mean()
    assert told[-1][stage] == pytest.approx(end, rel=1e-6)
    assert len({widths[stage] for widths in told}) == len(told)


def test_no_report_is_faster_than_its_steps_and_no_units_are_logged_unless_asked_for(tmp_path, toy, monkeypatch):
  """The last report is no faster either, although it follows at once after the one before it."""
  compiled, seconds = startup.compile_steps, 0.02

  def slowed(*arguments):
    steps, compile_seconds = compiled(*arguments)

    def slow_steps(*call):
      time.sleep(seconds)
      return jax.block_until_ready(steps(*call))

    return slow_steps, compile_seconds

  monkeypatch.setattr(startup, 'compile_steps', slowed)
  config = toy(**{'train.epochs': 0.3, 'log.every': '2steps', 'train.steps_per_call': 1, 'model.dropout': 0.1})
  result = train(config, tmp_path, QUIET, ONE)
  lines = read_metrics(tmp_path)
  assert 'units' not in {line['split'] for line in lines}
  rates = [line['images_per_second'] for line in lines if line['split'] == 'train']
  assert len(rates) == 4
  assert max(*rates, result['images_per_second']) <= 2 * config.train.batch_size / seconds


def test_a_finished_run_is_not_touched_again(finished, monkeypatch):
  workdir, config, result = finished
  monkeypatch.setattr(startup, 'latest_step', None)  # only a run that starts from a file has to know
  before = files_in(workdir)
  assert train(config, workdir, QUIET, ONE) == result
  assert files_in(workdir) == before


def test_evaluation_repeats_the_runs_own_figures(finished, tmp_path):
  """The scores are those of the parameters, and the different ones of their average."""
  workdir, _, result = finished
  before = files_in(workdir / 'checkpoints')
  names = ('n', 'correct', *(score.name for score in CLASSIFICATION))
  reported = {False: {name: result[name] for name in names}, True: result['average']}
  assert reported[False] != reported[True] and reported[False].keys() == reported[True].keys()
  for average, file in ((False, 'eval-test-41.json'), (True, 'eval-test-41-average.json')):
    found = evaluate_workdir(workdir, 'latest', 'test', ONE, average)
    evaluation = found.result
    assert {name: evaluation[name] for name in names} == reported[average]
    found.save(tmp_path / 'new')
    assert json.loads((tmp_path / 'new' / file).read_text()) == evaluation
    assert evaluation['evaluated'] == ('average' if average else 'parameters')
  assert result['copies'].keys() == result['average'].keys() | {'average'}
  for average, reported in ((False, result['copies']), (True, result['copies']['average'])):
    found = evaluate_workdir(workdir, 'latest', 'test', ONE, average).result['copies']
    assert found == {name: reported[name] for name in names} and found['nll'] != result['nll']
  assert 'copies' not in evaluate_workdir(workdir, 'latest', 'test', ONE, copies='none').result
  labels, predictions = read_predictions(workdir).values()
  assert (labels == predictions).sum() == result['correct']
  assert files_in(workdir / 'checkpoints') == before


def test_held_out_images_are_reported_for_the_average_beside_the_parameters(finished):
  workdir, _, _ = finished
  lines = [line for line in read_metrics(workdir) if line['split'] == 'validation']
  names = [score.name for score in CLASSIFICATION]
  assert [line['step'] for line in lines] == [21, 41]
  for line in lines:
    assert list(line) == ['step', 'epoch', 'split', *names, 'average', 'copies']
    for average, reported in ((False, line), (True, line['average'])):
      found = evaluate_workdir(workdir, str(line['step']), 'validation', ONE, average).result
      assert {name: reported[name] for name in names} == {name: found[name] for name in names}
  assert validation_scores(workdir, ACCURACY) == {line['step']: line['accuracy'] for line in lines}


def test_figures_that_cannot_be_saved_say_what_else_to_do(tmp_path):
  (tmp_path / 'file').touch()
  found = Evaluation({'split': 'test', 'checkpoint': 1, 'evaluated': 'parameters'}, None)
  with pytest.raises(UserError, match=r'file/eval-test-1\.json could not be written .* or give another .* --output'):
    found.save(tmp_path / 'file')


def test_a_folder_whose_name_looks_like_markup_is_named_as_it_is(finished, tmp_path):
  workdir, said = shutil.copytree(finished[0], tmp_path / 'a[' / 'b]'), io.StringIO()
  assert train(finished[1], workdir, Console(file=said, width=20), ONE) == finished[2]
  assert said.getvalue() == f'{workdir} is finished; this is its result\n'


def test_a_folder_that_cannot_be_is_refused_before_anything_is_prepared(toy, monkeypatch):
  monkeypatch.setattr(startup, 'prepare', None)
  with pytest.raises(UserError, match=r'gs://b/run is a URL'):
    train(toy(), pathlib.Path('gs://b/run'), QUIET, ONE)


def test_ctrl_c_during_compilation_ends_before_the_first_step(finished, tmp_path, monkeypatch):
  said = io.StringIO()
  monkeypatch.setattr(startup, 'compile_steps', lambda *_: (os.kill(os.getpid(), signal.SIGINT), 0.0))
  assert train(finished[1], tmp_path / 'run', Console(file=said, width=20), ONE) is None
  assert said.getvalue().endswith('\nstopped before step 1; the same command goes on from there\n')


@pytest.mark.parametrize(
  ('checkpoint', 'split', 'message'), [('9', 'test', 'no checkpoint'), ('latest', 'tests', "did you mean 'test'")]
)
def test_evaluation_names_what_there_is(finished, checkpoint, split, message):
  with pytest.raises(UserError, match=message):
    evaluate_workdir(finished[0], checkpoint, split, ONE)


def test_a_workdir_of_another_config_or_of_other_data_is_left_as_it_is(finished, toy, monkeypatch):
  workdir, config, _ = finished
  before = files_in(workdir)
  with pytest.raises(UserError, match='holds a run of another config'):
    train(toy(seed=1), workdir, QUIET, ONE)
  of_digits = images.identity
  others = {'classes': [*'abcdefghij']}
  monkeypatch.setattr(images, 'identity', lambda dataset: of_digits(dataset) | others)
  with pytest.raises(UserError, match=r'was trained on other data \(classes 0, 1, 2, 3, 4 and 5 more there, a, b, '):
    train(config, workdir, QUIET, ONE)
  with pytest.raises(UserError, match='was trained on other data'):
    evaluate_workdir(workdir, 'latest', 'test', ONE)
  assert files_in(workdir) == before


def test_the_measured_levels_of_a_run_are_used_for_its_data_only(finished):
  workdir, config, _ = finished
  asked = config.copy_and_resolve_references().unlock()
  asked.data.update(mean=(), std=())
  assert with_measured(asked, workdir).data.mean == load_config(workdir).data.mean != ()
  asked.data.name = 'cifar10'  # its images have more channels
  assert with_measured(asked, workdir).data.mean == ()


def test_training_learns(tmp_path, toy):
  config = toy(
    'model=vit', **{'train.epochs': 6.0, 'model.width': 32, 'model.stage2.hidden': 32, 'data.transforms': ()}
  )
  train(config, tmp_path, QUIET, ONE)
  scores = validation_scores(tmp_path, ACCURACY)
  assert scores[max(scores)] > 60  # ten classes


def test_the_best_checkpoint_is_kept_though_none_is_due_when_it_is_found(tmp_path, toy, monkeypatch):
  scores = iter([10.0, 50.0, 30.0, 50.0, 20.0])

  def scripted(counts):
    summary = summarize(counts)
    return summary | {'accuracy': next(scores)} if summary['n'] == 144 else summary

  summarize = classification.summarize
  monkeypatch.setattr(classification, 'summarize', scripted)
  changes = {'checkpoint.every': '1000steps', 'evaluate.every': '5steps', 'checkpoint.keep': 1, 'train.epochs': 1.2}
  config = toy(**{'model.dropout': 0.1, 'log.every': '7steps'} | changes)
  train(config, tmp_path, QUIET, ONE)
  scores = validation_scores(tmp_path, ACCURACY)
  assert scores == {5: 10.0, 10: 50.0, 15: 30.0, 20: 50.0, 25: 20.0}
  assert evaluate_workdir(tmp_path, 'best', 'train', ONE).result['checkpoint'] == 10
  checkpoints = Checkpoints(tmp_path / 'checkpoints', ranks=ACCURACY, scores=scores, read_only=True)
  assert (checkpoints.find('best'), checkpoints.latest) == (10, 25)


@pytest.mark.slow
def test_a_run_ends_early_at_the_same_step_though_it_was_interrupted(tmp_path, toy, monkeypatch):
  """The average has the scores 10, 50, 30, 50 and 20, and ranks. Two more evaluations were planned."""
  scores = iter([1.0, 10.0, 2.0, 50.0, 3.0, 30.0, 4.0, 50.0, 5.0, 20.0])  # parameters and average in turn

  def scripted(counts):
    summary = summarize(counts)
    return summary | {'accuracy': next(scores)} if summary['n'] == 144 else summary

  summarize = classification.summarize
  monkeypatch.setattr(classification, 'summarize', scripted)
  changes = {'train.patience': 3, 'evaluate.every': '5steps', 'log.every': '7steps', 'train.epochs': 1.7}
  changes |= {'train.average': 0.9, 'checkpoint.rank': 'average'}
  config = toy(**changes, **{'optimizer.skip': 2, 'checkpoint.keep': 1})
  with pytest.MonkeyPatch.context() as patch:
    stop_at(patch, 14)
    assert train(config, tmp_path, QUIET, ONE) is None
  result = train(config, tmp_path, QUIET, ONE)
  assert (result['steps'], result['planned_steps'], result['skipped']) == (25, 35, 0)
  assert result['epochs'] == pytest.approx(25 * 64 / 1298, abs=1e-4)
  averages = {5: 10.0, 10: 50.0, 15: 30.0, 20: 50.0, 25: 20.0}
  assert validation_scores(tmp_path, ACCURACY, 'average') == averages
  assert validation_scores(tmp_path, ACCURACY) == {5: 1.0, 10: 2.0, 15: 3.0, 20: 4.0, 25: 5.0}
  for which, step in (('best', 10), ('latest', 25)):
    assert evaluate_workdir(tmp_path, which, 'train', ONE).result['checkpoint'] == step
  (tmp_path / 'result.json').unlink()  # as if the process had died in the last evaluation
  assert train(config, tmp_path, QUIET, ONE)['correct'] == result['correct']


def test_divergence_stops_the_run_and_leaves_a_finite_checkpoint(tmp_path, toy):
  changes = {'optimizer.name': 'sgd', 'optimizer.clip': 0.0, 'optimizer.learning_rate': 1e30}
  changes |= {'optimizer.warmup': '12steps', 'checkpoint.every': '1steps', 'optimizer.schedule': 'constant'}
  config = toy('model=vit', **changes, **{'data.validation': 0.0})
  with pytest.raises(Diverged, match='not finite at step'):
    train(config, tmp_path, QUIET, ONE)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params_of(tmp_path)))
  assert not (tmp_path / 'result.json').exists()


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'train.batch_size': 60}, r'train.batch_size 60 cannot be shared by 8 devices: use a multiple of 8, such as 56'),
    ({'train.batch_size': 4096}, r'more than the 1298 examples of train: set it to 1298 or less'),
    ({'mesh.data': 3}, r'mesh.data 3 × mesh.fsdp 1 × mesh.tensor 1 cannot be formed of 8 devices'),
    ({'mesh.tensor': 4}, r'mesh.tensor 4 does not divide model.heads 2, .*: use a multiple of 4, such as 4'),
    (
      {'mesh.tensor': 2, 'train.batch_size': 30},
      r'train.batch_size 30 cannot be shared by mesh.data 4 × mesh.fsdp 1 = 4 shares of devices',
    ),
    ({'model.heads': 3}, r'a width of 16 is not divisible by 3 heads: .* \(model.width, model.heads\)'),
    ({'model.stage2.heads': 3}, r'not divisible by 3 heads: .* \(model.width, model.stage2.heads\)'),
    ({'model.patch': 3}, r"patches of 3 pixels don't divide images of 8×8: change it \(model.patch\)"),
    ({'model.name': 'vit'}, r"unknown option of stage 1 'softmax' 'kernel'"),
    ({'data.name': 'digit'}, r"unknown data set 'digit': did you mean 'digits'"),
    ({'data.mean': (0.5,)}, r'give both data.mean and data.std'),
    ({'data.transforms': (('flpi',),)}, r"unknown name in data.transforms 'flpi': did you mean 'flip'"),
    ({'data.transforms': (('shift', 8),)}, r"shift must be less than an image's side of 8 pixels: it is 8"),
    ({'data.mix': (('mixup', -1.0, 0.5),)}, r'alpha of mixup must be a number from 0.01 up: it is -1.0'),
    (
      {'data.mix': (('mixup', 0.8, 0.5),), 'train.batch_size': 1},
      r'data.mix needs another image .* train.batch_size to 2',
    ),
    (
      {'train.patience': 3, 'data.validation': 0.0},
      r'train.patience is 3, but no data are held out to evaluate: set',
    ),
    ({'data.validation': 0.9999}, r'data.validation 0.9999 leaves no example to train on'),
    (
      {'optimizer.minimum_rate': 0.1, 'optimizer.schedule': 'constant'},
      r'optimizer.minimum_rate is 0.1, but a constant schedule stays at the peak: set it to 0',
    ),
  ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path, toy, changes, message):
  with pytest.raises(UserError, match=message):
    train(toy(**changes), tmp_path / 'run', QUIET, jax.devices()[:8])
  assert not (tmp_path / 'run').exists()
