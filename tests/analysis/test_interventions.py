"""Tests of interventions on units, against runs of the whole network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.analysis import interventions, unit_params
from hbf.analysis.capture import capture
from hbf.errors import UserError

KINDS = {
  'hyperbf': ('model=hyperbf', {}),
  'linear': (
    'model=hyperbf',
    {'model.stage2.kernel': 'ball_silu', 'model.stage2.normalization': 'none', 'model.stage2.coefficients': 'linear'},
  ),
  'mlp': ('model=vit', {'model.layer_scale': 0.5, 'model.pool': 'cls'}),
}


@pytest.fixture(scope='module', params=KINDS)
def any_run(request, made):
  arguments, changes = KINDS[request.param]
  return made(arguments, **changes)


@pytest.fixture(scope='module')
def labels(run):
  return run.test.labels[:16]


def test_the_last_units_are_the_last_block(any_run, images):
  """The outputs of the last units, with coefficients and bias, are what the last stage 2 adds to the tokens."""
  units = interventions.last_units(any_run, images)
  after = interventions.logits_of_tokens(any_run.model, any_run.task.shape, any_run.params, units.tokens)
  np.testing.assert_allclose(after, any_run.logits(images), rtol=1e-4, atol=1e-5)
  gone = np.ones((len(images), len(units.coefficients)), bool)
  none_left = unit_params.silence(any_run.params, 'block1', range(len(units.coefficients)))
  np.testing.assert_allclose(
    interventions.logits_of_tokens(any_run.model, any_run.task.shape, any_run.params, units.without(gone)),
    any_run.logits(images, none_left),
    rtol=1e-3,
    atol=1e-4,
  )


def test_silencing_each_unit_equals_running_the_network_again(any_run, images, labels):
  last = unit_params.count_units(any_run.params, 'block1') - 1
  units = interventions.last_units(any_run, images)
  found = dict(zip((0, last), interventions.silenced_one_by_one(any_run, units, labels, [0, last]), strict=True))
  for unit in found:
    params = unit_params.silence(any_run.params, 'block1', [unit])
    wanted = interventions.effect(any_run, params, images, labels)
    np.testing.assert_allclose(found[unit].loss, wanted.loss, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(found[unit].accuracy, wanted.accuracy)


def test_a_mean_has_its_interval():
  mean = interventions.Mean.of(np.array([1.0, 3.0, 5.0, 7.0]))
  assert mean == pytest.approx((4.0, 1.96 * np.sqrt(20 / 3) / 2))
  assert interventions.Mean.of(np.array([1.0])).half == np.inf


def same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_interventions_that_change_nothing_and_those_that_come_back(any_run):
  params = any_run.params
  same(unit_params.rescale(params, 'block0', [0, 2], 1.0), params)
  same(unit_params.swap(unit_params.swap(params, 'block0', 0, 3), 'block0', 3, 0), params)
  changed = unit_params.coefficients(unit_params.rescale(params, 'block0', [2], -2.0), 'block0')
  before = unit_params.coefficients(params, 'block0')
  np.testing.assert_array_equal(changed[2], -2 * before[2])
  np.testing.assert_array_equal(changed[:2], before[:2])


def test_moved_centers_respond_elsewhere(made, images):
  """The stage has two heads of 12 centers, so unit 13 is the second center of the second head."""
  run = made(**{'model.stage2.heads': 2, 'model.stage2.centers': 12})
  seen = capture(run.model, run.params, run.normalized(images))
  place = np.asarray(seen.points['block0'][0, 0]).reshape(2, -1)[1]
  moved = unit_params.move(run.params, 'block0', 13, jnp.asarray(place))
  responses = capture(run.model, moved, run.normalized(images)).log_kernels['block0']
  assert responses[0, 0, 13] == pytest.approx(0, abs=1e-3)  # a token at the center
  kept = np.arange(24) != 13
  np.testing.assert_array_equal(responses[..., kept], seen.log_kernels['block0'][..., kept])


def test_curves_of_removal(any_run, images):
  curves = interventions.removals(any_run, interventions.last_units(any_run, images))
  assert [*curves] == ['votes', 'gradient × response', 'random']
  whole = any_run.logits(images)
  answers = whole.argmax(axis=1)
  p = jax.nn.softmax(whole)[np.arange(len(images)), answers]
  count = unit_params.count_units(any_run.params, 'block1')
  bare = jax.nn.softmax(any_run.logits(images, unit_params.silence(any_run.params, 'block1', range(count))))
  for curve in curves.values():
    np.testing.assert_allclose(curve.probability[:, 0], p, rtol=1e-3)
    np.testing.assert_allclose(curve.probability[:, -1], bare[np.arange(len(images)), answers], rtol=1e-2, atol=1e-4)
    assert curve.areas.shape == (len(images),)
  assert curves['votes'].areas.mean() < curves['random'].areas.mean()


def test_the_gradient_orders_units_as_their_removal_by_a_little_does(any_run, images):
  """Importance is the derivative of the answer's excess logit. So it predicts the effect of a small rescaling."""
  units = interventions.last_units(any_run, images)
  found = interventions.importance(any_run, units)['gradient × response']
  before = any_run.logits(images)
  answers = before.argmax(axis=1)
  less = any_run.logits(images, unit_params.rescale(any_run.params, 'block1', [1], 0.99))
  excess = [np.take_along_axis(z, answers[:, None], 1)[:, 0] - z.mean(axis=1) for z in (before, less)]
  np.testing.assert_allclose((excess[0] - excess[1]) / 0.01, found[:, 1], rtol=0.1, atol=5e-4)


def test_random_centers_lie_on_tokens(run, images):
  points = interventions.points_of(run, images)
  other = interventions.with_random_centers(run, points, seed=0)
  for block, rows in points.items():
    places = np.asarray(other.params[block]['stage2']['centers'])[0]
    assert all((np.abs(rows - place).max(axis=1) == 0).any() for place in places)
    np.testing.assert_array_equal(
      other.params[block]['stage2']['coefficients'], run.params[block]['stage2']['coefficients']
    )


def test_wrong_interventions(run, made):
  with pytest.raises(UserError, match='block0 has no unit 99: expected 0 to 11'):
    unit_params.silence(run.params, 'block0', [3, 99])
  with pytest.raises(UserError, match="unknown block 'block9'"):
    unit_params.swap(run.params, 'block9', 0, 1)
  with pytest.raises(UserError, match=r'place has shape \(3,\): expected \(16,\)'):
    unit_params.move(run.params, 'block0', 0, jnp.zeros(3))
  with pytest.raises(UserError, match='are no centers'):
    unit_params.move(made('model=vit').params, 'block0', 0, jnp.zeros(16))
  with pytest.raises(UserError, match='stage 2 of block0 has no units'):
    unit_params.count_units(made('model=gated').params, 'block0')
