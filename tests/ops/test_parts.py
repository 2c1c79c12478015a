import jax.numpy as jnp
import numpy as np
import pytest

from hbf.ops.parts import join, split


@pytest.mark.parametrize(('shape', 'axis'), [((7, 3), -2), ((2, 7, 3), -2), ((8, 3, 2), 0), ((7,), 0)])
@pytest.mark.parametrize('count', [1, 2, 4, 9])
def test_row_i_goes_to_part_i_modulo_their_number(shape, axis, count):
  z = np.arange(np.prod(shape), dtype='f').reshape(shape)
  parts, length = np.asarray(split(jnp.asarray(z), count, axis, fill=np.inf)), shape[axis]
  rows = np.moveaxis(z, axis, 0)
  for i, part in enumerate(parts):
    part = np.moveaxis(part, axis, 0)
    mine = rows[i::count]
    np.testing.assert_array_equal(part[: len(mine)], mine)
    assert np.all(np.isinf(part[len(mine) :]))
    assert len(part) == -(-length // count)
  np.testing.assert_array_equal(join(jnp.asarray(parts), length, axis), z)
