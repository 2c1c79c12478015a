"""What the tests of every importer ask of it."""

import functools

import jax
import numpy as np


def assert_logits(module, variables, images, expected):
  """A module's logits of two images are the expected ones, which depend on the image."""
  found = np.asarray(jax.jit(functools.partial(module.apply, train=False))(variables, images))
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
  assert np.ptp(expected, axis=0).max() > 0.01  # of two images: far more than the tolerance
