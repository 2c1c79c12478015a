"""A small untrained network on the digits, as a run to analyze."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.analysis.trained_run import TrainedRun
from hbf.tasks.registry import make_task
from hbf.training.restore import Restored
from hbf.training.sharding import make_mesh


@pytest.fixture(scope='session')
def made(toy):
  """Return a function that makes runs with random parameters: `made('model=vit', **{'model.pool': 'mean'})`."""

  @functools.cache
  def make(arguments='model=hyperbf', seed=0, **changes):
    config = toy(
      arguments, **{'model.depth': 2, 'model.patch': 2, 'data.mean': (0.3,), 'data.std': (0.4,), **changes}
    )
    task = make_task(config)
    model = task.make_model(config.model)
    init = jax.jit(lambda key: model.init(key, jax.random.normal(key, (4, *task.shape)), train=False)['params'])
    params = init(jax.random.key(seed))
    rng = np.random.default_rng(seed + 1)  # JAX would compile a program for each shape
    noisy = lambda z: jnp.asarray(np.asarray(z) + 0.1 * rng.normal(size=z.shape), z.dtype)  # noqa: E731
    params = jax.tree.map(noisy, params)
    mesh = make_mesh(jax.devices()[:1])
    return TrainedRun(pathlib.Path('nowhere'), Restored(config, mesh, task, 0, model, params))

  return make


@pytest.fixture(scope='session')
def run(made):
  """Return a run with HyperBF in both stages."""
  return made()


@pytest.fixture(scope='session')
def merged(made):
  """Return a run with 4×4 tokens of width 16 in block 0, and 2×2 tokens of width 32 in block 1."""
  return made(**{'model.merge': (1,), 'model.pool': 'mean'})


@pytest.fixture(scope='session')
def images(run):
  """Return sixteen test images, as uint8."""
  return np.ascontiguousarray(run.test.images[:16])
