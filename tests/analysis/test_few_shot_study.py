"""New classes from few images, and tasks one after the other: the methods against their definitions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.analysis import few_shot_methods, few_shot_study, split_cifar
from hbf.analysis.few_shot_methods import METHODS, Labeled
from hbf.analysis.report.few_shot_report import draw, forgetting, tables
from hbf.editing.guard import metric_of_classes
from hbf.errors import UserError
from hbf.models.edited import Observed
from hbf.nn.hyperbf import HyperBFCenters

pytestmark = pytest.mark.slow  # a study is run by hand, and changes rarely

F, BASE = 6, 4


def labeled(first, classes, each, seed):
  """Images of `classes` classes from `first` on: normal features around random means."""
  random = np.random.default_rng(seed)
  labels = np.repeat(np.arange(first, first + classes), each)
  means = 3 * np.random.default_rng(9).normal(size=(first + classes, F))
  features = (means[labels] + random.normal(size=(len(labels), F))).astype(np.float32)
  logits = random.normal(size=(len(labels), BASE)).astype(np.float32)
  return Labeled(Observed(logits, features[:, :2], features), labels)


@pytest.fixture
def base(monkeypatch):
  monkeypatch.setattr(few_shot_methods, 'UNITS', 12)
  return labeled(0, BASE, 20, 0)


@pytest.fixture
def new():
  return labeled(BASE, 2, 3, 1)


@pytest.mark.parametrize('name', METHODS)
def test_a_method_learns_new_classes_and_works_without_any(name, base, new):
  entry = METHODS[name]
  method, test = entry.method(base), labeled(0, BASE + 2, 30, 2)
  best = 0.0
  for trial in entry.trials:
    assert method.learn(new.below(BASE), trial)(test.seen).shape == (180, BASE)
    scores = method.learn(new, trial)(test.seen)
    assert scores.shape == (180, BASE + 2)
    answers = scores.argmax(axis=1)
    best = max(best, float((answers == test.labels)[test.labels >= BASE].mean()))
  assert best > 0.7


@pytest.mark.parametrize('method', [few_shot_methods.RandomFeatures, few_shot_methods.HyperBFInMetric])
def test_the_regression_is_the_weighted_least_squares_solution_of_all_images(method, base, new):
  """The solution in float64 with all images at once."""
  trial = {'sigma': 0.5, 'ridge': 0.1, 'balance': 0.5}
  made, test = method(base), labeled(0, BASE + 2, 5, 2)
  found = made.learn(new, trial)(test.seen)

  def hidden(seen):
    x = seen.features
    return np.concatenate([made.fixed(x, 0.5), made.added(x, new.seen.features, 0.5)], axis=1).astype(np.float64)

  both = few_shot_methods.joined(base, new)
  h, y = hidden(both.seen), np.eye(BASE + 2)[both.labels]
  weights = np.bincount(both.labels)[both.labels] ** -0.5
  moment = (h.T * weights) @ h
  moment += 0.1 * np.trace(moment) / len(moment) * np.eye(len(moment))
  expected = hidden(test.seen) @ np.linalg.solve(moment, (h.T * weights) @ y)
  np.testing.assert_allclose(found, expected, atol=2e-4)


def test_beside_the_head_new_images_get_their_margin_and_base_logits_stay(base, new):
  made = few_shot_methods.HyperBFBesideHead(base)
  found = made.learn(new, {'sigma': 0.2, 'margin': 4.0})(new.seen)
  np.testing.assert_array_equal(found[:, :BASE], new.seen.logits)
  lead = found[np.arange(6), new.labels] - new.seen.logits.max(axis=1)
  np.testing.assert_allclose(lead, 4, atol=1e-3)


def test_a_center_wins_over_the_heads_answer_where_it_is_nearer(base, new):
  made, test = few_shot_methods.HeadAndCenters(base), labeled(0, BASE + 2, 30, 2)
  found = made.learn(new, {'ridge': 0.3, 'offset': 0.0})(test.seen)
  np.testing.assert_array_equal(found[:, :BASE], test.seen.logits)
  w = metric_of_classes(base.seen.features, base.labels, 0.3)
  means = few_shot_methods.means_of(few_shot_methods.joined(base, new))
  away = np.linalg.norm((test.seen.features[:, None] - means) @ w.T, axis=-1)
  answers = test.seen.logits.argmax(axis=1)
  wins = away[:, BASE:].min(axis=1) < away[np.arange(180), answers]
  np.testing.assert_array_equal(found.argmax(axis=1), np.where(wins, BASE + away[:, BASE:].argmin(axis=1), answers))


def test_a_network_whose_training_a_signal_stopped_is_not_measured(monkeypatch, tmp_path):
  monkeypatch.setattr(few_shot_study, 'train', lambda *_, **__: None)
  with pytest.raises(UserError, match='a signal stopped the training: run the command again'):
    few_shot_study.trained('vit', 0, _random_images(), tmp_path)


def test_few_images_are_sorted_by_class():
  labels = np.random.default_rng(0).integers(0, 7, 500)
  few = few_shot_study.few_images(labels, 3)
  assert labels[few].tolist() == np.repeat(np.arange(7), few_shot_study.SHOTS).tolist()
  assert len(set(few)) == len(few)


@pytest.mark.parametrize('options', [{}, {'kernel': 'ball_silu', 'coefficients': 'linear', 'normalization': 'none'}])
def test_only_the_nearest_centers_respond(options):
  """The output is the sum over the three nearest centers of each token, and so are the gradients."""
  stage = HyperBFCenters(12, metric='identity', centers_init='normal', **({'normalization': 'none'} | options))
  tokens = jax.random.normal(jax.random.key(0), (2, 5, 4))
  params = stage.init(jax.random.key(1), tokens)
  with nn.intercept_methods(split_cifar.keep_top(3)):
    out = stage.apply(params, tokens)
    gradient = jax.grad(lambda p: jnp.sum(stage.apply(p, tokens[:1, :1]) ** 2))(params)['params']
  _, kept = stage.apply(params, tokens, mutable=['responses'])
  responses, log_k = (kept['responses'][name][0][0] for name in ('responses', 'log_kernels'))
  nearest = np.argsort(-np.asarray(log_k), axis=1)[:, :3]
  coefficients = np.asarray(params['params']['coefficients'])[0]
  expected = [np.asarray(responses)[i, rows] @ coefficients[rows] for i, rows in enumerate(nearest)]
  np.testing.assert_allclose(np.asarray(out).reshape(10, 4), expected, atol=1e-5)
  moved = np.abs(np.asarray(gradient['coefficients'])[0]).max(axis=1) > 0
  assert set(np.flatnonzero(moved)) <= set(nearest[0])


def test_the_memory_has_equally_many_images_of_each_class():
  random, memory = np.random.default_rng(0), split_cifar.Images(np.zeros((0, 1)), np.zeros(0, int))
  for first in (0, 2, 4):
    labels = random.permutation(np.repeat([first, first + 1], 600))
    memory = split_cifar._remember(memory, split_cifar.Images(labels[:, None], labels), random)
  assert np.bincount(memory.labels).tolist() == [83] * 6
  assert (memory.images[:, 0] == memory.labels).all()


def test_forgetting_is_the_mean_fall_from_the_end_of_a_tasks_training():
  assert forgetting({'sessions': [[90.0], [50.0, 80.0], [30.0, 60.0, 70.0]]}, 'sessions') == pytest.approx(40)


def test_tables_and_picture(tmp_path):
  after = [{'all': 40.0 - n, 'base': 41.0, **({'new': 10.0} if n else {})} for n in range(3)]
  rows = [
    {'model': 'hyperbf', 'draw': seed, 'method': method, 'sessions': sessions, 'trials': [], 'best': 0}
    for seed in (0, 1)
    for method, sessions in (('base classes only', after[:1]), ('nearest class mean', after))
  ]
  split = [
    {'seed': 0, 'arm': 'MLP', 'replay': replay, 'sessions': [[90.0], [50.0, 80.0]], 'told': [[90.0], [70.0, 80.0]]}
    for replay in (False, True)
  ]
  measured = {'rows': rows, 'split': split}
  lines = tables(measured).splitlines()
  assert '38.00 (0.00)' in lines[3] and '65.00' in lines[-1] and '40.00' in lines[-1]
  draw(measured, tmp_path / 'few-shot.png')
  assert (tmp_path / 'few-shot.png').stat().st_size > 10_000


@pytest.mark.parametrize('flag', ['--draws', '--seeds'])
def test_a_study_without_draws_or_seeds_is_refused(flag, tmp_path, capsys):
  assert few_shot_study.main([f'--out={tmp_path}', f'{flag}=0']) == 1
  assert f"argument {flag}: '0'; expected a whole number, at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_study_at_a_small_size(monkeypatch, tmp_path):
  sizes = {'BASE': 6, 'SESSION': 2, 'PRETENDED': 2, 'EPOCHS': 1.0, 'RATES': (1e-2,), 'STEPS': 2}
  for name, value in sizes.items():
    monkeypatch.setattr(few_shot_study, name, value)
  for name, value in {'RATES': (1e-3,), 'TRIED': 140, 'TRAINED': 140, 'HELD_OUT': 20, 'MEMORY': 40}.items():
    monkeypatch.setattr(split_cifar, name, value)
  monkeypatch.setattr(few_shot_methods, 'UNITS', 20)
  monkeypatch.setattr(few_shot_study, 'read_images', lambda *_: _random_images())
  assert few_shot_study.main([f'--out={tmp_path}', '--draws=1', '--seeds=1']) == 0
  assert few_shot_study.main([f'--out={tmp_path}', '--draws=1', '--report']) == 0


def _random_images():
  random = np.random.default_rng(0)
  return {
    split: (
      random.integers(0, 256, (10 * n, 32, 32, 3)).astype(np.uint8),
      np.repeat(np.arange(10), n).astype(np.int32),
    )
    for split, n in (('train', 160), ('test', 20))
  }
