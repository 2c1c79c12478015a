"""Tests of the public API: imports, the operator's arguments, modules in users' models, and runs on arrays."""

import ast
import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

import hbf

ROOT = pathlib.Path(__file__).parents[1]
ONE = jax.devices()[:1]


def test_import_loads_nothing_heavy_and_keeps_draws_as_they_are():
  """`import hbf` loads no JAX, and neither does `hbf.interop`. Modules load no readers of data sets.

  The environment changes no draws.
  """
  heavy = "[name for name in ('jax', 'tensorflow_datasets', 'grain', 'matplotlib') if name in sys.modules]"
  code = (
    f'import sys, hbf; hbf.interop; print({heavy}); hbf.HyperBFAttention, hbf.hyperbf, hbf.ArrayData; print({heavy})'
  )
  code += '; import jax; print(jax.config.jax_threefry_partitionable)'
  code += '; print(hbf.interop.google.load.__module__)'
  environment = os.environ | {'JAX_THREEFRY_PARTITIONABLE': '0'}
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.stdout.splitlines() == ['[]', "['jax']", 'True', 'hbf.interop.google'], done.stderr


def test_import_after_jax_keeps_draws_as_they_are():
  jax.config.update('jax_threefry_partitionable', False)  # as the environment can
  importlib.reload(hbf)
  assert jax.config.jax_threefry_partitionable


def test_import_reaches_weights_of_other_projects():
  for name in hbf.interop.__all__:
    assert callable(getattr(hbf.interop, name).load)
  with pytest.raises(AttributeError, match='no attribute'):
    hbf.interop.torch  # noqa: B018


def test_every_public_name_is_there_and_known_to_editors():
  for name in hbf.__all__:
    assert getattr(hbf, name) is not None
  assert dir(hbf) == hbf.__all__
  seen = {}
  for node in ast.walk(ast.parse((ROOT / 'hbf' / '__init__.py').read_text())):
    if isinstance(node, ast.ImportFrom) and node.module.startswith('hbf.'):
      seen |= {alias.asname: (node.module, alias.name) for alias in node.names}
  assert seen == hbf._PUBLIC
  with pytest.raises(AttributeError, match='no attribute'):
    hbf.hyperfb  # noqa: B018


def draw(*shapes):
  generator = np.random.default_rng(0)
  return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def defined(
  x,
  centers,
  coefficients,
  sigma=1.0,
  w=None,
  k=lambda s: np.exp(-s),
  normalize=lambda k: k / k.sum(-1, keepdims=True),
):
  """Compute the equations of the docstring of `hbf.hyperbf`, in float64."""
  x, centers, coefficients = (np.float64(z) for z in (x, centers, coefficients))
  difference = x[..., :, None, :] - centers[..., None, :, :]
  difference = difference if w is None else difference @ np.float64(w).T
  return normalize(k((difference**2).sum(-1) / (2 * np.float64(sigma) ** 2))) @ coefficients


def layer(k):
  centered = k - k.mean(-1, keepdims=True)
  return centered / np.sqrt(k.var(-1, keepdims=True) + 1e-6 * k.mean(-1, keepdims=True) ** 2)


def close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)


def test_the_operator_is_its_docstring():
  x, t, c, w, low = draw((5, 3), (4, 3), (4, 2), (3,), (2, 3))
  sigma = np.linspace(0.5, 2, 4).astype(np.float32)
  close(hbf.hyperbf(x, t, c), defined(x, t, c))
  close(hbf.hyperbf(x, t, c, sigma=sigma, normalization='none'), defined(x, t, c, sigma, normalize=lambda k: k))
  close(hbf.hyperbf(x, t, c, metric=w, normalization='layer'), defined(x, t, c, w=np.diag(w), normalize=layer))
  close(
    hbf.hyperbf(x, t, c, metric=low, kernel='rational_quadratic', implementation='plain'),
    defined(x, t, c, w=low, k=lambda s: 1 / (1 + s)),
  )
  close(hbf.hyperbf(x, t, c, metric=low, sigma=2.0), defined(x, t, c, 2.0, w=low))
  close(hbf.hyperbf(x, t, c, metric=low, normalization='layer'), defined(x, t, c, w=low, normalize=layer))
  radius = np.float32([0.5, 1, 2, 3])
  close(
    hbf.hyperbf(x, t, c, kernel='ball_relu', normalization='none', sigma=sigma, radius=radius),
    defined(x, t, c, sigma, k=lambda s: np.maximum(radius**2 / (2 * sigma**2) - s, 0), normalize=lambda k: k),
  )
  seen = np.tri(5, 4, dtype=bool)

  def masked(k):
    return np.where(seen, k, 0) / np.where(seen, k, 0).sum(-1, keepdims=True)

  close(hbf.hyperbf(x, t, c, mask=seen), defined(x, t, c, normalize=masked))
  close(hbf.hyperbf(x, t, c, causal=True), defined(x, t, c, normalize=masked))
  with jax.enable_x64(True):
    found = hbf.hyperbf(*map(np.float64, (x, t, c)), sigma=np.float64(sigma) / 3, normalization='layer')
    np.testing.assert_allclose(found, defined(x, t, c, np.float64(sigma) / 3, normalize=layer), rtol=1e-9)
  heads = hbf.hyperbf(np.stack([x, -x]), t, np.stack([c, c]), sigma=np.float32([[[1]], [[2]]]))
  close(heads[1], defined(-x, t, c, 2.0))


@pytest.mark.parametrize('shape', [(2, 1, 4), (2, 1, 1)])
@pytest.mark.parametrize(
  'options',
  [
    {'kernel': 'laplacian', 'mask': np.ones((5, 4), bool)},
    {'kernel': 'laplacian', 'implementation': 'plain'},
    {'kernel': 'multiquadric', 'normalization': 'none'},
    {'kernel': 'ball_relu', 'normalization': 'none', 'radius': np.float32([[[2.5]], [[1.5]]])},
    {'causal': True},
  ],
)
def test_sigma_and_radius_may_have_axes_that_the_centers_lack(shape, options):
  """Each of two sets of points has its own sigmas. The result is that of each set alone."""
  x, t, c, sigma = draw((2, 5, 3), (4, 3), (4, 2), shape)
  sigma, radius = np.abs(sigma) + 0.5, options.get('radius', [0.0, 0.0])
  found = hbf.hyperbf(x, t, c, sigma=sigma, **options)
  for h in range(2):
    close(found[h], hbf.hyperbf(x[h], t, c, **options | {'sigma': sigma[h], 'radius': radius[h]}))


X, T, C = draw((5, 3), (4, 3), (4, 2))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'x': np.ones((5, 3), int)}, r'x has type int\w+: expected floats'),
    ({'x': X[0]}, r'x has shape \[3\] .*expected \[..., N, D\]'),
    ({'centers': T[:, :2]}, r'centers has shape \[4, 2\] .*expected \[..., A, 3\], as x has shape \[5, 3\]'),
    ({'coefficients': C[:3]}, r'coefficients has shape \[3, 2\] .*expected \[..., 4, V\]'),
    ({'x': np.stack([X] * 2), 'centers': np.stack([T] * 3)}, r'leading axes of x \[2, 5, 3\], centers \[3, 4, 3\]'),
    ({'kernel': 'gausian'}, "did you mean 'gaussian'"),
    ({'normalization': 'softmax'}, "unknown normalization 'softmax'"),
    ({'implementation': 'cuda'}, "unknown implementation 'cuda'"),
    ({'kernel': 'ball_relu'}, 'kernel ball_relu can change sign'),
    ({'sigma': 0.0}, 'sigma is 0.0: expected a number above 0'),
    ({'sigma': [1.0, 2.0, 3.0, 0.0]}, r'sigma is \[1.0, 2.0, 3.0, 0.0\]: expected a number above 0'),
    ({'sigma': None}, 'sigma has type NoneType: expected an array'),
    ({'x': 'abc'}, 'x has type str: expected an array'),
    ({'metric': 'diagonal'}, 'metric has type str: expected an array'),
    ({'mask': 'causal'}, 'mask has type str: expected an array'),
    (
      {'centers': T[:0], 'coefficients': C[:0], 'normalization': 'sum'},
      r'centers has shape \[0, 3\]: expected a center',
    ),
    ({'sigma': np.ones(3)}, r'sigma has shape \[3\] .*broadcasts to \[1, 4\]'),
    ({'radius': 1.0}, 'radius is for ball kernels'),
    ({'metric': 2.0}, r'metric has shape \[\] .*expected None, or floats \[3\]'),
    ({'metric': np.eye(2)}, r'metric has shape \[2, 2\]'),
    ({'mask': np.zeros((5, 4))}, 'mask has type float32: expected booleans'),
    ({'mask': np.ones((4, 5), bool)}, r'mask has shape \[4, 5\] .*broadcasts to \[5, 4\]'),
  ],
)
def test_the_operator_names_a_bad_argument(changes, message):
  arguments = {'x': X, 'centers': T, 'coefficients': C} | changes
  with pytest.raises(ValueError, match=message):
    hbf.hyperbf(**arguments)


class Own(nn.Module):
  """A Flax model of a user, with blocks of this package."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(32)(x)
    x = hbf.Block(hbf.HyperBFAttention(heads=4), hbf.HyperBFCenters(64))(x)
    return hbf.Block(hbf.HyperBFAttention(heads=4))(x, hbf.Context(causal=True))


def test_a_block_in_a_flax_model():
  x = jnp.asarray(draw((2, 16, 8))[0])
  variables = jax.jit(Own().init)(jax.random.key(0), x)
  params = variables['params']
  assert params.keys() == {'Dense_0', 'Block_0', 'Block_1'}
  assert params['Block_0'].keys() == {'norm_stage1', 'stage1', 'norm_stage2', 'stage2'}
  assert params['Block_0']['stage2']['centers'].shape == (1, 64, 32)
  gradient = jax.jit(jax.grad(lambda p: Own().apply({'params': p}, x).sum()))(params)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


class InSetup(nn.Module):
  """A model with blocks that are made in `setup`. One of them is recomputed to save memory."""

  def setup(self):
    self.first = hbf.Block(hbf.HyperBFAttention(heads=2), hbf.MLP(4))
    self.second = nn.remat(hbf.Block)(hbf.GatedHyperBF(heads=2, hidden=4))

  def __call__(self, x):
    return self.second(self.first(x))


def test_blocks_in_setup_and_under_remat():
  params = jax.eval_shape(InSetup().init, jax.random.key(0), jnp.ones((1, 4, 8)))['params']
  assert {name: set(block) for name, block in params.items()} == {
    'first': {'norm_stage1', 'stage1', 'norm_stage2', 'stage2'},
    'second': {'norm_stage1', 'stage1'},
  }


def test_a_block_outside_of_a_model_and_a_stage_in_two_blocks():
  stage, x = hbf.HyperBFAttention(heads=2, kernel='laplacian', dtype=jnp.bfloat16), jnp.asarray(draw((1, 4, 8))[0])
  blocks = nn.Sequential([hbf.Block(stage), hbf.Block(stage, dtype=jnp.float32)])
  params = jax.jit(blocks.init)(jax.random.key(0), x)['params']
  first, second = (params[f'layers_{i}']['stage1']['qkv']['kernel'] for i in range(2))
  assert not np.array_equal(first, second)
  apply = functools.partial(blocks.apply, capture_intermediates=True)
  sown = jax.eval_shape(apply, {'params': params}, x)[1]['intermediates']
  types = [sown[f'layers_{i}']['stage1']['__call__'][0].dtype for i in range(2)]
  assert types == [jnp.bfloat16, jnp.float32]  # the stage's own, and the block's
  with pytest.raises(ValueError, match='stage1 is 3: expected a module'):
    hbf.Block(3)
  with pytest.raises(ValueError, match='HyperBFAttention: heads is 0'):
    hbf.HyperBFAttention(heads=0)


@pytest.mark.parametrize(
  'options', [{}, {'causal': True}, {'mask': jnp.ones((5, 0), bool)}, {'implementation': 'plain'}], ids=str
)
@pytest.mark.parametrize('kernel', ['laplacian', 'ball_relu'])
def test_the_sum_over_no_centers_is_0(kernel, options):
  x, centers, coefficients = jnp.ones((2, 5, 3)), jnp.ones((0, 3)), jnp.ones((0, 4), jnp.bfloat16)
  out = hbf.hyperbf(x, centers, coefficients, kernel=kernel, normalization='none', **options)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, np.zeros((2, 5, 4)))


def test_the_operator_under_equinox():
  import equinox as eqx  # the other tests do without it

  class Layer(eqx.Module):
    """A HyperBF layer of a user, written in Equinox."""

    centers: jax.Array
    coefficients: jax.Array
    log_sigma: jax.Array

    def __call__(self, x):
      return hbf.hyperbf(x, self.centers, self.coefficients, sigma=jnp.exp(self.log_sigma))

  x, t, c = map(jnp.asarray, draw((2, 5, 3), (4, 3), (4, 2)))
  model = Layer(t, c, jnp.zeros(()))
  loss = eqx.filter_value_and_grad(lambda model, x: jax.vmap(model)(x).sum())
  value, gradient = eqx.filter_jit(loss)(model, x)
  np.testing.assert_allclose(value, defined(x, t, c).sum(), rtol=1e-5)
  assert gradient.log_sigma.shape == () and np.abs(gradient.centers).min() > 0


def arrays(train=160, test=40):
  """Return random images with labels. The brighter half of an image tells its class."""
  generator = np.random.default_rng(0)
  images = generator.integers(0, 100, (train + test, 8, 8, 1), dtype=np.uint8)
  labels = generator.integers(0, 2, train + test)
  images[labels == 1, :4] += 120
  images[labels == 0, 4:] += 120
  return images[:train], labels[:train], images[train:], labels[train:]


DATA = hbf.ArrayData(*arrays(), class_names=('below', 'above'))


def tiny(**changes):
  config = hbf.get_config('arrays', model='hyperbf', recipe='small')
  config.model.update(width=8, depth=1, heads=2, patch=4, expansion=1.0)
  config.data.update(transforms=(('flip',),), validation=0.25)
  config.train.update(epochs=4.0, batch_size=40)
  config.evaluate.every = config.checkpoint.every = '1epoch'
  config.log.update(every='2steps', units=False)
  config.update_from_flattened_dict(changes)
  return config


def train(config, workdir, **options):
  return hbf.train(config, workdir, DATA, devices=ONE, progress=False, **options)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Return a run that was trained in a thread: its folder (a str), its result, and what a callback saw."""
  workdir, seen, results = str(tmp_path_factory.mktemp('api') / 'run'), [], []

  def log(step, metrics, state):
    seen.append((step, dict(metrics), int(state.step)))

  thread = threading.Thread(target=lambda: results.append(train(tiny(), workdir, callbacks=[log])))
  thread.start()
  thread.join()
  return workdir, results[0], seen


def test_train_on_arrays_in_a_thread(trained):
  workdir, result, seen = trained
  assert (result['dataset'], result['steps'], result['n']) == ('arrays', 12, 40)
  assert [step for step, _, _ in seen] == [state_step for _, _, state_step in seen] == list(range(1, 13))
  assert all({'epoch', 'loss', 'accuracy'} <= metrics.keys() for _, metrics, _ in seen)
  assert [step for step, metrics, _ in seen if 'validation' in metrics] == [3, 6, 9, 12]
  assert seen[2][1]['validation']['accuracy'] >= 0 and seen[-1][1]['epoch'] == 4.0
  assert train(tiny(), pathlib.Path(workdir)) == result  # it is finished


def test_a_loaded_run_predicts_and_evaluates(trained):
  workdir, result, _ = trained
  run = hbf.load(workdir)
  assert (run.classes, run.step, run.config.model.width) == (('below', 'above'), 12, 8)
  probabilities = run.predict(DATA.x_test, batch_size=16)
  np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
  assert 100 * np.mean(probabilities.argmax(axis=1) == DATA.y_test) == pytest.approx(result['accuracy'])
  logits = jax.jit(run.model.apply, static_argnames='train')(
    {'params': run.params}, run.normalize(DATA.x_test), train=False
  )
  np.testing.assert_allclose(jax.nn.softmax(logits), probabilities, atol=1e-5)
  np.testing.assert_array_equal(run.predict(DATA.x_test / 255, batch_size=16), probabilities)
  found = run.evaluate('test', data=DATA)
  assert (found['accuracy'], found['nll'], found['n']) == (result['accuracy'], result['nll'], 40)
  assert repr(run).startswith('Run(') and 'hyperbf' in repr(run)
  assert repr(DATA) == 'ArrayData(160 + 40 images of 8×8×1, 2 classes)'
  with pytest.raises(
    ValueError, match=r'images has shape \[40, 8, 8\]: expected \[N, 8, 8, 1\], as in training: add'
  ):
    run.predict(DATA.x_test[..., 0])
  for size in (0, None, 2.5, True):
    with pytest.raises(ValueError, match=f'batch_size is {size}: expected a whole number of 1 or more'):
      run.predict(DATA.x_test, batch_size=size)


def test_other_arrays_than_the_runs_are_refused(trained):
  x_train, y_train, x_test, y_test = arrays()
  red = functools.partial(np.pad, pad_width=((0, 0), (0, 0), (0, 0), (0, 2)))
  others = {
    'other data .as many examples': hbf.ArrayData(x_train, 1 - y_train, x_test, y_test, ('below', 'above')),
    'other data .sizes': hbf.ArrayData(x_train, y_train, x_test[1:], y_test[1:], ('below', 'above')),
    'other data .classes': hbf.ArrayData(x_train, y_train, x_test, y_test),
    'other data .*classes': hbf.ArrayData(x_train, y_train + 1, x_test, y_test),
    'other data .*image shape': hbf.ArrayData(red(x_train), y_train, red(x_test), y_test, ('below', 'above')),
  }
  for message, data in others.items():
    with pytest.raises(ValueError, match=f'{message}.*give the same arrays'):
      hbf.evaluate(trained[0], data=data)


def test_a_run_on_arrays_says_where_each_call_gets_them(trained):
  run, images = hbf.load(trained[0]), DATA.x_test[:1]
  calls = {
    r'give the arrays as data=.*; commands need a run on array_files': lambda: run.evaluate('test'),
    r'hbf.edit needs training images.*: give among=x_train$': lambda: hbf.edit(run, images, ['above']),
    r'hbf.learn needs training.*: give among=\(x_train, y_train\)$': lambda: hbf.learn(run, images, ['beside']),
  }
  for message, call in calls.items():
    with pytest.raises(ValueError, match=message):
      call()


def newest(workdir):
  """Return the step of the newest checkpoint."""
  return max(int(path.name) for path in (workdir / 'checkpoints').iterdir())


@pytest.mark.slow
def test_a_callback_stops_a_run_and_the_same_call_goes_on(trained, tmp_path):
  steps = []

  def stop(step, metrics, state):
    steps.append(step)
    return np.bool_(step == 5)

  assert train(tiny(), tmp_path / 'run', callbacks=[stop]) is None
  assert newest(tmp_path / 'run') == 5

  def fail(step, metrics, state):
    steps.append(step)
    if step == 7:
      raise PermissionError(13, 'mine')

  with pytest.raises(PermissionError, match='mine'):
    train(tiny(), tmp_path / 'run', callbacks=[fail])
  assert newest(tmp_path / 'run') == 7
  with pytest.raises(ValueError, match="a callback returned 'stop': expected True"):
    train(tiny(), tmp_path / 'run', callbacks=[lambda step, *_: steps.append(step) or 'stop'])
  result = train(tiny(), tmp_path / 'run', callbacks=[lambda step, *_: steps.append(step) or step == 12])
  assert steps == list(range(1, 13))
  assert (result['accuracy'], result['nll']) == (trained[1]['accuracy'], trained[1]['nll'])


def test_ctrl_c_saves_the_run_and_then_interrupts(tmp_path):
  before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT for background jobs
  try:
    with pytest.raises(KeyboardInterrupt):
      train(tiny(), tmp_path / 'run', callbacks=[lambda step, *_: step == 2 and os.kill(os.getpid(), signal.SIGINT)])
    assert newest(tmp_path / 'run') == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  finally:
    signal.signal(signal.SIGINT, before)


def test_a_signal_reaches_the_process_once_the_run_is_on_its_bucket(tmp_path, monkeypatch):
  """The process's own handler may end it."""
  happened = []

  @contextlib.contextmanager
  def mirrored(address, console):
    yield tmp_path / 'run'
    happened.append('uploaded')

  monkeypatch.setattr('hbf.api.mirrored', mirrored)
  before = signal.signal(signal.SIGTERM, lambda *_: happened.append('handled'))
  try:
    train(tiny(), 's3://runs/run', callbacks=[lambda step, *_: step == 2 and os.kill(os.getpid(), signal.SIGTERM)])
  finally:
    signal.signal(signal.SIGTERM, before)
  assert happened == ['uploaded', 'handled'] and newest(tmp_path / 'run') == 2


IMAGES, LABELS, *TEST = arrays(8, 4)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'x_train': IMAGES[..., 0]}, r'x_train has shape \[8, 8, 8\]: expected \[N, H, W, C\]: add a channel axis'),
    ({'x_train': IMAGES[:0]}, r'x_train has shape \[0, 8, 8, 1\]: expected \[N, H, W, C\], and N is 1 or more'),
    ({'x_train': IMAGES[0]}, r'x_train has shape \[8, 8, 1\]: .*: for one image, give x_train\[None\]'),
    ({'y_train': LABELS.astype(str)}, r'y_train has type <U21: expected whole numbers.*return_inverse=True'),
    ({'x_train': np.repeat(IMAGES, 4, axis=-1)}, r'x_train has 4 channels: expected 1 \(gray\) or 3'),
    ({'x_train': IMAGES.astype(int)}, 'x_train has type int64: expected uint8, or floats from 0 to 1'),
    ({'x_train': IMAGES.astype(float)}, 'x_train has values from 0 to .*: expected floats from 0 to 1'),
    ({'x_train': [IMAGES[0], IMAGES[0, 1:]]}, 'x_train has images of different shapes: crop or resize them'),
    ({'x_train': np.full(IMAGES.shape, np.nan)}, r'x_train has values that are not numbers \(NaN\)'),
    ({'x_test': IMAGES[:, :4]}, r'x_test has shape \[8, 4, 8, 1\]: expected \[N, 8, 8, 1\], as x_train'),
    ({'y_train': LABELS[:7]}, r'y_train has shape \[7\]: expected \[8\], a label for each of x_train'),
    ({'y_train': LABELS[:, None]}, r'y_train has shape \[8, 1\].*use y_train.ravel\(\)'),
    ({'y_train': LABELS / 2}, 'y_train has type float64: expected whole numbers'),
    ({'y_train': LABELS - 1}, 'y_train has label -1: expected 0 or more'),
    ({'y_train': 0 * LABELS}, 'y_train has label 0 only'),
    ({'y_train': 0 * LABELS + 1}, 'y_train has label 1 only: expected two classes or more'),
    ({'y_train': 0 * LABELS, 'class_names': ('a', 'b')}, 'y_train has label 0 only'),
    ({'y_test': TEST[1] + 7}, 'y_test has label [78]: expected 0 to 1, for 2 classes'),
    ({'y_train': LABELS + 1, 'class_names': ('a', 'b')}, 'y_train has label 2: expected 0 to 1'),
    ({'class_names': 'ab'}, "class_names is 'ab': expected two texts"),
    ({'class_names': np.array(3)}, r'class_names is array\(3\): expected two texts or more'),
    ({'class_names': ('a', 'a')}, 'all different'),
  ],
)
def test_bad_arrays_are_named(changes, message):
  arguments = {'x_train': IMAGES, 'y_train': LABELS, 'x_test': TEST[0], 'y_test': TEST[1]} | changes
  with pytest.raises(ValueError, match=message):
    hbf.ArrayData(**arguments)


def test_bad_arguments_of_runs_are_named_and_nothing_is_written(trained, tmp_path):
  config, workdir = tiny(), tmp_path / 'run'
  text = hbf.get_config('text')
  calls = {
    r"config is 'cifar10': expected a ConfigDict": lambda: hbf.train('cifar10', workdir),
    'the config lacks task: begin with a whole one': lambda: train(ml_collections.ConfigDict(), workdir),
    r'callbacks is <function.*: expected a list of functions': lambda: train(config, workdir, callbacks=arrays),
    'data is a tuple: expected hbf.ArrayData': lambda: hbf.train(config, workdir, arrays()),
    r'callbacks has 3: expected functions': lambda: train(config, workdir, callbacks=[3]),
    'workdir is None: expected a folder': lambda: train(config, None),
    'config is for task next_token, and data holds images': lambda: train(text, workdir),
    r'optimizer.learning_rate is -1.0': lambda: train(tiny(**{'optimizer.learning_rate': -1.0}), workdir),
    "unknown data set 'cifar11': did you mean 'cifar10'": lambda: hbf.get_config('cifar11'),
    "unknown recipe 'laptob': did you mean 'laptop'": lambda: hbf.get_config('cifar10', recipe='laptob'),
    "model is 'vit,recipe=memo': expected a name": lambda: hbf.get_config('cifar10', model='vit,recipe=memo'),
    'is not the workdir of a run': lambda: hbf.load(workdir),
    r"device is 'cpu': expected a device, such as jax.devices\('cpu'\)\[0\]": lambda: hbf.load(workdir, device='cpu'),
    r"unknown split \['test'\]: did you mean 'test'": lambda: hbf.evaluate(trained[0], ['test'], data=DATA),
    "edits is 'x': expected True": lambda: hbf.evaluate(workdir, edits='x'),
    r"run is 'm': expected a loaded run, such as hbf.load": lambda: hbf.edit('m', IMAGES, [0]),
    r"run is 'n': expected a loaded run, such as hbf.load": lambda: hbf.learn('n', IMAGES, ['a']),
    'not the workdir of a run': lambda: hbf.evaluate(workdir),
  }
  for message, call in calls.items():
    with pytest.raises(ValueError, match=message):
      call()
  assert not workdir.exists()


@pytest.mark.parametrize('devices', ['cpu', [0], [], ONE[0], ONE * 2])
def test_devices_are_a_list_of_different_devices(devices, tmp_path):
  for call in (functools.partial(hbf.train, tiny(), tmp_path / 'run', DATA), functools.partial(hbf.evaluate, 'run')):
    with pytest.raises(ValueError, match=r'^devices is .*: expected a list of different devices, such as'):
      call(devices=devices)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('answers', 'message'),
  [
    (3, 'answers is 3: expected a list with an entry for each image'),
    ('above', "answers is 'above': expected a list with an entry for each image"),
    (np.array(1), r'answers is array\(1\): expected a list'),
    ({'1'}, r"answers is \{'1'\}: expected a list"),  # a set has no order
    ({'1': 0}, r"answers is \{'1': 0\}: expected a list"),
    ([0, 1], 'answers has 2 entries for 1 images: expected one for each image'),
  ],
)
def test_answers_are_a_list_with_an_entry_for_each_image(trained, answers, message):
  with pytest.raises(ValueError, match=message):
    hbf.edit(hbf.load(trained[0]), DATA.x_test[:1], answers, among=DATA.x_train)


def test_get_config_is_what_the_flag_gives():
  from hbf.config.command_line import read_config
  from hbf.config.resolve import resolve

  config = hbf.get_config('cifar10', model='vit', recipe='laptop')
  config.optimizer.learning_rate = 1e-3
  flags = ['--config=configs/cifar10.py:model=vit,recipe=laptop', '--config.optimizer.learning_rate=1e-3']
  assert resolve(config).to_json() == read_config(flags).to_json()


def run_page(name, scope):
  """Run the Python examples of a how-to page, one after another."""
  blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / 'how-to' / name).read_text(), re.DOTALL)
  assert len(blocks) >= 4
  for block in blocks:
    assert block.count('\n') <= 16
    exec(block, scope)


def test_the_page_on_models_of_your_own_runs():
  scope = {}
  run_page('use-in-flax.md', scope)
  # The block under NNX computes what it does in Linen.
  params = nnx.to_pure_dict(nnx.state(scope['model'], nnx.Param))
  expected = scope['block'].apply({'params': params}, scope['inputs'])
  np.testing.assert_allclose(scope['tokens'], expected, rtol=1e-6)
  assert scope['logits'].shape == (2, 10) and scope['gradients'].centers.shape == (4, 3)
  assert scope['of_batch'].shape[1] == 10 and scope['of_batch'].sharding.spec[0] == 'batch'


def test_the_page_on_arrays_of_your_own_runs(tmp_path, monkeypatch):
  """The models and the number of epochs are smaller here. A model that the page does not name is identity."""
  monkeypatch.chdir(tmp_path)
  get_config = hbf.get_config

  def small_config(data, **names):
    config = get_config(data, **{'model': 'identity', **names})
    config.model.update(width=8, depth=1, heads=2, patch=4, expansion=1.0, stem='patch')
    config.log.units = False
    return config

  def short_train(config, *args, **options):
    config.train.epochs = 2
    return train_one(config, *args, **options)

  train_one = functools.partial(hbf.train, devices=ONE)
  monkeypatch.setitem(vars(hbf), 'get_config', small_config)
  monkeypatch.setitem(vars(hbf), 'train', short_train)
  scope = {}
  run_page('own-arrays.md', scope)
  assert scope['result']['dataset'] == 'arrays' and scope['probabilities'].shape == (297, 10)
  assert json.loads((tmp_path / 'runs/labels/result.json').read_text())['task'] == 'multi_label'
  assert scope['scores']['task'] == 'regression'
