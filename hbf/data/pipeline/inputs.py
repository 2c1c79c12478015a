"""Inputs of a jitted step: all examples in device memory, or a stream of batches. Both give bit-identical examples.

A *batch* is a dict of device arrays, sharded over their first axis. If all examples are in device memory (a
*resident* input), a batch is {'index': int32 [B]}. A batch of a stream is {'index', 'image': uint8 [B, H, W, C],
'label'}. The entry 'label' has the targets of the images: classes, int32 [B], or labels or values, float32 [B, K].
Inside jit, `gather` makes the same complete batch from both kinds of batches. In rows of padding, the index is −1,
and the image and the target are 0. A *stack* has several batches, stacked on a new first axis.
"""

import abc
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hbf.data.images import levels, sources
from hbf.data.images.sources import Source
from hbf.data.pipeline import host
from hbf.data.pipeline.host import HostBatch
from hbf.data.pipeline.order import evenly_spaced
from hbf.data.pipeline.workers import check_sendable, read_in_processes, read_in_threads
from hbf.errors import choose

Batch = dict[str, jax.Array]

_TRANSFERS_AHEAD = 2
_STATISTICS_EXAMPLES = 4096  # examples from which a stream estimates mean and deviation
_STATISTICS_PART = 64  # number of these examples in memory. Their sums take eight times the bytes of the images.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Examples:
  """All examples of a split in the memory of the devices, sharded over the examples.

  M is the number of examples, rounded up to a multiple of the number of shards. The additional examples are zeros.

  Attributes:
    image: pixels of the images, uint8 [M, H·W·C]. The images are flat, because a TPU would pad short axes, and would
      copy an array [M, H, W, C] at every step.
    label: target of each image: classes, int32 [M], or labels or values, float32 [M, K].
    image_shape: height, width and channels of the images: H, W, C.
    sharding: sharding over M, equal to the sharding of batches.
  """

  image: jax.Array
  label: jax.Array
  image_shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  sharding: NamedSharding = dataclasses.field(metadata={'static': True})


Resident = Any  # `Examples` for images, None for a stream, `hbf.data.text.windows.Tokens` for texts


class Input(abc.ABC):
  """An object that yields the batches for a jitted step.

  Attributes:
    resident: the examples in device memory, which every step needs beside the batch. None for a stream. Pass them to
      the jitted step as an argument, so that XLA does not compile them as constants.
  """

  resident: Resident

  def __init__(self, sharding: NamedSharding):
    """Store the sharding of batches over their first axis."""
    self._sharding = sharding

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of examples."""

  @abc.abstractmethod
  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    """Yield the batches start, …, stop − 1 of `order`, but only the rows `rows`, int [n], of each batch.

    Closing the generator stops the reading.
    """

  def batches(self, order: host.Order, start: int, stop: int) -> Generator[Batch, None, None]:
    """Yield the batches start, …, stop − 1 of `order`. Closing the generator stops the reading.

    The batches before `start` are not read.
    """
    rows = _local_rows(self._sharding, order.batch_size)
    with contextlib.closing(self._host_batches(order, start, stop, rows)) as batches:
      yield from _look_ahead(_put(batch, self._sharding, (order.batch_size,)) for batch in batches)

  def stacks(self, order: host.Order, start: int, counts: Sequence[int], size: int) -> Generator[Batch, None, None]:
    """Yield the batches start, start + 1, … in stacks, for jitted calls that run several steps each.

    Args:
      order: the order of the examples.
      start: index of the first batch.
      counts: for each stack, the number of different batches in it, at most `size`.
      size: the length of every stack. A stack with fewer batches is filled up with copies of its last batch.
    """
    rows = _local_rows(self._sharding, order.batch_size)
    sharding = NamedSharding(self._sharding.mesh, PartitionSpec(None, *self._sharding.spec))
    with contextlib.closing(self._host_batches(order, start, start + sum(counts), rows)) as batches:
      stacks = (_stack(list(itertools.islice(batches, count)), size) for count in counts)
      yield from _look_ahead(_put(stack, sharding, (size, order.batch_size)) for stack in stacks)


class ResidentInput(Input):
  """An input whose examples all lie in device memory. A batch has only the indices of its examples."""

  _count: int

  def __len__(self) -> int:
    return self._count

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    for step in range(start, stop):
      yield {'index': order(step)[rows]}


class ImageInput(Input):
  """An input of images."""

  @abc.abstractmethod
  def sums(self) -> tuple[int, np.ndarray]:
    """Return the number of pixels of all images, and sums of their levels, for `hbf.data.images.levels.statistics`.

    The sums, int [2, C], are the sum of the levels and the sum of the squared levels of each channel.
    """


class DeviceInput(ResidentInput, ImageInput):
  """An input that holds all images and their targets in device memory, as `Examples`."""

  resident: Examples

  def __init__(self, source: Source, sharding: NamedSharding):
    """Read those examples that this process's devices hold.

    Args:
      source: the examples.
      sharding: sharding of batches over their first axis.

    Raises:
      UserError: the source is empty, or an example can't be read.
    """
    super().__init__(sharding)
    self._count, shape = len(source), host.image_shape(source)
    padded = _pad_count(self._count, sharding)
    rows = _local_rows(sharding, padded)
    target_shape = host.target_shape(source)
    images, labels = host.read_many(source, np.where(rows < self._count, rows, -1), shape, target_shape)
    put = functools.partial(jax.make_array_from_process_local_data, sharding)
    image = put(images.reshape(len(rows), -1), (padded, math.prod(shape)))
    self.resident = Examples(image, put(labels, (padded, *target_shape)), shape, sharding)

  def sums(self) -> tuple[int, np.ndarray]:
    """Return the number of pixels and the sums over all pixels; see `ImageInput.sums`. Devices compute the sums."""
    replicated = NamedSharding(self._sharding.mesh, PartitionSpec())
    add = jax.jit(levels.column_sums, static_argnums=1, out_shardings=replicated)
    sums = np.asarray(add(self.resident.image, self._sharding))
    height, width, channels = self.resident.image_shape
    per_channel = sums.astype(np.int64).reshape(2, -1, height * width, channels).sum(axis=(1, 2))
    return self._count * height * width, per_channel


class StreamInput(ImageInput):
  """An input that reads batches in threads or worker processes, with Grain, while the devices compute."""

  def __init__(self, source: Source, sharding: NamedSharding, workers: int):
    """Check the files of `source` for damage.

    Args:
      source: the examples.
      sharding: sharding of batches over their first axis.
      workers: number of processes that read. 0 reads in threads of this process.

    Raises:
      UserError: the source is empty, an example can't be read, or `workers` cannot be sent the source.
    """
    super().__init__(sharding)
    if workers:
      check_sendable(source)
    self.resident = None
    self._source = source
    self._workers = workers
    self._image_shape, self._target_shape = host.image_shape(source), host.target_shape(source)
    sources.check(source, np.arange(len(source)))

  def __len__(self) -> int:
    return len(self._source)

  def sums(self) -> tuple[int, np.ndarray]:
    """Return the number of pixels and the sums, as `ImageInput.sums` does, but only for evenly spaced examples.

    Reading all examples would take as long as an epoch.
    """
    sample = evenly_spaced(len(self), _STATISTICS_EXAMPLES)
    height, width, channels = self._image_shape
    sums = np.zeros((2, channels), np.int64)
    for start in range(0, len(sample), _STATISTICS_PART):
      part = sample[start : start + _STATISTICS_PART]
      images, _ = host.read_many(self._source, part, self._image_shape, self._target_shape)
      pixels = images.reshape(-1, channels).astype(np.int64)
      sums += np.stack([pixels.sum(axis=0), np.square(pixels).sum(axis=0)])
    return len(sample) * height * width, sums

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    if start >= stop:
      return
    batches = host.HostBatches(self._source, order, start, stop, rows, self._image_shape, self._target_shape)
    # A process takes seconds to start, too long for a single batch.
    count = min(self._workers, stop - start) if stop - start > 1 else 0
    yield from read_in_processes(batches, count) if count else read_in_threads(batches)


def make_input(kind: str, source: Source, sharding: NamedSharding, workers: int, resident_bytes: int) -> ImageInput:
  """Make the input for a source.

  Args:
    kind: `device` (all examples in device memory), `stream` (batches from the host) or `auto`. `auto` is `device` if
      each device's images fit into `resident_bytes`, else `stream`.
    source: the examples.
    sharding: sharding of batches over their first axis.
    workers: number of processes that read a stream. 0 reads in threads.
    resident_bytes: the most bytes of images that `auto` puts on each device.

  Raises:
    UserError: the kind is unknown, the source is empty, or an example can't be read.
  """
  is_resident = _is_resident(kind, len(source), host.image_shape(source), sharding, resident_bytes)
  return DeviceInput(source, sharding) if is_resident else StreamInput(source, sharding, workers)


def is_resident(kind: str, fits: bool) -> bool:
  """Return True if the examples lie in device memory, for a kind of input: `device`, `stream` or `auto`.

  `fits` is True if they are small enough for `auto` to put them there.

  Raises:
    UserError: the kind is unknown.
  """
  return choose('data.input', kind, {'auto': fits, 'device': True, 'stream': False})


def abstract_resident(
  kind: str,
  count: int,
  image_shape: tuple[int, ...],
  sharding: NamedSharding,
  resident_bytes: int,
  target_shape: tuple[int, ...] = (),
) -> Resident:
  """Return an input's `resident` as `jax.ShapeDtypeStruct`s, for which a step can be compiled without data.

  Args:
    kind: kind of the input; see `make_input`.
    count: number of examples.
    image_shape: height, width and channels of the images.
    sharding: sharding of batches over their first axis.
    resident_bytes: the most bytes of images on each device; see `make_input`.
    target_shape: shape of a target: () for classes, (K,) for labels or values.

  Returns:
    For resident examples, `Examples` whose arrays are `ShapeDtypeStruct`s with shardings. For a stream, None.
  """
  if not _is_resident(kind, count, image_shape, sharding, resident_bytes):
    return None
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
  padded = _pad_count(count, sharding)
  image, label = (
    array((padded, math.prod(image_shape)), jnp.uint8),
    array((padded, *target_shape), _type(target_shape)),
  )
  return Examples(image, label, image_shape, sharding)


def abstract_batch(
  resident: Resident,
  image_shape: tuple[int, ...],
  sharding: NamedSharding,
  *leading: int,
  target_shape: tuple[int, ...] = (),
) -> Batch:
  """Return a batch, or a stack of batches, as `jax.ShapeDtypeStruct`s, for which a step can be compiled.

  Args:
    resident: an input's `resident`, as arrays or shapes.
    image_shape: height, width and channels of the images.
    sharding: sharding of batches over their first axis.
    *leading: lengths of the first axes: B for a batch of B rows, or S, B for a stack of S batches.
    target_shape: shape of a target: () for classes, (K,) for labels or values.
  """
  spec = PartitionSpec(*(None for _ in leading[1:]), *sharding.spec)
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(sharding.mesh, spec))
  numbers = array(leading, jnp.int32)
  if resident is not None:
    return {'index': numbers}
  label = array((*leading, *target_shape), _type(target_shape))
  return {'index': numbers, 'image': array((*leading, *image_shape), jnp.uint8), 'label': label}


def _type(target_shape: tuple[int, ...]) -> Any:
  return jnp.float32 if target_shape else jnp.int32


def _is_resident(
  kind: str, count: int, image_shape: tuple[int, ...], sharding: NamedSharding, resident_bytes: int
) -> bool:
  device_bytes = _pad_count(count, sharding) // _shards(sharding) * math.prod(image_shape)
  return is_resident(kind, device_bytes <= resident_bytes)


def _shards(sharding: NamedSharding) -> int:
  """Return the number of shards of a batch."""
  return math.prod(sharding.mesh.shape[axis] for axis in _axes(sharding))


def _axes(sharding: NamedSharding) -> tuple[str, ...]:
  """Return the mesh axes that split a batch."""
  axes = sharding.spec[0]
  return axes if isinstance(axes, tuple) else (axes,)


def _pad_count(count: int, sharding: NamedSharding) -> int:
  """Return `count`, rounded up to a multiple of the number of shards."""
  return -(-count // _shards(sharding)) * _shards(sharding)


def gather(resident: Resident, batch: Mapping[str, jax.Array]) -> Batch:
  """Return a batch with its images and targets, for both kinds of inputs. The function is pure and runs inside jit.

  Args:
    resident: the `resident` of the input that yielded the batch.
    batch: a batch that the input yielded.

  Returns:
    A dict. `index`, int32 [B], is −1 for padding. `image` is uint8 [B, H, W, C]. `label` has the targets, int32 [B]
    or float32 [B, K]. `mask`, bool [B], is False for padding.
  """
  index = batch['index']
  mask = index >= 0
  if resident is None:
    return {**batch, 'mask': mask}
  image, label = _take(resident, jnp.where(mask, index, 0))
  image = jnp.where(mask[:, None], image, 0).reshape(-1, *resident.image_shape)
  return {'index': index, 'image': image, 'label': _only(mask, label), 'mask': mask}


def _only(kept: jax.Array, labels: jax.Array) -> jax.Array:
  """Return the targets `labels`, [B] or [B, K], where `kept`, bool [B], is True, and 0 elsewhere."""
  return jnp.where(kept if labels.ndim == 1 else kept[:, None], labels, 0)


def _take(resident: Examples, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return images, uint8 [B, H·W·C], and targets, [B] or [B, K], of the examples `rows` [B], sharded like `rows`."""
  if _shards(resident.sharding) == 1:
    return resident.image[rows], resident.label[rows]
  axes = _axes(resident.sharding)

  def take_shard(image: jax.Array, label: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Every device looks up the rows of all devices in its shard. A reduce-scatter then gives each device its own
    # rows. This moves one batch in all. XLA by itself would send the whole batch to each device.
    local = jax.lax.all_gather(rows, axes, tiled=True) - jax.lax.axis_index(axes) * len(label)
    is_here = (local >= 0) & (local < len(label))
    at = jnp.where(is_here, local, 0)
    found = jnp.where(is_here[:, None], image[at], 0), _only(is_here, label[at])
    return jax.tree.map(lambda z: jax.lax.psum_scatter(z, axes, tiled=True), found)

  spec = resident.sharding.spec
  return jax.shard_map(take_shard, mesh=resident.sharding.mesh, in_specs=spec, out_specs=spec)(
    resident.image, resident.label, rows
  )


def _local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
  """Return the sorted indices of those rows of a batch that lie on this process's devices."""
  shards = sharding.addressable_devices_indices_map((batch_size,)).values()
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[shard] for shard in shards if shard is not None]))


def _stack(batches: Sequence[HostBatch], size: int) -> HostBatch:
  """Stack batches on a new first axis, padded to length `size` with copies of the last batch."""
  padded = [*batches, *[batches[-1]] * (size - len(batches))]
  return {key: np.stack([batch[key] for batch in padded]) for key in batches[0]}


def _put(local: HostBatch, sharding: NamedSharding, shape: tuple[int, ...]) -> Batch:
  """Start the transfer of this process's rows to its devices. `shape` is the shape of 'index' for all processes."""
  return {
    key: jax.make_array_from_process_local_data(sharding, rows, (*shape, *rows.shape[len(shape) :]))
    for key, rows in local.items()
  }


def _look_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
  """Yield `batches`, but request some in advance, so that transfers overlap with the step."""
  waiting: collections.deque[Batch] = collections.deque()
  remaining = iter(batches)
  waiting.extend(itertools.islice(remaining, _TRANSFERS_AHEAD))
  while waiting:
    waiting.extend(itertools.islice(remaining, 1))
    yield waiting.popleft()
