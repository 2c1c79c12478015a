import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn.drawn import apply

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import abstract_params, build_model
from hbf.models.nested import first_centers

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 3)), jnp.float32)


def make_model_config(**stage2):
  config = resolve(make_config('', {'name': 'cifar10'})).model
  config.update(width=16, depth=2, heads=2)
  config.stage2.update(centers=6, **stage2)
  return config


def make(**stage2):
  config = make_model_config(**stage2)
  model = build_model(config, 3)
  return config, jax.jit(lambda key: model.init(key, IMAGES, train=False))(jax.random.key(0))['params']


def logits(config, params):
  model = build_model(config, 3)
  return np.asarray(apply(model, params, IMAGES, train=False))


@pytest.mark.parametrize(('normalization', 'widths'), [('none', 'center'), ('sum', 'layer'), ('none', 'fixed')])
def test_the_first_centers_are_the_network_without_the_others(normalization, widths):
  """The other centers have coefficients of 0 and never respond, so they have no effect."""
  config, params = make(normalization=normalization, sigma_per=widths)
  silent = jax.tree.map(np.array, params)
  for block in ('block0', 'block1'):
    silent[block]['stage2']['coefficients'][:, 4:] = 0
    silent[block]['stage2']['centers'][:, 4:] = 1e3
  np.testing.assert_allclose(logits(*first_centers(config, params, 4)), logits(config, silent), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('radius', ['relative', 'absolute'])
def test_balls_can_be_cut_too(radius):
  config, params = make(normalization='none', kernel='ball_relu', coefficients='linear', radius=radius)
  silent = jax.tree.map(np.array, params)
  for block in ('block0', 'block1'):
    silent[block]['stage2']['coefficients'][:, 4:] = 0
  np.testing.assert_allclose(logits(*first_centers(config, params, 4)), logits(config, silent), rtol=1e-4, atol=1e-5)


def test_blocks_after_merged_tokens_keep_twice_as_many_centers():
  config = make_model_config()
  config.update(pool='mean', patch=2, merge=(1, 2), depth=3)
  params = jax.tree.map(lambda z: np.zeros(z.shape), abstract_params(build_model(config, 3), IMAGES.shape[1:]))
  cut, cut_params = first_centers(config, params, 3)
  assert [cut_params[block]['stage2']['centers'].shape[1] for block in ('block0', 'block1', 'block2')] == [3, 6, 12]
  shapes = abstract_params(build_model(cut, 3), IMAGES.shape[1:])
  assert jax.tree.map(np.shape, cut_params) == jax.tree.map(np.shape, shapes)


def test_all_centers_are_the_network_and_nothing_is_changed():
  config, params = make()
  before = config.to_json()
  same, same_params = first_centers(config, params, 6)
  assert same.to_json() == config.to_json() == before
  jax.tree.map(np.testing.assert_array_equal, same_params, params)
  cut, cut_params = first_centers(config, params, 3)
  assert cut.stage2.centers == 3
  shapes = jax.eval_shape(lambda x: build_model(cut, 3).init(jax.random.key(0), x, train=False), IMAGES)['params']
  assert jax.tree.map(np.shape, cut_params) == jax.tree.map(np.shape, shapes)


@pytest.mark.parametrize('count', [0, 7])
def test_a_number_of_centers_that_there_is_not_is_refused(count):
  with pytest.raises(UserError, match=f'{count} centers can not be taken: the model has 6'):
    first_centers(*make(), count)


def test_a_model_without_centers_is_refused():
  config = resolve(make_config('model=vit', {'name': 'cifar10'})).model
  with pytest.raises(UserError, match='vit has no centers in its stage 2'):
    first_centers(config, {}, 1)
