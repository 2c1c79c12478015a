import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model
from hbf.models.language import LanguageModel
from hbf.nn.registry import MODELS, STAGE1, make_stages, stage_options
from hbf.nn.trunk import Trunk
from hbf.training.durations import Clock
from hbf.training.optimizer import make_optimizer, make_schedule
from hbf.training.rules import height_of, rule_of, rules_of

CLOCK = Clock(examples=1000, batch_size=10, epochs=1.0)
PARAMS = {
  'unit': {name: jnp.full((2, 2), 2.0) for name in ('kernel', 'centers', 'coefficients', 'bias', 'log_sigma')}
}


def first_update(config, grads):
  optimizer = make_optimizer(config.optimizer, optax.constant_schedule(config.optimizer.learning_rate))
  updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
  return {name: float(value[0, 0]) for name, value in updates['unit'].items()}


def test_decay_shrinks_what_multiplies_a_signal_and_nothing_else(toy):
  config = toy(**{'optimizer.weight_decay': 0.1, 'optimizer.learning_rate': 0.5})
  updates = first_update(config, jax.tree.map(jnp.zeros_like, PARAMS))
  decayed = pytest.approx(-0.5 * 0.1 * 2.0)
  assert updates == {'kernel': decayed, 'centers': decayed, 'coefficients': decayed, 'bias': 0, 'log_sigma': 0}


def test_centers_and_widths_learn_at_their_own_rates(toy):
  config = toy(**{'optimizer.weight_decay': 0.0, 'optimizer.sigma_rate': 10.0, 'optimizer.center_rate': 3.0})
  updates = first_update(config, jax.tree.map(jnp.ones_like, PARAMS))
  rates = {'log_sigma': 10, 'centers': 3, 'kernel': 1, 'coefficients': 1, 'bias': 1}
  assert updates == {name: pytest.approx(rate * updates['bias']) for name, rate in rates.items()}


def every_parameter():
  """Return the paths of all parameters of all models, also with options that add parameters."""
  pairs = [(name, {}) for name in MODELS] + [(f'{stage}+none', {'pool': 'mean'}) for stage in STAGE1]
  pairs += [
    ('hyperbf', {'stage2.normalization': 'none', 'stage2.metric': 'bilinear', 'stage2.kernel': 'signed_gaussian'}),
    ('hyperbf', {'layer_scale': 0.1, 'positions': 'learned'}),
    ('linear', {'stage1.features': 'gaussian', 'stage1.normalizer': 'none'}),
    ('gmlp', {'stage1.attention': 4}),
    ('vit', {'stage1.relative_positions': 'gaussian'}),
    ('vit', {'stem': 'conv', 'pool': 'sequence', 'depth': 2, 'merge': (1,), 'stage2.normalize': True}),
    ('vit', {'stem': 'conv', 'whiten': True}),
    ('hyperbf', {'stage2.normalization': 'none', 'stage2.kernel': 'ball_gelu'}),
  ]
  for model, changes in pairs:
    config = resolve(make_config(f'model={model}', {'name': 'cifar10'})).model
    config.update(width=16, depth=1, heads=2)
    config.update_from_flattened_dict(changes)
    yield from jax.tree_util.tree_leaves_with_path(abstract_params(build_model(config, 3), (8, 8, 3)))
  model = LanguageModel(Trunk(1, *make_stages('identity+mlp', 2, *stage_options('identity+mlp', 16))), 5, 4, 16)
  texts = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  params = jax.eval_shape(lambda z: model.init(jax.random.key(0), z, train=False), texts)['params']
  yield from jax.tree_util.tree_leaves_with_path(params)


def test_every_parameter_has_a_rule_and_what_is_alike_has_the_same():
  """Centers have one rule in both stages, and so have coefficients. β has the rule of σ."""
  rest = {'names': '', 'tensor': None, 'matrices': 0}
  rules = {path[-1].key: dataclasses.replace(rule_of(path), **rest) for path, _ in every_parameter()}
  assert rules['centers'] == rules['memory_centers'] != rules['kernel']
  assert rules['coefficients'] == rules['memory_coefficients'] == rules['kernel']
  assert rules['embedding'] == rules['kernel']
  assert rules['log_sigma'] == rules['beta'] == rules['position_log_sigma']
  assert {name for name, rule in rules.items() if rule.decay} == {
    *('kernel', 'embedding', 'centers', 'memory_centers', 'coefficients', 'memory_coefficients', 'filters')
  }


def test_every_parameter_has_a_layer():
  heights = {path[0].key: height_of(path, depth=2) for path, _ in every_parameter()}
  before = ('stem0', 'norm_stem0', 'embedding', 'class_token', 'positions')
  blocks = {'block0': 2, 'norm_merge1': 1, 'merge1': 1, 'block1': 1}
  assert heights == {**dict.fromkeys(before, 3), **blocks, 'norm': 0, 'pool': 0, 'head': 0}


def test_a_parameter_without_a_rule_or_a_layer_is_an_error(toy):
  with pytest.raises(UserError, match=r"\['block0'\]\['novelty'\]"):
    rules_of({'block0': {'novelty': jnp.zeros(1)}})
  config, params = toy(**{'optimizer.layer_decay': 0.5}), {'novelty': {'kernel': jnp.zeros(1)}}
  optimizer = make_optimizer(config.optimizer, optax.constant_schedule(1.0))
  with pytest.raises(LookupError, match=r"no layer for the parameter \['novelty'\]\['kernel'\]"):
    optimizer.update(params, optimizer.init(params), params)


def test_a_layer_learns_and_decays_at_its_own_rate(toy):
  """The factor is decay^(L − i) in block i of L, decay^(L + 1) before the blocks, and 1 after them, as in BEiT."""
  factors = {'embedding': 1 / 16, 'block0': 1 / 8, 'block1': 1 / 4, 'block2': 1 / 2, 'norm': 1.0, 'head': 1.0}
  params = {name: {'kernel': jnp.full(3, 0.7)} for name in factors}
  grads = {name: {'kernel': jnp.arange(1.0, 4.0) + i} for i, name in enumerate(params)}

  def updates(layer_decay):
    changes = {'optimizer.name': 'sgd', 'optimizer.weight_decay': 0.3, 'optimizer.layer_decay': layer_decay}
    optimizer = make_optimizer(toy(**changes).optimizer, optax.constant_schedule(0.1))
    return optimizer.update(grads, optimizer.init(params), params)[0]

  alike, layered = updates(1.0), updates(0.5)  # a power of two: exactly
  for name, factor in factors.items():
    np.testing.assert_array_equal(layered[name]['kernel'], factor * alike[name]['kernel'])
  assert all(np.all(update['kernel'] != 0) for update in alike.values())


def test_the_state_of_an_optimizer_without_layers_is_that_of_checkpoints_of_before(toy):
  optimizer = make_optimizer(toy().optimizer, optax.constant_schedule(1.0))
  paths = jax.tree_util.tree_leaves_with_path(optimizer.init({'kernel': jnp.zeros(1)}))
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  assert names == ['[1].count', "[1].mu['kernel']", "[1].nu['kernel']", '[5].count']


def test_lion_has_its_own_second_moment(toy):
  """After a gradient of 1, Lion's moment is 1 − 0.99. Adam's second moment would be 1 − 0.999."""
  config = toy(**{'optimizer.name': 'lion', 'optimizer.clip': 0.0, 'optimizer.weight_decay': 0.0})
  optimizer = make_optimizer(config.optimizer, optax.constant_schedule(1.0))
  ones = jax.tree.map(jnp.ones_like, PARAMS)
  _, state = optimizer.update(ones, optimizer.init(PARAMS), PARAMS)
  momentum = next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 2))
  np.testing.assert_allclose(momentum, 0.01, rtol=1e-5)


# Queries, keys and values in one kernel; centers of two heads; and what Muon leaves to Adam.
SHAPES = {
  'block0': {
    'stage1': {'qkv': {'kernel': (6, 18), 'bias': (18,)}, 'out': {'kernel': (6, 6)}},
    'stage2': {'centers': (2, 5, 3), 'coefficients': (2, 5, 6), 'metric': (2, 3)},
  },
  'block1': {'stage1': {'hidden': {'kernel': (6, 16)}, 'out': {'kernel': (8, 6)}}},
  'head': {'kernel': (6, 4)},
}


def muon_in_float64(gradients, momentum=0.95):
  """Return Muon's update of one matrix after the gradients, by its definition (Jordan et al. 2024)."""
  moment = np.zeros(gradients[0].shape)
  for gradient in gradients:
    moment = momentum * moment + gradient
  x = gradients[-1] + momentum * moment
  x = x / np.linalg.norm(x)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return 0.2 * max(x.shape) ** 0.5 * x


def split(name, z):
  """Return the matrices that a parameter of SHAPES is made of."""
  z = np.asarray(z, np.float64)
  count = {'qkv': 3, 'hidden': 2}.get(name, 1)
  return [part for matrix in z.reshape(-1, *z.shape[-2:]) for part in np.split(matrix, count, axis=1)]


def test_muon_is_its_definition_for_each_matrix_of_the_blocks_and_adam_for_the_rest(toy):
  rng = np.random.default_rng(0)
  draw = functools.partial(jax.tree.map, lambda shape: jnp.asarray(rng.normal(size=shape)), SHAPES)
  draws = [draw(is_leaf=lambda z: isinstance(z, tuple)) for _ in range(3)]
  updates = {}
  for name in ('muon', 'adamw'):
    changes = {'name': name, 'clip': 0.0, 'weight_decay': 0.0, 'center_rate': 1.0, 'learning_rate': 1.0}
    config = toy(**{f'optimizer.{key}': value for key, value in changes.items()})
    optimizer = make_optimizer(config.optimizer, optax.constant_schedule(-1.0))
    state = optimizer.init(draws[0])
    update = jax.jit(optimizer.update)
    for gradients in draws:
      updates[name], state = update(gradients, state, draws[0])
  for path, found in jax.tree_util.tree_leaves_with_path(updates['muon']):
    keys = [key.key for key in path]
    given = [functools.reduce(lambda tree, key: tree[key], keys, draw) for draw in draws]
    if keys[0] == 'head' or keys[-1] in ('bias', 'metric'):
      adam = functools.reduce(lambda tree, key: tree[key], keys, updates['adamw'])
      np.testing.assert_allclose(found, adam, rtol=1e-6)
      continue
    matrices = zip(*(split(keys[-2], z) for z in given), strict=True)
    for matrix, gradients in zip(split(keys[-2], found), matrices, strict=True):
      np.testing.assert_allclose(matrix, muon_in_float64(gradients), rtol=1e-4, atol=1e-4)


def test_clipping_bounds_the_norm_of_the_gradient(toy):
  changes = {
    'optimizer.name': 'sgd',
    'optimizer.weight_decay': 0.0,
    'optimizer.clip': 1.0,
    'optimizer.center_rate': 1.0,
  }
  config = toy(**changes)
  updates = first_update(config, jax.tree.map(lambda z: 100 * jnp.ones_like(z), PARAMS))
  norm = np.sqrt(4 * sum(value**2 for value in updates.values()))
  assert norm == pytest.approx(config.optimizer.learning_rate, rel=1e-5)


@pytest.mark.parametrize(
  ('name', 'minimum', 'end'),
  [
    ('cosine', 0.0, 0.0),
    ('cosine', 0.25, 0.025),
    ('linear', 0.0, 0.0),
    ('linear', 0.25, 0.025),
    ('constant', 0.0, 0.1),
    ('wsd', 0.25, 0.025),
    ('rsqrt', 0.0, 0.1 * 0.1**0.5),
  ],
)
def test_schedule_warms_up_to_the_peak_and_ends_where_it_says(toy, name, minimum, end):
  changes = {'optimizer.schedule': name, 'optimizer.minimum_rate': minimum}
  config = toy(**changes, **{'optimizer.warmup': '10%', 'optimizer.learning_rate': 0.1})
  schedule = make_schedule(config.optimizer, CLOCK)
  rates = [float(schedule(step)) for step in range(CLOCK.steps + 1)]
  assert rates[0] == 0
  assert rates[5] == pytest.approx(0.05)
  assert rates[10] == pytest.approx(0.1) == pytest.approx(max(rates))
  assert rates[-1] == pytest.approx(end, abs=1e-6)
  assert all(later <= before for before, later in itertools.pairwise(rates[10:]))


def test_wsd_is_flat_until_its_linear_decay(toy):
  changes = {'optimizer.schedule': 'wsd', 'optimizer.decay': '40%', 'optimizer.minimum_rate': 0.5}
  config = toy(**changes, **{'optimizer.warmup': '10%', 'optimizer.learning_rate': 0.1})
  schedule = make_schedule(config.optimizer, CLOCK)
  found = [float(schedule(step)) for step in (10, 35, 60, 80, 100)]
  np.testing.assert_allclose(found, [0.1, 0.1, 0.1, 0.075, 0.05], rtol=1e-6)
  config.optimizer.decay = '95%'
  with pytest.raises(UserError, match=r'optimizer\.decay=95% is 95 steps of the 90 after the warm-up'):
    make_schedule(config.optimizer, CLOCK)


@pytest.mark.parametrize('growth', [1.0, 2.0])
def test_restarts_are_those_of_optax(toy, growth):
  """The cycles fill the 90 steps after the warm-up; the end of one is the start of the next."""
  changes = {'schedule': 'restarts', 'cycles': 3, 'cycle_growth': growth, 'minimum_rate': 0.1, 'warmup': '10%'}
  config = toy(**{f'optimizer.{key}': value for key, value in changes.items()} | {'optimizer.learning_rate': 0.1})
  lengths = {1.0: [30, 30, 30], 2.0: [13, 26, 51]}[growth]
  cycles = [
    {'init_value': 0.1, 'peak_value': 0.1, 'warmup_steps': 0, 'decay_steps': length, 'end_value': 0.01}
    for length in lengths
  ]
  steps = np.arange(90)
  found = make_schedule(config.optimizer, CLOCK)(10 + steps)
  np.testing.assert_allclose(found, optax.sgdr_schedule(cycles)(steps), rtol=1e-5)
  config.optimizer.cycles = 91
  with pytest.raises(UserError, match=r'optimizer.cycles=91 .* leaves a cycle without a step, of the 90 steps'):
    make_schedule(config.optimizer, CLOCK)


def test_rsqrt_falls_with_the_root_of_the_step(toy):
  changes = {'optimizer.schedule': 'rsqrt', 'optimizer.warmup': '10steps', 'optimizer.learning_rate': 0.1}
  config = toy(**changes)
  steps = np.arange(1, 100)
  found = make_schedule(config.optimizer, CLOCK)(steps)
  np.testing.assert_allclose(found, 0.1 * np.minimum(np.sqrt(10 / steps), steps / 10), rtol=1e-5)
  for key, value, message in (
    ('warmup', '0steps', 'has no step'),
    ('minimum_rate', 0.1, 'falls at a pace of its own'),
  ):
    config = toy(**changes | {f'optimizer.{key}': value})
    with pytest.raises(UserError, match=message):
      make_schedule(config.optimizer, CLOCK)


def updates_after(optimizer, params, gradients):
  state = optimizer.init(params)
  for grads in gradients:
    updates, state = optimizer.update(grads, state, params)
  return updates


@pytest.mark.parametrize('name', ['lamb', 'adafactor'])
def test_weights_move_as_in_optax_and_the_rest_takes_absolute_steps(toy, name):
  """A kernel that Adafactor factors, one that is too small for it, and a bias."""
  shapes = {'hidden': {'kernel': (130, 129)}, 'out': {'kernel': (3, 2), 'bias': (2,)}}
  rng = np.random.default_rng(0)
  draw = functools.partial(jax.tree.map, lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes)
  params, *gradients = (draw(is_leaf=lambda z: isinstance(z, tuple)) for _ in range(4))
  decay = 0.1 if name == 'lamb' else 0.0  # optax's Adafactor does not multiply the decay by the learning rate
  config = toy(**{'optimizer.name': name, 'optimizer.clip': 0.0, 'optimizer.weight_decay': decay}).optimizer
  found = updates_after(make_optimizer(config, optax.constant_schedule(0.1)), params, gradients)
  mask = jax.tree.map(lambda z: z.ndim == 2, params)
  expected, absolute = {
    'lamb': (optax.lamb(0.1, weight_decay=decay, mask=mask), optax.adam(0.1, eps=1e-6)),
    'adafactor': (
      optax.adafactor(0.1, momentum=0.9),
      optax.adafactor(0.1, momentum=0.9, multiply_by_parameter_scale=False),
    ),
  }[name]
  weights, rest = (updates_after(optimizer, params, gradients) for optimizer in (expected, absolute))
  jax.tree.map(
    lambda a, b, c, weight: np.testing.assert_allclose(a, b if weight else c, rtol=1e-4, atol=1e-7),
    found, weights, rest, mask,
  )  # fmt: skip
  assert config.center_rate == 1.0


def test_no_warmup_starts_at_the_peak(toy):
  schedule = make_schedule(toy(**{'optimizer.warmup': '0steps', 'optimizer.learning_rate': 0.1}).optimizer, CLOCK)
  assert float(schedule(0)) == pytest.approx(0.1)


@pytest.mark.parametrize('key', ['name', 'schedule'])
def test_unknown_values_name_the_known_ones(toy, key):
  config = toy(**{f'optimizer.{key}': 'adamv'})
  with pytest.raises(UserError, match=f'unknown optimizer.{key}'):
    make_optimizer(config.optimizer, make_schedule(config.optimizer, CLOCK))


def test_schedule_free_is_its_recursion_in_float64(toy):
  """The recursion is Defazio et al. 2024, eqs. 3 to 5, around Adam without a first moment, with weights rate²."""
  changes = {'name': 'schedule_free', 'schedule': 'constant', 'weight_decay': 0.0, 'clip': 0.0, 'learning_rate': 0.1}
  config = toy(**{f'optimizer.{key}': value for key, value in changes.items()}, **{'optimizer.warmup': '5steps'})
  schedule = make_schedule(config.optimizer, CLOCK)
  optimizer = make_optimizer(config.optimizer, schedule)
  target = np.random.default_rng(0).normal(size=(2, 2))
  params = {'unit': {'kernel': jnp.full((2, 2), 2.0)}}
  state = optimizer.init(params)
  x = y = z = np.full((2, 2), 2.0)
  second, weights = np.zeros((2, 2)), 0.0
  for t in range(20):
    gradient = {'unit': {'kernel': params['unit']['kernel'] - target.astype(np.float32)}}
    updates, state = optimizer.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
    rate = 0.1 * min((t + 1) / 5, 1)
    second = 0.999 * second + 0.001 * (y - target) ** 2
    step = (y - target) / (np.sqrt(second / (1 - 0.999 ** (t + 1))) + 1e-8)
    z = z - 0.1 * min(t / 5, 1) * step  # the base optimizer counts from 0, the average from 1
    weights += rate**2
    x = x + rate**2 / weights * (z - x)
    y = 0.9 * x + 0.1 * z
  np.testing.assert_allclose(params['unit']['kernel'], y, rtol=1e-4)
  average = optax.contrib.schedule_free_eval_params(state, params)
  np.testing.assert_allclose(average['unit']['kernel'], x, rtol=1e-4)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'optimizer.schedule': 'cosine'}, 'optimizer.schedule is cosine: set it to constant'),
    ({'optimizer.schedule': 'constant', 'optimizer.momentum': 0.0}, 'needs a momentum above 0'),
  ],
)
def test_schedule_free_refuses_settings_that_contradict_it(toy, changes, message):
  config = toy(**{'optimizer.name': 'schedule_free'} | changes)
  with pytest.raises(UserError, match=message):
    make_optimizer(config.optimizer, make_schedule(config.optimizer, CLOCK))
