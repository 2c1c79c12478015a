"""Tests of closed-form refits: arrays around the layers, Gauss–Newton steps against dense solves, and the AGOP."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply

from hbf.analysis import agop, refit
from hbf.errors import UserError

NETWORKS = {
  'hyperbf': ('model=hyperbf', {}),
  'linear coefficients': (
    'model=hyperbf',
    {
      'model.pool': 'sequence',
      'model.stage2.coefficients': 'linear',
      'model.stage2.kernel': 'ball_silu',
      'model.stage2.normalization': 'none',
    },
  ),
  'two heads': ('model=hyperbf', {'model.stage2.heads': 2, 'model.pool': 'mean'}),
  'vit': ('model=vit', {'model.stage2.activation': 'swiglu', 'model.pool': 'mean'}),
}
SLOW = {'hyperbf', 'two heads'}


@pytest.fixture(
  scope='module', params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in NETWORKS]
)
def network(request, made):
  arguments, changes = NETWORKS[request.param]
  run = made(arguments, **{'model.width': 8, 'model.heads': 2, **changes})
  return run.model, run.params, run.normalized(run.test.images[:12])


def test_the_layer_and_the_tail_give_the_networks_tokens_and_logits(network):
  model, params, images = network
  see = jax.jit(functools.partial(refit.see, model))
  seen = see(params, images, [params[refit.last_block(model)]['stage2']])
  expected = apply(model, params, images, train=False)
  np.testing.assert_allclose(jax.jit(refit.tail_of(model, params))(seen.tokens), expected, atol=1e-4)
  head = np.concatenate([params['head']['kernel'], params['head']['bias'][None]])
  np.testing.assert_allclose(refit.no_tail(seen.features @ head), expected, atol=1e-4)
  np.testing.assert_array_equal(seen.inputs[0], seen.inputs[1])
  # Other coefficients change the tokens as the layer says.
  weights = refit.coefficients(model, params)
  moved = weights + np.random.default_rng(0).normal(size=weights.shape).astype(np.float32)
  changed = see(refit.with_coefficients(model, params, moved), images)
  np.testing.assert_allclose(changed.tokens - seen.tokens, seen.inputs[0] @ (moved - weights), atol=1e-3)
  np.testing.assert_array_equal(refit.coefficients(model, refit.with_coefficients(model, params, moved)), moved)


def problem(loss, images=6, tokens=3, inputs=4, width=3, classes=3, seed=0):
  """Return a small problem whose tail, the layers after the refitted one, is not linear. Also return its weights."""
  rng = np.random.default_rng(seed)
  mixing = jnp.asarray(rng.normal(size=(width, classes)))

  def tail(z):
    z = z - z.mean(axis=-1, keepdims=True)
    return (z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 0.1)).mean(axis=1) @ mixing

  targets = np.eye(classes)[rng.integers(classes, size=images)] * 0.9 + 0.1 / classes
  r, y = rng.normal(size=(images, tokens, inputs)), rng.normal(size=(images, tokens, width))
  return refit.Problem(tail, loss, r, y, targets), rng.normal(size=(inputs, width))


def dense(problem, weights):
  """Return the gradient and the Gauss–Newton matrix, computed from the Jacobian of all logits."""

  def logits(flat):
    return problem.tail(problem.rest + problem.inputs @ flat.reshape(weights.shape))

  flat = jnp.asarray(weights.reshape(-1))
  jacobian, z = jax.jacobian(logits)(flat), logits(flat)  # [n, classes, P]
  slope = jax.vmap(jax.grad(lambda z, t: problem.loss(z[None], t[None])[0]))(z, problem.targets)
  hessian = jax.vmap(jax.hessian(lambda z, t: problem.loss(z[None], t[None])[0]))(z, problem.targets)
  count = len(problem.inputs)
  return (
    np.einsum('nkp,nk->p', jacobian, slope) / count,
    np.einsum('nkp,nkl,nlq->pq', jacobian, hessian, jacobian) / count,
  )


@pytest.mark.parametrize('loss', [refit.cross_entropy, refit.squared])
def test_a_step_minimizes_the_quadratic_model(loss):
  """At the solution, the gradient of the quadratic model is 0. A dense solve gives the same solution."""
  with jax.enable_x64(True):
    given, weights = problem(loss)
    gradient, matrix = dense(given, weights)
    np.testing.assert_allclose(given.gradient(weights).reshape(-1), gradient, atol=1e-12)
    direction = np.random.default_rng(1).normal(size=weights.shape)
    np.testing.assert_allclose(given.product(weights, direction).reshape(-1), matrix @ direction.reshape(-1))
    path = refit.solve(given, weights, weights.size)
    left, right = path.roots
    ridge = 1e-2 * np.linalg.eigvalsh(path.matrix)[-1]
    metric = np.kron(np.linalg.inv(left @ left), np.linalg.inv(right @ right))  # ‖Δ‖² in K-FAC's coordinates
    step = path.step(1e-2).reshape(-1)
    np.testing.assert_allclose(gradient + (matrix + ridge * metric) @ step, 0, atol=1e-9)
    np.testing.assert_allclose(step, -np.linalg.solve(matrix + ridge * metric, gradient), atol=1e-7)


def test_more_iterations_lower_the_model_and_a_step_lowers_the_loss():
  with jax.enable_x64(True):
    given, weights = problem(refit.cross_entropy, images=40)
    gradient, matrix = dense(given, weights)
    values = []
    for iterations in (1, 3, weights.size):
      step = refit.solve(given, weights, iterations).step(1e-9).reshape(-1)
      values.append(gradient @ step + step @ matrix @ step / 2)
    assert values[2] < values[1] < values[0] < 0
    assert given.value(weights + refit.solve(given, weights, 12).step(0.1)) < given.value(weights)


def test_the_factors_are_the_means_of_their_definitions():
  with jax.enable_x64(True):
    given, weights = problem(refit.squared)
    rows = given.inputs.reshape(-1, 4)
    jacobian = jax.vmap(jax.jacobian(lambda z: given.tail(z[None])[0]))(given.rest + given.inputs @ weights)
    left, right = given.factors(weights)
    np.testing.assert_allclose(left, rows.T @ rows / len(rows))
    np.testing.assert_allclose(right, np.einsum('bknd,bkne->de', jacobian, jacobian) / len(rows))


def test_the_heads_squared_loss_is_ridge_regression():
  """No layer follows the refitted one. With almost no damping, one iteration solves the normal equations."""
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    features, targets = rng.normal(size=(50, 1, 5)), rng.normal(size=(50, 3))
    given = refit.Problem(refit.no_tail, refit.squared, features, np.zeros((50, 1, 3)), targets)
    solution = refit.solve(given, np.zeros((5, 3)), 15).step(1e-12)
    np.testing.assert_allclose(solution, np.linalg.lstsq(features[:, 0], targets)[0], atol=1e-9)


def test_a_refit_lowers_the_held_out_loss_or_stops():
  given, weights = problem(refit.cross_entropy, images=200)
  given = refit.Problem(
    given.tail, given.loss, *(z.astype(np.float32) for z in (given.inputs, given.rest, given.targets))
  )
  done = refit.refit(given, given, weights, rounds=50, iterations=12)
  losses = [given.value(weights), *(each.held_out for each in done.rounds)]
  assert all(after <= before for before, after in itertools.pairwise(losses))
  assert losses[-1] < 0.9 * losses[0]
  assert len(done.weights) == 1 + sum(each.damping is not None for each in done.rounds)
  step = done.weights[1] - done.weights[0]
  left, right = done.paths[0].roots
  norms = [
    np.linalg.norm(np.linalg.inv(left) @ z @ np.linalg.inv(right)) for z in (step, done.paths[0].random(step, 0))
  ]
  assert norms[0] == pytest.approx(norms[1])


def test_adam_lowers_the_loss_and_costs_a_gradient_in_each_epoch(monkeypatch):
  monkeypatch.setattr(refit, 'BATCH', 20)
  with jax.enable_x64(True):
    given, weights = problem(refit.cross_entropy, images=60)
    after = refit.descend(given, weights, 0.2, 20, seed=0)
    assert given.value(after) < 0.9 * given.value(weights)
    assert given.gradient_operations() < given.operations(0) < given.operations(1)


def test_stages_without_a_linear_layer_are_refused(made):
  run = made('model=gmlp')
  with pytest.raises(UserError, match='no stage 2'):
    refit.coefficients(run.model, run.params)


@pytest.mark.parametrize('network', [pytest.param('hyperbf', marks=pytest.mark.slow), 'vit'], indirect=True)
def test_agop_is_the_mean_of_outer_products(network):
  """The definition uses jax.jacobian through the last stage 2, token by token."""
  model, params, images = network
  found = agop.agop(model, params, images, batch=4)
  assert set(found) == {'block0', 'block1'}
  seen = jax.jit(functools.partial(refit.see, model))(params, images)
  last = refit.last_block(model)
  weights, tail = refit.coefficients(model, params), refit.tail_of(model, params)
  rest, points = seen.tokens - seen.inputs[0] @ weights, _points(model, params, images)
  unit, stage = points.pop('unit'), params[last]['stage2']

  def logits(x, y):
    return tail(y[None] + refit.layer_inputs(unit, stage, x[None]) @ weights)[0]

  jacobian = jax.jit(jax.vmap(jax.jacobian(logits)))(points[last], rest)  # [B, classes, N, D]
  np.testing.assert_allclose(
    found[last], jnp.einsum('bknd,bkne->de', jacobian, jacobian) / jacobian[..., 0].size, rtol=2e-3, atol=1e-6
  )


def _points(model, params, images):
  import flax.linen as nn

  found = {}

  def intercept(call, args, kwargs, context):
    if context.module.path[1:] == ('stage2',) and context.method_name == '__call__':
      found[context.module.path[0]] = args[0]
      found['unit'] = context.module.clone(parent=None, name=None)
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    model.apply({'params': params}, images, train=False)
  return found


def test_feature_matrices_and_correlations():
  rng = np.random.default_rng(0)
  centers, metric = rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 3))
  found = agop.feature_matrices({'centers': centers, 'metric': metric})
  np.testing.assert_allclose(found['centers'][3:, 3:], centers[1].T @ centers[1])
  np.testing.assert_allclose(found['centers'][:3, 3:], 0)
  np.testing.assert_allclose(found['metric'], np.diag(metric.reshape(-1) ** 2))
  full = rng.normal(size=(1, 3, 3))
  np.testing.assert_allclose(
    agop.feature_matrices({'centers': centers[:1], 'metric': full})['metric'], full[0].T @ full[0]
  )
  bilinear = agop.feature_matrices({'centers': centers[:1], 'metric': full}, 'bilinear')['metric']
  np.testing.assert_allclose(bilinear, (full[0] + full[0].T) / 2)
  linear = {'centers': centers[:1], 'slopes': 2 * centers[:1], 'log_sigma': np.log(np.full((1, 1, 5), 2.0))}
  both = agop.feature_matrices(linear)
  np.testing.assert_allclose(both['centers and slopes'], both['centers'] / 16 + both['slopes'])
  matrix = found['centers']
  np.testing.assert_allclose(agop.root(matrix) @ agop.root(matrix), matrix, atol=1e-12)
  same = agop.correlations(matrix, 3 * matrix + 1)
  assert same == pytest.approx({'all': 1, 'diagonal': 1, 'off_diagonal': 1})
  assert set(agop.correlations(matrix, np.eye(6))) == {'all'}
  draws = agop.random_correlations(matrix, 5, 200, 0)
  assert abs(draws['off_diagonal'].mean()) < 0.1 < draws['all'].mean()
