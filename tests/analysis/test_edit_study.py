"""Tests of the rivals of an edit: their responses, edits one after another, and the choice of trials."""

import numpy as np
import pytest

from hbf.analysis import edit_methods, edit_study
from hbf.analysis.edit_methods import METHODS, Base, Trial, in_order
from hbf.analysis.report import edit_report
from hbf.analysis.report.edit_report import draw, table
from hbf.errors import UserError
from hbf.models.edited import Observed


def observed(count, seed, classes=4, dims=6, width=5):
  rng = np.random.default_rng(seed)
  return Observed(rng.normal(size=(count, classes)), rng.normal(size=(count, dims)), rng.normal(size=(count, width)))


@pytest.fixture(scope='module')
def base():
  return Base(observed(50, 0), np.random.default_rng(9).normal(size=(6, 6)))


@pytest.fixture(scope='module')
def edited():
  return observed(8, 1)


LABELS = np.array([0, 1, 2, 3, 0, 1, 2, 3])


@pytest.mark.parametrize('name', METHODS)
def test_a_response_is_1_at_the_image_itself_and_an_edit_alone_makes_it_right(name, base, edited):
  method = METHODS[name]
  for trial in method.trials[:: max(1, len(method.trials) - 1)]:
    responses = method.respond(base, edited, LABELS, edited, trial.reach)
    np.testing.assert_allclose(np.diag(responses), 1, rtol=1e-6)
    now = edited.logits + np.diag(responses)[:, None] * method.changes(edited, LABELS, trial.margin)
    lead = now[np.arange(8), LABELS] - np.where(np.eye(4, dtype=bool)[LABELS], -np.inf, now).max(axis=1)
    assert np.all(lead >= trial.margin - 1e-6)


def test_a_ball_ends_at_the_nearest_other_image(base, edited):
  """The study's distance to the nearest image with another answer is `distance_to_others`, which `hbf.edit` uses."""
  from hbf.editing.guard import distance_to_others

  found = edit_methods.nearest_other(base, edited, LABELS, base.metric)
  for i, label in enumerate(LABELS):
    assert found[i] == pytest.approx(distance_to_others(base.guard, edited.points[i], label, base.metric))
  responses = METHODS['HyperBF ball, metric of copies'].respond(base, edited, LABELS, base.guard, 1.0)
  others = base.guard.logits.argmax(axis=1) != LABELS[:, None]
  assert responses[others].max() < 1e-9


def test_on_the_sphere_a_neuron_is_a_ball(base, edited):
  """For points of norm 1, a ReLU of the product with a point is a ball around this point."""
  neuron = METHODS['ReLU neuron on points of norm 1'].respond(base, edited, LABELS, base.guard, 1.44)
  mean = base.guard.points.mean(axis=0)

  def on_sphere(seen):
    z = (seen.points - mean) @ base.metric.T
    return seen._replace(points=z / np.linalg.norm(z, axis=1, keepdims=True))

  sphere = Base(on_sphere(base.guard), np.eye(6))
  ball = METHODS['HyperBF ball, identity metric'].respond(sphere, on_sphere(edited), LABELS, sphere.guard, 1.2)
  apart = (
    edit_methods.nearest_other(sphere, on_sphere(edited), LABELS, np.eye(6)) > 0.2
  )  # nearer ones have a least gap
  assert apart.sum() > 5
  np.testing.assert_allclose(neuron[apart], ball[apart], atol=1e-6)


def test_the_rank_one_update_is_the_least_squares_solution(base, edited):
  """No other update with the wanted change at one image changes the outputs for the guarded images less."""
  features = base.guard.features
  respond = METHODS['rank-one update of the head'].respond
  found = respond(base, edited, LABELS, base.guard, 0.0)[0]
  key = edited.features[0]
  moment = features.T @ features
  direction = np.linalg.solve(moment, key) / (key @ np.linalg.solve(moment, key))
  np.testing.assert_allclose(found, features @ direction, rtol=1e-6)
  for other in np.random.default_rng(0).normal(size=(20, len(key))):
    change = direction + other - key * (other @ key) / (key @ key)  # it has the same output at the image
    assert np.sum((features @ change) ** 2) >= np.sum((features @ direction) ** 2)


@pytest.mark.parametrize(
  'name', [name for name, method in METHODS.items() if method.interpolates and name != 'ReLU neuron']
)
def test_edits_in_order_give_all_images_the_logits_that_were_asked_for(name, base):
  """This includes images whose responses overlap. An image that earlier edits have made right gets no edit."""
  many, labels = observed(30, 3), np.random.default_rng(4).integers(0, 4, 30)
  method, trial = METHODS[name], Trial(1.0, 4.0)
  logits = in_order(method, base, many, labels, trial)(many)
  right = logits[np.arange(30), labels]
  lead = right - np.where(np.eye(4, dtype=bool)[labels], -np.inf, logits).max(axis=1)
  assert (np.abs(lead - 4) < 1e-3).sum() >= 15  # about a quarter was right before, and some are by others' edits
  assert (lead > 0).mean() > 0.9


def test_the_inverse_grows_by_a_column_and_a_row():
  matrix = np.random.default_rng(0).normal(size=(7, 7)) / 10
  np.fill_diagonal(matrix, 1 + edit_methods.RIDGE)
  inverse = np.zeros((0, 0))
  for n in range(7):
    inverse = edit_methods._bordered(inverse, matrix[:n, n], matrix[n, :n])
  np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-8)


def test_grace_answers_by_the_nearest_key(base):
  keys = Observed(np.zeros((2, 2)), np.array([[0.0] * 6, [1.0] + [0.0] * 5]), np.zeros((2, 5)))
  middle = Observed(np.zeros((2, 2)), np.array([[0.4] + [0.0] * 5, [0.6] + [0.0] * 5]), np.zeros((2, 5)))
  near = Base(base.guard._replace(logits=base.guard.logits[:, :2]), base.metric)
  logits = in_order(METHODS['GRACE, identity metric'], near, keys, np.array([1, 0]), Trial(50.0, 0.0))(middle)
  assert logits.argmax(axis=1).tolist() == [1, 0]


def test_the_best_trial_changes_few_answers():
  scores = [
    {'copies': c, 'changed': d, 'many_copies': c, 'many_others': 100 - d} for c, d in ((50, 0), (70, 0.2), (90, 3))
  ]
  assert edit_study.best_alone(scores) == 1
  assert edit_study.best_of_many(scores) == 1
  worse = [score | {'changed': score['changed'] + 1, 'many_others': 50 - score['changed']} for score in scores]
  assert edit_study.best_alone(worse) == 0
  assert edit_study.best_of_many(worse) == 0


def test_table_and_picture(tmp_path):
  after = [{'edits': n, 'edited': 99.0, 'copies': 90.0, 'others': 98.0, 'others_before': 99.5} for n in (1, 10)]
  alone = {'edited': 100.0, 'copies': 97.0, 'changed': 0.1}
  rows = [
    {'model': 'hyperbf', 'seed': seed, 'method': method, 'alone': alone | {'copies': 97.0 + seed}, 'many': many}
    | {'trials': [alone]}
    for seed in (0, 1)
    for method, many in (('no edit', []), ('lookup of the image', after))
  ]
  lines = table({'rows': rows}).splitlines()
  assert '97.50 (0.71)' in lines[3] and '| 99.50' in lines[2]
  draw({'rows': rows}, tmp_path / 'edit.png')
  assert (tmp_path / 'edit.png').stat().st_size > 10_000


def test_the_picture_has_the_numbers_of_edits_that_all_seeds_have(tmp_path, monkeypatch):
  """A seed with fewer mistakes has fewer edits."""
  after = [{'edits': n, 'copies': 90.0 + n, 'others': 98.0} for n in (1, 10, 12)]
  rows = [
    {'model': 'hyperbf', 'seed': seed, 'method': 'lookup of the image', 'trials': [], 'many': many}
    for seed, many in enumerate((after[::2], after[:2]))
  ]
  drawn = []
  monkeypatch.setattr(edit_report, 'write_png', lambda figure, path: drawn.append(figure))
  draw({'rows': rows}, tmp_path / 'edit.png')
  (line,) = drawn[0].axes[1].lines
  assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1], [91.0])


def test_a_split_without_mistakes_is_refused(run, images, monkeypatch):
  right = run.logits(images).argmax(axis=1)
  monkeypatch.setattr(edit_study, 'read_many', lambda *_: (images, right))
  with pytest.raises(UserError, match='all 16 images of test are answered right, so none is edited'):
    edit_study.open_split(run.restored, 'test', seed=0)
