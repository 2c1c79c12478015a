import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hbf.training import on_host as small
from hbf.training.checksum import checksum


def tree():
  return {
    'matrix': jax.random.normal(jax.random.key(0), (8, 6)),
    'short': jnp.arange(8, dtype=jnp.bfloat16),
    'whole': jnp.arange(8),
    'bytes': jnp.arange(8, dtype=jnp.uint8),
    'flags': jnp.arange(8) > 3,
    'number': jnp.float32(3),
  }


def test_it_is_the_same_however_arrays_lie():
  mesh = jax.make_mesh((4, 2), ('data', 'fsdp'))
  for axes in ((), ('data',), (('data', 'fsdp'),)):
    placed = {
      name: jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*axes[: leaf.ndim])))
      for name, leaf in tree().items()
    }
    assert checksum(placed) == checksum(tree())
  assert checksum(jax.tree.map(np.asarray, tree())) == checksum(tree())


def test_host_and_devices_agree(monkeypatch):
  with jax.enable_x64(True):
    arrays = tree() | {'wide': jnp.arange(6.0).reshape(2, 3) / 7, 'empty': jnp.zeros((0, 3))}
    assert arrays['wide'].dtype == jnp.float64
    on_host = checksum(arrays)
    monkeypatch.setattr(small, 'SMALL', -1)
    assert checksum(arrays) == on_host


def test_every_bit_and_every_place_counts():
  whole = jax.tree.map(np.asarray, tree())
  seen = {checksum(whole)}
  for name, leaf in whole.items():
    for bit in range(1 if leaf.dtype == bool else 8 * leaf.dtype.itemsize):
      changed = np.array(leaf, ndmin=1)
      changed.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
      seen.add(checksum(whole | {name: changed.reshape(leaf.shape)}))
  assert len(seen) == 1 + 32 + 16 + 32 + 8 + 1 + 32
  rows = whole['matrix'][[1, 0, *range(2, 8)]]
  assert checksum(whole | {'matrix': rows}) not in seen
  assert checksum(whole | {'matrix': whole['matrix'].T}) not in seen
