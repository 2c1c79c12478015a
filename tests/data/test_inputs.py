import contextlib
import dataclasses
import math
import multiprocessing
import re
import threading
import time

import jax
import numpy as np
import pytest
from in_memory import ArraySource
from jax.sharding import NamedSharding, PartitionSpec

from hbf.data.images.sources import Subset
from hbf.data.pipeline import workers
from hbf.data.pipeline.inputs import DeviceInput, StreamInput, gather, make_input
from hbf.data.pipeline.order import EvalOrder, TrainOrder
from hbf.errors import UserError

_EXCHANGES = re.compile(r' = \S+ (all-|reduce-scatter|collective)')


def _complete(data, order, start, stop):
  step = jax.jit(gather)
  return [jax.device_get(step(data.resident, batch)) for batch in data.batches(order, start, stop)]


def _assert_equal(actual, expected):
  assert len(actual) == len(expected)
  for one, other in zip(actual, expected, strict=True):
    assert one.keys() == other.keys()
    for key in one:
      assert one[key].dtype == other[key].dtype
      np.testing.assert_array_equal(one[key], other[key])


@pytest.mark.parametrize('start', [0, 5])
def test_inputs_give_identical_batches(make_source, sharding, start):
  source, order = make_source(50), TrainOrder(1, 50, 16)
  device, stream = DeviceInput(source, sharding), StreamInput(source, sharding, workers=0)
  batches = _complete(device, order, start, start + 6)
  _assert_equal(_complete(stream, order, start, start + 6), batches)
  for step, batch in enumerate(batches, start):
    np.testing.assert_array_equal(batch['index'], order(step))
    np.testing.assert_array_equal(batch['image'], source.images[order(step)])
    np.testing.assert_array_equal(batch['label'], source.labels[order(step)])
    assert batch['mask'].all()


def test_worker_processes_give_identical_batches_and_end(make_source, sharding):
  source, order = make_source(50), TrainOrder(1, 50, 16)
  expected = _complete(DeviceInput(source, sharding), order, 3, 9)
  batches = StreamInput(source, sharding, workers=1).batches(order, 3, 100)
  step = jax.jit(gather)
  _assert_equal([jax.device_get(step(None, next(batches))) for _ in range(6)], expected)
  assert multiprocessing.active_children()
  batches.close()
  assert not multiprocessing.active_children()


def test_a_reader_that_dies_is_reported_and_ends_the_others(make_source, sharding):
  """A batch is larger than a pipe's buffer, so the reader is killed while it sends a batch."""
  source, order = make_source(50, (64, 64, 3)), TrainOrder(1, 50, 16)
  with contextlib.closing(StreamInput(source, sharding, workers=2).batches(order, 0, 10**6)) as batches:
    next(batches)
    first, *_ = multiprocessing.active_children()
    first.kill()
    begin = time.monotonic()
    with pytest.raises(UserError, match=r'a process that reads images died \(Killed\)'):
      for _ in range(100):
        next(batches)
    assert time.monotonic() - begin < 10
    assert not multiprocessing.active_children()


@dataclasses.dataclass(frozen=True)
class _Damaged(ArraySource):
  """A source whose example 7 can't be read."""

  def __getitem__(self, index):
    if index == 7:
      raise UserError('example 7 is damaged')
    return super().__getitem__(index)


def test_a_source_that_cannot_be_sent_to_processes_is_refused_before_they_start(make_source, sharding):
  class Local(ArraySource):
    """A class that another process cannot import."""

  whole = make_source(50)
  source = Local(whole.images, whole.labels)
  with pytest.raises(UserError, match=r'type Local cannot be sent .*importable.*or set data\.workers to 0'):
    StreamInput(source, sharding, workers=2)
  assert len(StreamInput(source, sharding, workers=0)) == 50


def test_what_a_source_raises_in_a_process_is_raised_here(make_source, sharding):
  whole = make_source(50)
  data = StreamInput(_Damaged(whole.images, whole.labels), sharding, workers=1)
  with pytest.raises(UserError, match='example 7 is damaged'):
    list(data.batches(TrainOrder(1, 50, 16), 0, 6))


class _Missing(Exception):
  """An error that pickle cannot make again from its message."""

  def __init__(self, path, why):
    super().__init__(f'{path} is missing: {why}')


def test_an_error_that_cannot_be_sent_keeps_its_message():
  error = _Missing('a.png', 'moved')
  error.add_note('the place')
  sent = workers._sendable(error)
  assert isinstance(sent, UserError) and str(sent) == 'a source raised _Missing: a.png is missing: moved'
  assert sent.__notes__ == ['the place']
  assert workers._sendable(simple := ValueError('x')) is simple


def test_a_reader_that_cannot_start_is_a_script_without_a_main(make_source):
  assert 'could not start (exit status 1' in str(workers._death(1, has_sent=False))
  for code, has_sent in ((1, True), (-9, False)):
    assert 'images died' in str(workers._death(code, has_sent))


def test_evaluation_pads_and_masks(make_source, sharding):
  source, order = make_source(21), EvalOrder(21, 8)
  device, stream = DeviceInput(source, sharding), StreamInput(source, sharding, workers=0)
  batches = _complete(device, order, 0, len(order))
  _assert_equal(_complete(stream, order, 0, len(order)), batches)
  mask = np.concatenate([batch['mask'] for batch in batches])
  images, labels = (np.concatenate([batch[key] for batch in batches]) for key in ('image', 'label'))
  np.testing.assert_array_equal(mask, np.arange(24) < 21)
  np.testing.assert_array_equal(images[mask], source.images)
  np.testing.assert_array_equal(labels[mask], source.labels)
  assert not images[~mask].any() and not labels[~mask].any()


@pytest.mark.parametrize('kind', ['device', 'stream'])
def test_batches_and_what_is_gathered_are_sharded(make_source, sharding, kind):
  data = make_input(kind, make_source(), sharding, workers=0, resident_bytes=0)
  (batch,) = data.batches(TrainOrder(0, 50, 16), 4, 5)
  for array in (*batch.values(), *jax.jit(gather)(data.resident, batch).values()):
    assert array.sharding.shard_shape(array.shape)[0] == 2


def test_resident_images_are_rows_that_devices_share(make_source, sharding):
  """Images are flat, because a TPU would pad an axis of 3 channels, and copy the whole data set at every step."""
  resident = DeviceInput(make_source(50, (4, 6, 3)), sharding).resident
  assert (resident.image.shape, resident.label.shape) == ((56, 72), (56,))  # 8 devices
  assert all(array.sharding.shard_shape(array.shape)[0] == 7 for array in jax.tree.leaves(resident))


def test_a_batch_is_all_that_devices_exchange(make_source, sharding):
  """The devices do not exchange their shards of the data set."""
  resident, order = DeviceInput(make_source(500, (4, 6, 3)), sharding).resident, TrainOrder(0, 500, 16)
  (batch,) = DeviceInput(make_source(500), sharding).batches(order, 0, 1)
  found = jax.jit(gather).lower(resident, batch).compile().as_text()
  sizes = [line.split(' = ')[1].split('[')[1].split(']')[0] for line in found.splitlines() if _EXCHANGES.search(line)]
  assert sizes and all(math.prod(map(int, size.split(','))) <= 16 * 72 for size in sizes)


@pytest.mark.parametrize('kind', ['device', 'stream'])
def test_devices_that_share_units_have_the_same_examples(make_source, kind):
  mesh = jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'))
  split = NamedSharding(mesh, PartitionSpec(('data', 'fsdp')))
  source, order = make_source(50), TrainOrder(1, 50, 16)
  data = make_input(kind, source, split, workers=0, resident_bytes=0)
  (batch,) = _complete(data, order, 2, 3)
  np.testing.assert_array_equal(batch['image'], source.images[order(2)])
  np.testing.assert_array_equal(batch['label'], source.labels[order(2)])


@pytest.mark.parametrize('kind', ['device', 'stream'])
def test_stacks_are_the_batches_one_over_another(make_source, sharding, kind):
  data, order = make_input(kind, make_source(), sharding, workers=0, resident_bytes=0), TrainOrder(0, 50, 16)
  batches, counts, at = list(data.batches(order, 3, 9)), (2, 3, 1), 0
  stacks = list(data.stacks(order, 3, counts, size=3))
  for count, stack in zip(counts, stacks, strict=True):
    assert stack['index'].shape == (3, 16)
    assert all(array.sharding.shard_shape(array.shape)[:2] == (3, 2) for array in stack.values())
    for row in range(count):
      _assert_equal([{key: stack[key][row] for key in stack}], [batches[at + row]])
    at += count
  assert not list(data.stacks(order, 3, (), size=3))


def test_leaving_a_stream_early_ends_its_threads(make_source, sharding):
  before = set(threading.enumerate())
  batches = StreamInput(make_source(), sharding, workers=0).batches(TrainOrder(0, 50, 16), 0, 10**6)
  next(batches)
  started = set(threading.enumerate()) - before
  assert started
  batches.close()
  for thread in started:
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_no_steps_no_batches(make_source, sharding):
  for kind in ('device', 'stream'):
    data = make_input(kind, make_source(), sharding, workers=0, resident_bytes=0)
    assert not list(data.batches(TrainOrder(0, 50, 16), 5, 5))


def test_auto_goes_by_size(make_source, sharding):
  source = make_source(50, (4, 6, 3))
  for limit, kind in ((7 * 72, DeviceInput), (7 * 72 - 1, StreamInput)):  # 50 images on 8 devices
    assert isinstance(make_input('auto', source, sharding, workers=0, resident_bytes=limit), kind)


def test_unknown_kind_and_empty_source(make_source, sharding):
  with pytest.raises(UserError, match=r"data\.input 'devise': did you mean 'device'"):
    make_input('devise', make_source(), sharding, workers=0, resident_bytes=0)
  with pytest.raises(UserError, match='no example'):
    make_input('auto', Subset(make_source(), np.zeros(0, int)), sharding, workers=0, resident_bytes=0)
