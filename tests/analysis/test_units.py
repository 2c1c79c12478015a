"""Tests of observed responses and gradients against direct computations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.keywords import log_responses

from configs import digits
from hbf.analysis import dead_units
from hbf.analysis.units import observe
from hbf.config.resolve import resolve
from hbf.evaluation.unit_health import awake, low_share, unit_health
from hbf.models.build import build_model
from hbf.nn.hyperbf import HyperBFCenters
from hbf.ops.normalization import normalize

BATCH, CLASSES = 6, 10


@pytest.fixture
def images():
  return jax.random.normal(jax.random.key(0), (BATCH, 8, 8, 1))


LABELS = jnp.arange(BATCH) % CLASSES


def make(images, scan_layers=False, **stage2):
  config = resolve(digits.get_config('model=hyperbf')).model
  config.update(width=16, depth=2, heads=2, scan_layers=scan_layers)
  config.stage2.update({'centers': 5, **stage2})
  model = build_model(config, CLASSES)
  return model, jax.jit(functools.partial(model.init, train=False))(jax.random.key(1), images)['params']


@pytest.mark.parametrize(('normalization', 'heads'), [('layer', 1), ('none', 2)])
def test_responses_are_those_of_the_tokens_that_reach_each_unit(images, normalization, heads):
  model, params = make(images, normalization=normalization, heads=heads)
  units = observe(model, params, images, LABELS)
  assert units.responses.shape == (2, BATCH * 5, heads * 5)  # 4 patches and the class token
  see = jax.jit(functools.partial(model.apply, train=False, capture_intermediates=True))
  kept = see({'params': params}, images)[1]['intermediates']
  for i in range(2):
    tokens = kept[f'block{i}']['norm_stage2']['__call__'][0].reshape(-1, heads, 16 // heads).swapaxes(0, 1)
    unit = params[f'block{i}']['stage2']
    log_k = log_responses(
      tokens,
      unit['centers'],
      kernel='gaussian',
      sigma=jnp.exp(unit['log_sigma']),
      metric='diagonal',
      weights=unit['metric'],
    )
    expected = normalize(log_k, normalization, unit.get('log_gain', 0.0)).swapaxes(0, 1).reshape(BATCH * 5, -1)
    np.testing.assert_allclose(units.responses[i], expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_loss(images):
  model, params = make(images)
  units = observe(model, params, images, LABELS)

  @jax.jit
  @jax.grad
  def gradient_of_loss(centers):
    changed = params | {'block1': params['block1'] | {'stage2': params['block1']['stage2'] | {'centers': centers}}}
    log_p = jax.nn.log_softmax(model.apply({'params': changed}, images, train=False))
    return -jnp.mean(log_p[jnp.arange(BATCH), LABELS])

  gradient = np.asarray(gradient_of_loss(params['block1']['stage2']['centers']))[0]
  np.testing.assert_allclose(units.gradients[1], np.sqrt((gradient**2).mean(axis=-1)), rtol=1e-4)
  assert units.learning()[1] == pytest.approx(np.sqrt((gradient**2).mean()), rel=1e-4)


def test_constant_and_dead_units_are_seen(images):
  model, params = make(images, normalization='none')

  def observed(**numbers):
    """Return the units if these parameters of every stage 2 have these numbers."""
    changed = dict(params)
    for block in ('block0', 'block1'):
      stage2 = params[block]['stage2']
      filled = {name: jnp.full_like(stage2[name], number) for name, number in numbers.items()}
      changed[block] = params[block] | {'stage2': stage2 | filled}
    return observe(model, changed, images, LABELS)

  alive, dead, constant = observed(), observed(log_gain=-1e4), observed(log_gain=0.0, log_sigma=10.0)
  assert min(*alive.mean(), *alive.spread(), *alive.learning()) > 1e-4
  assert not dead.responses.any()
  assert not dead.gradients.any()
  assert dead.health().dead.all() and constant.health().constant.all() and not np.any(alive.health())
  np.testing.assert_allclose(constant.mean(), 1, rtol=1e-3)
  assert max(*constant.spread()) < 1e-5


def test_a_scanned_model_is_observed_too(images):
  model, params = make(images)
  scanned, _ = make(images, scan_layers=True)
  one, other = observe(model, params, images, LABELS), observe(scanned, params, images, LABELS)
  np.testing.assert_allclose(one.responses, other.responses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('number', 'dead', 'constant'), [(0, True, False), (1, False, True), (3, False, False)])
def test_the_authors_published_units_are_dead_and_constant_and_ours_alive(number, dead, constant):
  """Published are β = 0.1 with 11 centers and β = 0.001 with 1,500. Tokens are normalized and of width 768."""
  setting = dead_units.settings()[number]
  unit = HyperBFCenters(**({'centers': 64} | setting.stage2))
  tokens = jax.random.normal(jax.random.key(0), (2, 20, dead_units.WIDTH))
  tokens = (tokens - tokens.mean(-1, keepdims=True)) / tokens.std(-1, keepdims=True)

  @jax.jit
  def found(key):
    params = unit.init(key, tokens)['params']
    if setting.as_published:
      params['log_gain'] = jnp.zeros_like(params['log_gain'])

    def loss(coefficients):
      out, seen = unit.apply({'params': params | {'coefficients': coefficients}}, tokens, mutable=['responses'])
      return jnp.sum(out * tokens), seen['responses']

    gradient, seen = jax.grad(loss, has_aux=True)(params['coefficients'])
    rate = awake(seen['log_kernels'][0]).mean(axis=-2)
    return unit_health(seen['responses'][0], jnp.abs(gradient).max(-1)), low_share(rate)

  found_health, rare = found(jax.random.key(1))
  assert np.asarray(found_health.dead == dead).all()
  assert np.asarray(found_health.constant == constant).all()
  if dead:
    assert not np.all(rare)  # shares of responses that are all 0


@pytest.mark.slow
def test_the_command_measures_and_draws_again(tmp_path, digits_dir, monkeypatch, capsys):
  monkeypatch.setattr(dead_units, 'SIZES', {'model.width': 16, 'model.depth': 1, 'model.heads': 2})
  monkeypatch.setitem(dead_units.TRAINING, 'train.epochs', 0.2)
  settings = [dead_units.settings()[i] for i in (0, 4)]
  monkeypatch.setattr(dead_units, 'settings', lambda: settings)
  arguments = ['--out', str(tmp_path)]
  assert dead_units.main([*arguments, '--report']) == 1
  assert 'measure it without --report' in capsys.readouterr().err
  assert dead_units.main([*arguments, '--data_dir', str(digits_dir)]) == 0
  shown = capsys.readouterr().out
  picture = (tmp_path / 'dead-units.png').read_bytes()
  assert dead_units.main([*arguments, '--report']) == 0
  assert capsys.readouterr().out == shown
  assert (tmp_path / 'dead-units.png').read_bytes() == picture
  assert '| β = 0.1, 11 centers ' in shown
