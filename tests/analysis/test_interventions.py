"""Tests of interventions on units, against runs of the whole network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply

from hbf.analysis import interventions, unit_params
from hbf.analysis.capture import capture
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model
from hbf.tasks.registry import make_task

KINDS = {
  'hyperbf': ('model=hyperbf', {}),
  'linear': (
    'model=hyperbf',
    {'model.stage2.kernel': 'ball_silu', 'model.stage2.normalization': 'none', 'model.stage2.coefficients': 'linear'},
  ),
  'mlp': ('model=vit', {'model.layer_scale': 0.5, 'model.pool': 'cls'}),
  'merged': ('model=positional', {'model.merge': (1,), 'model.pool': 'mean'}),
}
# Networks that a unit can be added to.
PLAIN = {'model.stage2.normalization': 'none'}
GROWING = {
  'two heads': ('model=hyperbf', PLAIN | {'model.stage2.heads': 2, 'model.stage2.sigma_per': 'center'}),
  'one sigma': ('model=hyperbf', PLAIN | {'model.stage2.sigma_per': 'layer', 'model.stage2.normalize_inputs': True}),
  'balls with linear coefficients': KINDS['linear'],
  'mlp': KINDS['mlp'],
  'gated mlp': ('model=vit', {'model.stage2.activation': 'swiglu'}),
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
  single = interventions.Mean.of(np.array([1.0]))
  assert single.half == np.inf
  assert single.text(2) == '+1.00 ± ∞'


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
  run = made(*GROWING['two heads'][:1], **GROWING['two heads'][1])
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


@pytest.fixture(scope='module', params=GROWING)
def growing(request, toy):
  """Return a network with random parameters, the options of its stage 2, and the place of a new unit."""
  arguments, changes = GROWING[request.param]
  config = toy(arguments, **{'model.depth': 2, 'model.patch': 2, 'data.mean': (0.3,), 'data.std': (0.4,), **changes})
  task, draws = make_task(config), np.random.default_rng(0)
  model = task.make_model(config.model)
  shapes = abstract_params(model, task.shape)
  params = jax.tree.map(lambda z: jnp.asarray(draws.normal(size=z.shape) / 2, jnp.float32), shapes)
  d = 16 // int(changes.get('model.stage2.heads', 1))
  return model, params, config.model.stage2, draws.normal(size=(2, 16) if request.param == 'gated mlp' else d)


def test_add_then_remove_restores(growing):
  model, params, _, place = growing
  added = unit_params.add(model, params, 'block0', place, np.ones(16))
  assert jax.tree.map(np.shape, added.params) == jax.tree.map(np.shape, abstract_params(added.model, (8, 8, 1)))
  removed = unit_params.remove(added.model, added.params, 'block0', added.unit)
  assert removed.model == model
  same(removed.params, params)


def test_an_added_unit_adds_its_response_times_its_coefficient(growing):
  """Against the definitions in float64: stage 2 of block 0 adds R(y) c to a token, and other blocks add nothing."""
  model, params, options, place = growing
  y, c = np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32), np.linspace(-1, 1, 16)
  heads = options.get('heads', 1)
  added = unit_params.add(model, params, 'block0', place, c, head=heads - 1, bias=0.3)
  np.testing.assert_array_equal(unit_params.coefficients(added.params, 'block0')[added.unit], c.astype(np.float32))

  def change(block):
    before, after = (of_stage2(m, p[block]['stage2'], y) for m, p in ((model, params), added[:2]))
    return after - before

  own = y.reshape(2, 5, heads, -1)[:, :, -1]  # the dimensions of the last head
  expected = response(options, added.params['block0']['stage2'], own.astype(np.float64), place)
  np.testing.assert_allclose(change('block0'), expected[..., None] * c, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(change('block1'), 0, atol=1e-4)


def of_stage2(model, params, tokens):
  return np.asarray(apply(model.trunk.stage2(name=None), params, tokens), np.float64)


def test_a_silent_unit_more_changes_no_logit(made, images):
  run = made(*GROWING['two heads'][:1], **GROWING['two heads'][1])
  added = unit_params.add(run.model, run.params, 'block0', np.zeros(8), np.zeros(16), head=1)
  found = interventions.effect(run, added.params, images, run.test.labels[:16], added.model)
  assert found.loss == pytest.approx((0, 0), abs=1e-5) and found.answers.mean == 0
  grown = run.with_params(added.params, added.model)
  np.testing.assert_allclose(grown.logits(images), run.logits(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('block', ['block0', 'block1'])
def test_a_center_of_two_resolutions_can_be_split_in_two(made, images, block):
  """Two centers in one place, each with half of the coefficients, are the same function as one."""
  run = made(**PLAIN, **{'model.stage2.sigma_per': 'layer', 'model.merge': (1,), 'model.pool': 'mean'})
  unit = run.params[block]['stage2']
  halved = unit_params.rescale(run.params, block, [5], 0.5)
  added = unit_params.add(run.model, halved, block, unit['centers'][0, 5], unit['coefficients'][0, 5] / 2)
  np.testing.assert_allclose(
    run.with_params(added.params, added.model).logits(images), run.logits(images), rtol=1e-4, atol=1e-5
  )
  assert [unit_params.count_units(added.params, name) for name in ('block0', 'block1')] == [13, 26]
  removed = unit_params.remove(added.model, added.params, block, added.unit)
  assert removed.model == run.model
  same(removed.params, halved)


def response(options, unit, y, place):
  """Return the response of the last unit at `place` to tokens y [B, N, d] by its definition, in float64."""
  if 'out' in unit:
    z = y @ np.atleast_2d(place).T + 0.3
    if len(place) == 2:
      return z[..., 0] / (1 + np.exp(-z[..., 0])) * z[..., 1]
    return np.maximum(z[..., 0], 0) if options.activation == 'relu' else jax.nn.gelu(z[..., 0])
  own = {name: np.asarray(value, np.float64) for name, value in unit.items()}
  t, variance = np.asarray(place, np.float64), np.exp(2 * own['log_sigma'].mean(axis=0)[0, -1])
  if options.sigma_per == 'center':
    variance = np.exp(2 * own['log_sigma'][-1, 0, :-1].mean())
  if options.kernel == 'ball_silu':
    depth = own['depth'][0, 0, :-1].mean() + (t @ t + len(t)) / (2 * variance)
    z = depth - np.sum((own['metric'][-1] * (y - t)) ** 2, axis=-1) / (2 * variance)
    return z / (1 + np.exp(-z))
  if options.normalize_inputs:
    y, t = y / np.linalg.norm(y, axis=-1, keepdims=True), t / np.linalg.norm(t)
  s = np.sum((own['metric'][-1] * (y - t)) ** 2, axis=-1) / (2 * variance)
  return np.exp(own['log_gain'][-1] - s)


def test_random_centers_lie_on_tokens(run, images):
  other = interventions.with_random_centers(run, images, seed=0)
  ((number, seen),) = run.capture_batches(images)
  for block, points in seen.points.items():
    rows = np.asarray(points)[number >= 0].reshape(-1, points.shape[-1])
    places = np.asarray(other.params[block]['stage2']['centers'])[0]
    assert all((np.abs(rows - place).max(axis=1) == 0).any() for place in places)
    np.testing.assert_array_equal(
      other.params[block]['stage2']['coefficients'], run.params[block]['stage2']['coefficients']
    )


def test_wrong_interventions(run, made, toy):
  def shapes(arguments):
    return abstract_params(build_model(toy(arguments).model, 10), (8, 8, 1))

  with pytest.raises(UserError, match='block0 has no unit 99: expected 0 to 11'):
    unit_params.silence(run.params, 'block0', [3, 99])
  with pytest.raises(UserError, match="unknown block 'block9'"):
    unit_params.swap(run.params, 'block9', 0, 1)
  with pytest.raises(UserError, match=r'place has shape \(3,\): expected \(16,\)'):
    unit_params.move(run.params, 'block0', 0, jnp.zeros(3))
  with pytest.raises(UserError, match='are no centers'):
    unit_params.move(shapes('model=vit'), 'block0', 0, jnp.zeros(16))
  with pytest.raises(UserError, match='stage 2 of block0 has no units'):
    unit_params.count_units(shapes('model=gated'), 'block0')
  with pytest.raises(UserError, match='normalizes its responses over the centers'):
    unit_params.add(run.model, run.params, 'block0', np.zeros(16), np.zeros(16))
  plain = made(*GROWING['two heads'][:1], **GROWING['two heads'][1])
  with pytest.raises(UserError, match=r'place has shape \(3,\): expected \(8,\)'):
    unit_params.add(plain.model, plain.params, 'block0', np.zeros(3), np.zeros(16))
  with pytest.raises(UserError, match='head is 2: expected 0 to 1'):
    unit_params.add(plain.model, plain.params, 'block0', np.zeros(8), np.zeros(16), head=2)
  with pytest.raises(UserError, match='a head of block0 has too few silent units to remove 1'):
    unit_params.remove(plain.model, plain.params, 'block0', 3)
