"""Checks that the tests of all importers share."""

import functools

import jax
import numpy as np


def assert_logits(module, variables, images, expected):
  """Check a module's logits of two images. The expected logits must depend on the image."""
  found = np.asarray(jax.jit(functools.partial(module.apply, train=False))(variables, images))
  assert found.dtype == np.float32
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
  assert np.ptp(expected, axis=0).max() > 0.01  # far more than the tolerance
