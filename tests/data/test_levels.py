import dataclasses

import jax
import numpy as np
import pytest
from in_memory import ArraySource
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data.images.levels import BLOCK, column_sums, statistics
from hbf.data.pipeline.inputs import DeviceInput, StreamInput


def _statistics(data):
  return statistics(*data.sums())


def _moments(images):
  pixels = images.astype(np.float64).reshape(-1, images.shape[-1]) / 255
  return [pixels.mean(0), pixels.std(0)]


@pytest.mark.parametrize('shape', [(4, 6, 3), (8, 8, 1)])
def test_statistics_are_exact(make_source, sharding, shape):
  source = make_source(130, shape)
  found = _statistics(DeviceInput(source, sharding))
  assert _statistics(StreamInput(source, sharding, 0)) == found
  np.testing.assert_allclose(found, _moments(source.images), rtol=1e-12)


def test_sums_of_more_images_than_a_block_are_exact(make_source):
  """The images are white: the squares of one image more than a block could overflow."""
  alone = NamedSharding(Mesh(np.array(jax.devices()[:1]), ('data',)), PartitionSpec('data'))
  sums = np.asarray(column_sums(np.full((BLOCK + 600, 2), 255, np.uint8), alone)).astype(np.int64)
  assert sums.shape == (2, 2, 2)
  np.testing.assert_array_equal(sums.sum(axis=1), np.array([[255] * 2, [255**2] * 2]) * (BLOCK + 600))


def test_sums_keep_no_copy_of_the_images(sharding):
  """A copy would limit the size of the data sets that a laptop can hold."""
  images = jax.ShapeDtypeStruct((8 * 1000, 3072), np.uint8, sharding=sharding)
  program = jax.jit(column_sums, static_argnums=1).lower(images, sharding).compile()
  assert program.memory_analysis().temp_size_in_bytes < images.size / sharding.num_devices / 10


@dataclasses.dataclass(frozen=True)
class _Counted(ArraySource):
  """A source that records the requested examples."""

  asked: list[int] = dataclasses.field(default_factory=list)

  def __getitem__(self, index):
    self.asked.append(index)
    return super().__getitem__(index)


def test_of_a_stream_evenly_spaced_examples_only_are_read(make_source, sharding):
  whole = make_source(3 * 4096 + 1, (1, 1, 3))
  source = _Counted(whole.images, whole.labels)
  data = StreamInput(source, sharding, 0)
  source.asked.clear()
  found = _statistics(data)
  asked = sorted(source.asked)
  assert len(asked) == 4096 and set(np.diff(asked)) <= {3, 4} and asked[-1] >= len(whole) - 4
  np.testing.assert_allclose(found, _moments(whole.images[asked]), rtol=1e-12)
  exact = _statistics(DeviceInput(whole, sharding))
  np.testing.assert_allclose(exact, _moments(whole.images), rtol=1e-12)


def test_a_constant_channel_can_be_divided_by(make_source, sharding):
  source = make_source(10)
  source.images[..., 1] = 7
  mean, std = _statistics(DeviceInput(source, sharding))
  assert mean[1] == 7 / 255 and std[1] == 1 / 255
