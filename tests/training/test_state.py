import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.training.state import Totals, TrainState, several


def add_twice(state, resident, batch):
  """Not commutative, so that the order shows."""
  return state.replace(step=state.step + 1, params=2 * state.params + batch['index'] + resident['image'])


@pytest.mark.parametrize('count', [0, 1, 3])
def test_one_call_takes_as_many_steps_as_it_is_told(count):
  stack, resident = {'index': jnp.arange(12).reshape(3, 4)}, {'image': jnp.array(5)}
  start = TrainState(jnp.array(7), jnp.zeros(4, jnp.int32), (), Totals.zeros())
  state, step = jax.jit(several(add_twice))(start, resident, stack, count)
  expected = start
  for row in range(count):
    expected = add_twice(expected, resident, {'index': stack['index'][row]})
  np.testing.assert_array_equal(state.params, expected.params)
  assert int(state.step) == int(step) == 7 + count
