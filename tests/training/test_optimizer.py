import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hbf.errors import UserError
from hbf.training.durations import Clock
from hbf.training.optimizer import make_optimizer, make_schedule

CLOCK = Clock(examples=1000, batch_size=10, epochs=1.0)
PARAMS = {
  'unit': {name: jnp.full((2, 2), 2.0) for name in ('kernel', 'centres', 'coefficients', 'bias', 'log_width')}
}


def first_update(config, grads):
  optimizer = make_optimizer(config.optimizer, optax.constant_schedule(config.optimizer.learning_rate))
  updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
  return {name: float(value[0, 0]) for name, value in updates['unit'].items()}


def test_decay_shrinks_what_multiplies_a_signal_and_nothing_else(toy):
  config = toy(**{'optimizer.weight_decay': 0.1, 'optimizer.learning_rate': 0.5})
  updates = first_update(config, jax.tree.map(jnp.zeros_like, PARAMS))
  decayed = pytest.approx(-0.5 * 0.1 * 2.0)
  assert updates == {'kernel': decayed, 'centres': decayed, 'coefficients': decayed, 'bias': 0, 'log_width': 0}


def test_centres_and_widths_learn_at_their_own_rates(toy):
  config = toy(**{'optimizer.weight_decay': 0.0, 'optimizer.width_rate': 10.0, 'optimizer.centre_rate': 3.0})
  updates = first_update(config, jax.tree.map(jnp.ones_like, PARAMS))
  rates = {'log_width': 10, 'centres': 3, 'kernel': 1, 'coefficients': 1, 'bias': 1}
  assert updates == {name: pytest.approx(rate * updates['bias']) for name, rate in rates.items()}


def test_clipping_bounds_the_norm_of_the_gradient(toy):
  changes = {
    'optimizer.name': 'sgd',
    'optimizer.weight_decay': 0.0,
    'optimizer.clip': 1.0,
    'optimizer.centre_rate': 1.0,
  }
  config = toy(**changes)
  updates = first_update(config, jax.tree.map(lambda z: 100 * jnp.ones_like(z), PARAMS))
  norm = np.sqrt(4 * sum(value**2 for value in updates.values()))
  assert norm == pytest.approx(config.optimizer.learning_rate, rel=1e-5)


@pytest.mark.parametrize(('name', 'end'), [('cosine', 0.0), ('linear', 0.0), ('constant', 0.1)])
def test_schedule_warms_up_to_the_peak_and_ends_where_it_says(toy, name, end):
  changes = {'optimizer.schedule': name, 'optimizer.warmup': '10%', 'optimizer.learning_rate': 0.1}
  schedule = make_schedule(toy(**changes).optimizer, CLOCK)
  rates = [float(schedule(step)) for step in range(CLOCK.steps + 1)]
  assert rates[0] == 0
  assert rates[5] == pytest.approx(0.05)
  assert rates[10] == pytest.approx(0.1) == pytest.approx(max(rates))
  assert rates[-1] == pytest.approx(end, abs=1e-6)


def test_no_warmup_starts_at_the_peak(toy):
  schedule = make_schedule(toy(**{'optimizer.warmup': '0steps', 'optimizer.learning_rate': 0.1}).optimizer, CLOCK)
  assert float(schedule(0)) == pytest.approx(0.1)


@pytest.mark.parametrize('key', ['name', 'schedule'])
def test_unknown_values_name_the_known_ones(toy, key):
  config = toy(**{f'optimizer.{key}': 'adamv'})
  with pytest.raises(UserError, match=f'unknown optimizer.{key}'):
    make_optimizer(config.optimizer, make_schedule(config.optimizer, CLOCK))
