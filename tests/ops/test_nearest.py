"""The greatest values of a row against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.ops.nearest import greatest


@pytest.mark.parametrize('count', [1, 2, 7, 16])
def test_they_are_those_that_a_sort_puts_first(count):
  values = np.random.default_rng(0).normal(size=(3, 50, 16)).astype(np.float32)
  result = np.asarray(jax.jit(greatest, static_argnums=1)(values, count))
  np.testing.assert_array_equal(result, values >= np.sort(values)[..., -count, None])
  assert (result.sum(axis=-1) == count).all()


@pytest.mark.parametrize(
  ('count', 'expected'), [(1, [0, 1, 1, 0, 0]), (2, [1, 1, 1, 0, 0]), (3, [1, 1, 1, 1, 1]), (4, [1, 1, 1, 1, 1])]
)
def test_equal_values_count_as_one_and_minus_infinity_is_the_least(count, expected):
  values = jnp.array([1.0, 2.0, 2.0, -jnp.inf, -jnp.inf])
  assert greatest(values, count).tolist() == [bool(z) for z in expected]
