"""Parameters for tests of modules."""

import jax
import numpy as np


def random_params(module, *arguments, **options):
  """Parameters of the module's shapes drawn by NumPy: metrics, widths and gains start too special to test with."""
  shapes = jax.eval_shape(lambda key: module.init(key, *arguments, **options), jax.random.key(0))['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda z: (0.5 * rng.normal(size=z.shape)).astype('f'), shapes)
