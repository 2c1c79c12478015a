import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from toy_runs import EVERYTHING

from hbf.tasks import images
from hbf.training.experiment import prepare
from hbf.training.sharding import replicated
from hbf.training.state import (
  Totals,
  TrainState,
  init_state,
  make_train_step,
  repeat_step,
  sharpness_aware,
)


def add_twice(state, resident, batch):
  """Take a step that does not commute with others, so that the result shows the order of the batches."""
  return state.replace(step=state.step + 1, params=2 * state.params + batch['index'] + resident['image'])


@pytest.mark.parametrize('count', [0, 1, 3])
def test_one_call_takes_as_many_steps_as_it_is_told(count):
  stack, resident = {'index': jnp.arange(12).reshape(3, 4)}, {'image': jnp.array(5)}
  start = TrainState(jnp.array(7), jnp.zeros(4, jnp.int32), (), Totals.zeros())
  state, step = jax.jit(repeat_step(add_twice))(start, resident, stack, count)
  expected = start
  for row in range(count):
    expected = add_twice(expected, resident, {'index': stack['index'][row]})
  np.testing.assert_array_equal(state.params, expected.params)
  assert int(state.step) == int(step) == 7 + count


@pytest.fixture(scope='module')
def params_after(toy):
  """Return a function that makes the parameters after three steps of SGD. Adam would enlarge rounding errors."""

  def run(devices=1, **changes):
    sgd = {'optimizer.name': 'sgd', 'optimizer.learning_rate': 0.1, 'optimizer.clip': 0.0}
    made = prepare(toy('model=vit', **sgd, **EVERYTHING, **changes), devices=jax.devices()[:devices])
    data = made.inputs['train']

    def steps(resident, stack):
      state = init_state(made.model, made.optimizer, made.objective, resident, jax.tree.map(lambda z: z[0], stack))
      step = make_train_step(made.model, made.optimizer, made.objective)
      return repeat_step(step)(state, resident, stack, 3)[0].params

    stack = next(data.stacks(made.order, 0, [3], 3))
    return jax.jit(steps, out_shardings=replicated(made.mesh))(data.resident, stack)

  return run


@pytest.fixture(scope='module')
def expected(params_after):
  return params_after()


@pytest.mark.parametrize(
  'changes',
  [
    {'devices': 2, 'data.input': 'stream', 'data.workers': 0},
    pytest.param({'train.accumulate': 4}, marks=pytest.mark.slow),
  ],
  ids=['devices and stream', 'accumulate'],
)
def test_devices_inputs_and_parts_of_a_batch_do_not_matter(params_after, expected, changes):
  found = params_after(**changes)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_transforms_and_mixes_draw_apart_and_transforms_as_before_there_were_mixes(toy, monkeypatch):
  """With the same key for both, the flip of an image would determine its mixing."""

  def augment(key, images, index, *_):
    keys['augment'] = key
    return images

  def mix(key, images, targets, index, entries):
    keys['mix'] = key
    return images.astype(jnp.float32), targets

  keys = {}
  monkeypatch.setattr(images, 'augment', augment)
  monkeypatch.setattr(images, 'mix', mix)
  made = prepare(toy('model=vit'), devices=jax.devices()[:1])
  data, batch = made.inputs['train'], {'index': jnp.arange(4)}

  @jax.jit  # what isn't returned isn't compiled
  def keys_of_a_step():
    keys.clear()
    start = init_state(made.model, made.optimizer, made.objective, data.resident, batch)
    make_train_step(made.model, made.optimizer, made.objective)(start, data.resident, batch)
    return {name: jax.random.key_data(key) for name, key in keys.items()}

  found = keys_of_a_step()
  before = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))[0]
  assert jnp.array_equal(found['augment'], jax.random.key_data(before))
  assert (found['augment'] != found['mix']).any()


def test_alternate_flip_follows_the_epochs_of_the_runs_own_order(toy):
  made = prepare(toy('model=vit', **{'data.transforms': (('alternate_flip',),)}), devices=jax.devices()[:1])
  data, order, task = made.inputs['train'], made.order, made.task
  keys = jax.random.split(jax.random.key(1))
  index = order(0)
  see = jax.jit(lambda step: task.train_batch(keys, data.resident, {'index': index, 'step': step}).inputs)
  straddling = order.examples // order.batch_size
  first, later = see(0), see(straddling)
  turned = order.epochs(straddling) == 1
  assert 0 < turned.sum() < len(turned)
  np.testing.assert_array_equal(later, np.where(turned[:, None, None, None], first[:, :, ::-1], first))


@pytest.mark.parametrize('name', ['adamw', 'sgd', 'lion', 'muon'])
def test_whitening_is_not_trained_nor_counted(toy, name):
  changes = {'model.stem': 'conv', 'model.patch': 4, 'model.whiten': True, 'optimizer.weight_decay': 0.5}
  made = prepare(toy('model=identity', **changes, **{'optimizer.name': name}), devices=jax.devices()[:1])
  data = made.inputs['train']

  @jax.jit
  def run(resident, batch):
    state = init_state(made.model, made.optimizer, made.objective, resident, batch)
    step = make_train_step(made.model, made.optimizer, made.objective)
    return state.params, jax.lax.fori_loop(0, 20, lambda _, state: step(state, resident, batch), state).params

  before, after = run(data.resident, next(data.batches(made.order, 0, 1)))
  np.testing.assert_array_equal(after['stem0']['whitening'], before['stem0']['whitening'])
  assert (after['stem0']['bias'] != before['stem0']['bias']).all()
  assert made.parameters == sum(leaf.size for leaf in jax.tree.leaves(before)) - 9 * 18


def test_sam_is_that_of_optax():
  rng = np.random.default_rng(0)
  inputs, params = rng.normal(size=(9, 4)), {'kernel': jnp.asarray(rng.normal(size=4)), 'bias': jnp.zeros(())}

  def loss(params, inputs):
    values = jnp.tanh(inputs @ params['kernel'] + params['bias'])
    return (values**2).sum(), jnp.sum(values > 0)

  gradient = jax.value_and_grad(loss, has_aux=True)
  ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
  sam = optax.contrib.sam(optax.sgd(1.0), ascent, opaque_mode=True)
  plain, grads = gradient(params, inputs)
  expected, _ = sam.update(grads, sam.init(params), params, grad_fn=lambda params, _: gradient(params, inputs)[1])
  found, aware = sharpness_aware(gradient, 0.3)(params, inputs)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -b, rtol=1e-5), aware, expected)
  assert found == plain
  assert abs(aware['bias'] - grads['bias']) > 1e-3
  _, flat = sharpness_aware(gradient, 0.3)(jax.tree.map(jnp.zeros_like, params), inputs)  # its gradient is 0
  assert all((leaf == 0).all() for leaf in jax.tree.leaves(flat))
