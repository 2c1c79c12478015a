"""Starts of centers from data, growth and replacement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.analysis import starts
from hbf.analysis import starts_study as study
from hbf.analysis.report.starts_report import draw, reached, table
from hbf.errors import UserError
from hbf.training.optimizer import make_optimizer
from hbf.training.state import Totals, TrainState

pytestmark = pytest.mark.slow  # a study is run by hand, and changes rarely

LAPTOP = {
  'model.stage2.normalize_inputs': True,
  'model.stage2.norm_affine': False,
  'model.stage2.normalization': 'none',
  'model.stage2.sigma_per': 'layer',
  'model.stage2.centers': 6,
}


@pytest.fixture(scope='module')
def laptop(made):
  return made(**LAPTOP)


@pytest.fixture(scope='module')
def shown(laptop):
  """Normalized test images and their labels."""
  images, labels = (z[:16] for z in laptop.test)
  return np.asarray(laptop.normalized(images)), labels


def test_least_squares_equals_a_dense_solve():
  rng = np.random.default_rng(0)
  inputs, targets = rng.normal(size=(50, 7)), rng.normal(size=(50, 3))
  ridge = starts.RIDGE * np.square(inputs).mean()
  stacked = np.concatenate([inputs, np.sqrt(50 * ridge) * np.eye(7)])
  expected = np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((7, 3))]))[0]
  np.testing.assert_allclose(starts.least_squares(inputs, targets), expected, rtol=1e-9)


def test_the_nearest_distance_equals_its_definition():
  centers = np.random.default_rng(0).normal(size=(9, 4))
  distances = np.linalg.norm(centers[:, None] - centers, axis=-1) + np.diag([np.inf] * 9)
  assert starts.nearest_distance(centers) == pytest.approx(distances.min(axis=0).mean())


def test_three_phases_set_centers_and_layers_as_described(laptop, shown):
  """The last block's coefficients equal a dense solve for what the first block leaves."""
  made = starts.three_phases(laptop.model, laptop.params, *shown, 'tokens', 3)
  points = starts.seen(laptop.model, made, shown[0]).points
  one_hot = np.eye(10)[shown[1]]
  rest = np.repeat(one_hot - one_hot.mean(axis=0), points['block0'].shape[1], axis=0)
  stage, codes = starts.centers_of(laptop.model), starts.class_codes(10, 16, 3)
  np.testing.assert_allclose(codes @ codes.T, 16 * np.eye(10), atol=1e-9)
  for block, tokens in points.items():
    unit = made[block]['stage2']
    rows = starts.responses(stage, unit, tokens)
    assert rows[:, :-1].mean() == pytest.approx(1, abs=1e-3)
    fit = starts.least_squares(rows, rest)
    weights = np.concatenate([unit['coefficients'][0], unit['bias'][None]])
    np.testing.assert_allclose(weights, fit @ codes, rtol=1e-2, atol=1e-3)
    rest = rest - rows @ fit
    centers = unit['centers'][0]
    np.testing.assert_allclose(np.linalg.norm(centers, axis=1), 4, rtol=1e-5)
    cosines = centers @ tokens.reshape(-1, 16).T / 16
    np.testing.assert_allclose(cosines.max(axis=1), 1, atol=1e-4)  # each center is a token
  assert starts.phases_operations(laptop.model, laptop.params, laptop.task.shape, 16, 'kmeans') > 0


def test_the_metric_of_the_agop_keeps_the_mean_distance():
  rng = np.random.default_rng(0)
  points, centers, before, diagonal = (rng.normal(size=shape) for shape in ((20, 4), (5, 4), (4,), (4,)))
  diagonal = diagonal**2
  after = starts.agop_weights(diagonal, before, points, centers)
  x, t = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (points, centers))
  means = [np.square(w * (x[:, None] - t)).sum(axis=-1).mean() for w in (before, after)]
  assert means[0] == pytest.approx(means[1])
  np.testing.assert_allclose(after**2 / diagonal, (after**2 / diagonal)[0])


def test_new_centers_keep_the_function_and_the_state_of_the_others(laptop, shown):
  config = laptop.restored.config.copy_and_resolve_references()
  config.optimizer.name = 'muon'
  optimizer = make_optimizer(config.optimizer, lambda step: 0.1)
  state = TrainState(jnp.asarray(3), laptop.params, optimizer.init(laptop.params), Totals.zeros())
  points = starts.seen(laptop.model, laptop.params, shown[0]).points
  new = starts.draw_tokens(points, np.arange(4), 5, 0)
  everything = {block: np.arange(6) for block in points}
  grown = starts.with_new_centers(state, everything, new)
  assert jax.tree.map(jnp.shape, optimizer.init(grown.params)) == jax.tree.map(jnp.shape, grown.opt_state)
  stage = starts.centers_of(laptop.model)
  for block, tokens in points.items():
    before, after = (state.params[block]['stage2'], grown.params[block]['stage2'])
    outputs = [unit.apply({'params': z}, tokens) for unit, z in ((stage, before), (stage.clone(centers=11), after))]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after['centers'][0, 6:], new[block])
  kept = starts.most_used(laptop.model, laptop.params, points, 4)
  assert all(len(set(rows)) == 4 for rows in kept.values())


def test_a_center_without_coefficients_is_the_least_used():
  found = starts.usage(np.ones((3, 2)), np.array([[0.0, 0.0], [3.0, 4.0]]))
  np.testing.assert_allclose(found, [0, 5])


def test_other_stages_are_refused(laptop, toy):
  with pytest.raises(UserError, match='no centers in stage 2'):
    starts.centers_of(laptop.task.make_model(toy('model=vit').model))
  config = laptop.restored.config.copy_and_resolve_references()
  config.model.stage2.normalization = 'layer'
  with pytest.raises(UserError, match='normalization is layer'):
    starts.centers_of(laptop.task.make_model(config.model))


def test_an_accuracy_is_reached_between_two_evaluations():
  curve = [{'held_out': a, 'operations': o} for a, o in ((10, 1), (30, 3), (20, 4), (50, 6))]
  assert [reached(curve, a, 'operations') for a in (5, 20, 40, 60)] == [1, 2, pytest.approx(5.33, abs=0.01), None]


@pytest.mark.slow
def test_every_arm_trains_and_is_counted(toy, tmp_path):
  config = toy(
    'model=hyperbf',
    **LAPTOP,
    **{'model.pool': 'mean', 'data.validation': 0.2, 'train.steps_per_call': 1, 'evaluate.every': '0.25epochs'},
  )
  rows = [study.run_arm(arm, config, 0) for arm in study.ARMS if 'random' not in arm.name]
  by_name = {row['arm']: row for row in rows}
  assert len({row['parameters'] for row in rows}) == 1
  assert by_name['Muon']['operations'] == by_name['AdamW']['operations']
  assert by_name['three phases, k-means']['operations'] > by_name['Muon']['operations']
  assert all(row['curve'][-1]['operations'] == row['operations'] for row in rows)
  draw({'rows': rows}, tmp_path / 'x.png')
  assert table({'rows': rows}).count('\n') == len(rows) + 1
