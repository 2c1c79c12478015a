"""Parameters and outputs of modules, for tests."""

import jax
import numpy as np


def random_params(module, *arguments, **options):
  """Return random parameters in the module's shapes. Initial metrics, sigmas and gains are too special for tests."""
  shapes = jax.eval_shape(lambda key: module.init(key, *arguments, **options), jax.random.key(0))['params']
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda z: (0.5 * rng.normal(size=z.shape)).astype('f'), shapes)


def apply(module, params, *arguments, **options):
  """Return a module's output, compiled as one program. One by one, its operations take longer to compile."""
  return jax.jit(lambda params: module.apply({'params': params}, *arguments, **options))(params)
