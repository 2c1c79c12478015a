"""Parameters for tests of modules."""

import jax
import numpy as np


def random_params(module, *arguments, **options):
  """Return random parameters in the module's shapes. Initial metrics, sigmas and gains are too special for tests."""
  shapes = jax.eval_shape(lambda key: module.init(key, *arguments, **options), jax.random.key(0))['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda z: (0.5 * rng.normal(size=z.shape)).astype('f'), shapes)
