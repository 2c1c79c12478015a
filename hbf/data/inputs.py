"""Two ways of feeding a jitted step, which give it bit-identical examples at the same step.

A *batch* is a dict of device arrays, sharded over their first axis. From the device-resident input it is
{'index': int32 [B]}, from the stream {'index', 'image': uint8 [B, H, W, C], 'label': int32 [B]}. `gather` completes
either inside jit. Padding rows have index −1, image 0 and label 0. A *stack* is several batches on a new first axis.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hbf.data import host, sources
from hbf.data import workers as worker_processes
from hbf.data.order import evenly_spaced
from hbf.data.sources import Source
from hbf.errors import choose

Batch = dict[str, jax.Array]
HostBatch = dict[str, np.ndarray]

_STREAM_AHEAD = 4  # Batches that each reader prepares; more would only take memory.
_TRANSFERS_AHEAD = 2
_STATISTICS_EXAMPLES = 4096  # Of a stream. For CIFAR-10 the mean's standard error is then 0.9% of the deviation.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Examples:
  """All examples of a split, in the memory of every device.

  Attributes:
    image: uint8 [N, H·W·C]. A TPU pads short axes: to gather from [N, H, W, C] it would copy all of it at every step.
    label: int32 [N].
    image_shape: H, W, C.
  """

  image: jax.Array
  label: jax.Array
  image_shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})


Resident = Examples | None


class Input(abc.ABC):
  """A source made ready for a jitted step.

  Attributes:
    resident: what every step needs beside the batch, if anything. Pass it to the jitted step: a constant would be
      compiled in.
  """

  resident: Resident

  def __init__(self, sharding: NamedSharding):
    """Takes the sharding of batches, over their first axis."""
    self._sharding = sharding

  @abc.abstractmethod
  def __len__(self) -> int:
    """Returns the number of examples."""

  @abc.abstractmethod
  def read(self, indices: np.ndarray) -> np.ndarray:
    """Returns the images of the examples `indices`, int [n], on the host: uint8 [n, H, W, C]."""

  @abc.abstractmethod
  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    """Yields these rows of the batches start, …, stop − 1 of `order`. Closing it ends its readers."""

  def batches(self, order: host.Order, start: int, stop: int) -> Generator[Batch, None, None]:
    """Yields the batches start, …, stop − 1 of `order`. Starting late costs nothing; closing it ends its readers."""
    rows = _local_rows(self._sharding, order.batch_size)
    with contextlib.closing(self._host_batches(order, start, stop, rows)) as batches:
      yield from _look_ahead(_put(batch, self._sharding, (order.batch_size,)) for batch in batches)

  def stacks(self, order: host.Order, start: int, counts: Sequence[int], size: int) -> Generator[Batch, None, None]:
    """Yields the batches start, start + 1, … one over another on a new first axis, for steps that share a call.

    Args:
      order: of the examples.
      start: number of the first batch.
      counts: for every stack the number of its batches, at most `size`.
      size: of the first axis: what follows the batches only fills it.
    """
    rows = _local_rows(self._sharding, order.batch_size)
    sharding = NamedSharding(self._sharding.mesh, PartitionSpec(None, *self._sharding.spec))
    with contextlib.closing(self._host_batches(order, start, start + sum(counts), rows)) as batches:
      stacks = (_stack(list(itertools.islice(batches, count)), size) for count in counts)
      yield from _look_ahead(_put(stack, sharding, (size, order.batch_size)) for stack in stacks)


class DeviceInput(Input):
  """Holds all images and labels as uint8 and int32 in the memory of every device."""

  def __init__(self, source: Source, sharding: NamedSharding):
    """Reads all of `source`.

    Args:
      source: the examples.
      sharding: of batches, over their first axis.

    Raises:
      UserError: the source is empty, or an example can't be read.
    """
    super().__init__(sharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    images, labels = host.read_all(source)
    image = jax.make_array_from_process_local_data(replicated, images.reshape(len(images), -1))
    label = jax.make_array_from_process_local_data(replicated, labels)
    self.resident: Examples = Examples(image, label, images.shape[1:])

  def __len__(self) -> int:
    return len(self.resident.label)

  def read(self, indices: np.ndarray) -> np.ndarray:
    """Returns the images of the examples `indices`, int [n], on the host: uint8 [n, H, W, C]."""
    rows = self.resident.image.addressable_data(0)[indices]
    return np.asarray(rows).reshape(len(indices), *self.resident.image_shape)

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    for step in range(start, stop):
      yield {'index': order(step)[rows]}


class StreamInput(Input):
  """Reads batches with Grain while the devices work, in threads or in worker processes."""

  def __init__(self, source: Source, sharding: NamedSharding, workers: int):
    """Checks the files of `source` that nobody has checked yet.

    Args:
      source: the examples.
      sharding: of batches, over their first axis.
      workers: number of processes that read; 0 reads in threads of this one.

    Raises:
      UserError: the source is empty, or an example can't be read.
    """
    super().__init__(sharding)
    self.resident = None
    self._source = source
    self._workers = workers
    self._image_shape = host.image_shape(source)
    sources.check(source, np.arange(len(source)))

  def __len__(self) -> int:
    return len(self._source)

  def read(self, indices: np.ndarray) -> np.ndarray:
    """Returns the images of the examples `indices`, int [n], on the host: uint8 [n, H, W, C]."""
    return host.assemble(self._source, indices, self._image_shape)['image']

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    if start >= stop:
      return
    batches = host.HostBatches(self._source, order, start, stop, rows, self._image_shape)
    options = grain.ReadOptions(num_threads=_STREAM_AHEAD, prefetch_buffer_size=_STREAM_AHEAD)
    dataset = grain.MapDataset.source(batches).to_iter_dataset(options)
    if self._workers and stop - start > 1:  # Starting a process takes seconds, too long for a single batch.
      dataset = worker_processes.read_in_processes(dataset, self._workers)
    iterator = iter(dataset)
    try:
      yield from iterator
    finally:
      iterator.close()


def make_input(kind: str, source: Source, sharding: NamedSharding, workers: int, resident_bytes: int) -> Input:
  """Makes the input for a source.

  Args:
    kind: `device`, `stream`, or `auto`: device if the images fit in `resident_bytes`.
    source: the examples.
    sharding: of batches, over their first axis.
    workers: number of processes that read a stream; 0 for threads.
    resident_bytes: most bytes of images that `auto` puts on each device.

  Raises:
    UserError: the kind is unknown, the source empty, or an example can't be read.
  """
  is_resident = _is_resident(kind, len(source), host.image_shape(source), resident_bytes)
  return DeviceInput(source, sharding) if is_resident else StreamInput(source, sharding, workers)


def abstract_resident(
  kind: str, count: int, image_shape: tuple[int, ...], mesh: Mesh, resident_bytes: int
) -> Resident:
  """What every step would need beside the batch, as shapes with their shardings.

  Args:
    kind: with `resident_bytes`, as for `make_input`.
    count: of the examples.
    image_shape: of the images: height, width, channels.
    mesh: the devices.
    resident_bytes: as above.
  """
  if not _is_resident(kind, count, image_shape, resident_bytes):
    return None
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
  return Examples(array((count, math.prod(image_shape)), jnp.uint8), array((count,), jnp.int32), image_shape)


def abstract_batch(resident: Resident, image_shape: tuple[int, ...], sharding: NamedSharding, *leading: int) -> Batch:
  """A batch beside `resident`, as shapes with their shardings.

  Args:
    resident: an input's, arrays or shapes.
    image_shape: of the images: height, width, channels.
    sharding: of batches, over their first axis.
    *leading: B of a batch; S, B of a stack.
  """
  spec = PartitionSpec(*(None for _ in leading[1:]), *sharding.spec)
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(sharding.mesh, spec))
  numbers = array(leading, jnp.int32)
  if resident is not None:
    return {'index': numbers}
  return {'index': numbers, 'image': array((*leading, *image_shape), jnp.uint8), 'label': numbers}


def _is_resident(kind: str, count: int, image_shape: tuple[int, ...], resident_bytes: int) -> bool:
  kinds = {'auto': count * math.prod(image_shape) <= resident_bytes, 'device': True, 'stream': False}
  return choose('data.input', kind, kinds)


def gather(resident: Resident, batch: Mapping[str, jax.Array]) -> Batch:
  """Completes a batch of either input; pure, made to run inside jit.

  Args:
    resident: of the input that the batch is from.
    batch: as the input yields it.

  Returns:
    index: int32 [B], −1 for padding; image: uint8 [B, H, W, C]; label: int32 [B]; mask: bool [B], False for padding.
  """
  index = batch['index']
  mask = index >= 0
  if resident is None:
    return {**batch, 'mask': mask}
  rows = jnp.where(mask, index, 0)
  image = jnp.where(mask[:, None], resident.image[rows], 0).reshape(-1, *resident.image_shape)
  return {'index': index, 'image': image, 'label': jnp.where(mask, resident.label[rows], 0), 'mask': mask}


def channel_statistics(data: Input) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns the mean and the standard deviation of each channel, in units of 1 = white.

  They are exact over all pixels of the device-resident input, and of 4,096 evenly spaced examples of a stream, which
  would take an epoch to read; so any number of devices gives the same. A channel that hardly varies has the deviation
  of one grey level, 1/255, so that one can divide by it.

  Args:
    data: the images.
  """
  indices = evenly_spaced(len(data), _STATISTICS_EXAMPLES if data.resident is None else len(data))
  chunks = np.array_split(indices, -(-len(indices) // host.CHUNK))
  with futures.ThreadPoolExecutor(host.THREADS) as pool:
    histograms = np.sum(list(pool.map(lambda chunk: _histogram(data.read(chunk)), chunks)), axis=0)
  mean, std = zip(*(_moments(histogram) for histogram in histograms), strict=True)
  return mean, std


def _histogram(images: np.ndarray) -> np.ndarray:
  """Returns how often each channel of uint8 [n, H, W, C] has each level: int64 [C, 256]."""
  channels = np.moveaxis(images, -1, 0)
  return np.stack([np.bincount(channel.ravel(), minlength=256) for channel in channels])


def _moments(histogram: np.ndarray) -> tuple[float, float]:
  """Returns the mean and the standard deviation of a channel from its histogram, int64 [256]."""
  counts = histogram.tolist()  # Python's integers can't overflow.
  pixels = sum(counts)
  first = sum(level * count for level, count in enumerate(counts))
  second = sum(level**2 * count for level, count in enumerate(counts))
  variance = (pixels * second - first**2) / pixels**2
  return first / pixels / 255, max(math.sqrt(variance), 1) / 255


def _local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
  """Returns which rows of a global batch the devices of this process hold."""
  shards = sharding.addressable_devices_indices_map((batch_size,)).values()
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[shard] for shard in shards if shard is not None]))


def _stack(batches: Sequence[HostBatch], size: int) -> HostBatch:
  """Puts batches on a new first axis, and repeats the last of them to fill it."""
  filled = [*batches, *[batches[-1]] * (size - len(batches))]
  return {key: np.stack([batch[key] for batch in filled]) for key in batches[0]}


def _put(local: HostBatch, sharding: NamedSharding, shape: tuple[int, ...]) -> Batch:
  """Starts the transfer of this process's rows to its devices; `shape` is that of all processes' indices."""
  return {
    key: jax.make_array_from_process_local_data(sharding, rows, (*shape, *rows.shape[len(shape) :]))
    for key, rows in local.items()
  }


def _look_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
  """Yields `batches`, asking for some before they are needed, so that transfers overlap with the step."""
  waiting: collections.deque[Batch] = collections.deque()
  remaining = iter(batches)
  waiting.extend(itertools.islice(remaining, _TRANSFERS_AHEAD))
  while waiting:
    waiting.extend(itertools.islice(remaining, 1))
    yield waiting.popleft()
