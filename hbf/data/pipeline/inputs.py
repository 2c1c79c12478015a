"""Two inputs of a jitted step, which give it bit-identical examples at the same step.

A *batch* is a dict of device arrays, sharded over their first axis. The device-resident input yields {'index': int32
[B]}. The stream yields {'index', 'image': uint8 [B, H, W, C], 'label': int32 [B]}. `gather` completes both inside
jit. Padding rows have index −1, image 0 and label 0. A *stack* is several batches on a new first axis.
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
from hbf.data.pipeline.workers import read_in_processes, read_in_threads
from hbf.errors import choose

Batch = dict[str, jax.Array]

_TRANSFERS_AHEAD = 2
_STATISTICS_EXAMPLES = 4096  # Of a stream. For CIFAR-10 the mean's standard error is then 0.9% of the deviation.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Examples:
  """All examples of a split, in the memory of the devices, sharded like batches.

  Attributes:
    image: uint8 [M, H·W·C]. A TPU pads short axes: a gather from [M, H, W, C] would copy all of it at every step.
    label: int32 [M].
    image_shape: H, W, C.
    sharding: sharding of M, and of batches. M is the number of examples, padded with zeros to a multiple of the
      shards.
  """

  image: jax.Array
  label: jax.Array
  image_shape: tuple[int, ...] = dataclasses.field(metadata={'static': True})
  sharding: NamedSharding = dataclasses.field(metadata={'static': True})


Resident = Any  # of images `Examples`, or None for a stream; of texts see `hbf.data.text.windows`


class Input(abc.ABC):
  """A source that is ready for a jitted step.

  Attributes:
    resident: arrays that every step needs beside the batch, or None. Pass them to the jitted step: a constant would
      be compiled in.
  """

  resident: Resident

  def __init__(self, sharding: NamedSharding):
    """Take the sharding of batches, over their first axis."""
    self._sharding = sharding

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of examples."""

  @abc.abstractmethod
  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    """Yield these rows of the batches start, …, stop − 1 of `order`. Closing it ends its readers."""

  def batches(self, order: host.Order, start: int, stop: int) -> Generator[Batch, None, None]:
    """Yield the batches start, …, stop − 1 of `order`. Starting late costs nothing; closing it ends its readers."""
    rows = _local_rows(self._sharding, order.batch_size)
    with contextlib.closing(self._host_batches(order, start, stop, rows)) as batches:
      yield from _look_ahead(_put(batch, self._sharding, (order.batch_size,)) for batch in batches)

  def stacks(self, order: host.Order, start: int, counts: Sequence[int], size: int) -> Generator[Batch, None, None]:
    """Yield the batches start, start + 1, … one over another on a new first axis, for steps that share a call.

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


class ResidentInput(Input):
  """An input whose examples all lie in the memory of the devices. A batch is their numbers."""

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
    """Return a number of pixels, and of each channel's levels over them the sum and that of the squares: [2, C]."""


class DeviceInput(ResidentInput, ImageInput):
  """All images and labels, uint8 and int32, in the memory of the devices."""

  resident: Examples

  def __init__(self, source: Source, sharding: NamedSharding):
    """Read of `source` what this process's devices hold.

    Args:
      source: the examples.
      sharding: of batches, over their first axis.

    Raises:
      UserError: the source is empty, or an example can't be read.
    """
    super().__init__(sharding)
    self._count, shape = len(source), host.image_shape(source)
    filled = _filled(self._count, sharding)
    rows = _local_rows(sharding, filled)
    images, labels = host.read_many(source, np.where(rows < self._count, rows, -1), shape)
    put = functools.partial(jax.make_array_from_process_local_data, sharding)
    image = put(images.reshape(len(rows), -1), (filled, math.prod(shape)))
    self.resident = Examples(image, put(labels, (filled,)), shape, sharding)

  def sums(self) -> tuple[int, np.ndarray]:
    """Return those of all pixels, as the devices add them up."""
    whole = NamedSharding(self._sharding.mesh, PartitionSpec())
    add = jax.jit(levels.column_sums, static_argnums=1, out_shardings=whole)
    sums = np.asarray(add(self.resident.image, self._sharding))
    height, width, channels = self.resident.image_shape
    per_channel = sums.astype(np.int64).reshape(2, -1, height * width, channels).sum(axis=(1, 2))
    return self._count * height * width, per_channel


class StreamInput(ImageInput):
  """Batches that Grain reads while the devices work, in threads or in worker processes."""

  def __init__(self, source: Source, sharding: NamedSharding, workers: int):
    """Check the files of `source` that nobody has checked yet.

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

  def sums(self) -> tuple[int, np.ndarray]:
    """Return those of evenly spaced examples: all would take an epoch to read."""
    images, _ = host.read_many(self._source, evenly_spaced(len(self), _STATISTICS_EXAMPLES), self._image_shape)
    pixels = images.reshape(-1, images.shape[-1]).astype(np.int64)
    return len(pixels), np.stack([pixels.sum(axis=0), np.square(pixels).sum(axis=0)])

  def _host_batches(
    self, order: host.Order, start: int, stop: int, rows: np.ndarray
  ) -> Generator[HostBatch, None, None]:
    if start >= stop:
      return
    batches = host.HostBatches(self._source, order, start, stop, rows, self._image_shape)
    # Starting a process takes seconds, too long for a single batch.
    count = min(self._workers, stop - start) if stop - start > 1 else 0
    yield from read_in_processes(batches, count) if count else read_in_threads(batches)


def make_input(kind: str, source: Source, sharding: NamedSharding, workers: int, resident_bytes: int) -> ImageInput:
  """Make the input for a source.

  Args:
    kind: `device`, `stream`, or `auto`: device if the images fit in `resident_bytes`.
    source: the examples.
    sharding: sharding of batches, over their first axis.
    workers: number of processes that read a stream. 0: threads.
    resident_bytes: most bytes of images that `auto` puts on each device.

  Raises:
    UserError: the kind is unknown, the source is empty, or an example cannot be read.
  """
  is_resident = _is_resident(kind, len(source), host.image_shape(source), sharding, resident_bytes)
  return DeviceInput(source, sharding) if is_resident else StreamInput(source, sharding, workers)


def abstract_resident(
  kind: str, count: int, image_shape: tuple[int, ...], sharding: NamedSharding, resident_bytes: int
) -> Resident:
  """Return the shapes and shardings of the arrays that every step would need beside the batch.

  Args:
    kind: as for `make_input`, with `resident_bytes`.
    count: number of examples.
    image_shape: height, width and channels of the images.
    sharding: sharding of batches, over their first axis.
    resident_bytes: as for `make_input`.
  """
  if not _is_resident(kind, count, image_shape, sharding, resident_bytes):
    return None
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
  filled = _filled(count, sharding)
  return Examples(
    array((filled, math.prod(image_shape)), jnp.uint8), array((filled,), jnp.int32), image_shape, sharding
  )


def abstract_batch(resident: Resident, image_shape: tuple[int, ...], sharding: NamedSharding, *leading: int) -> Batch:
  """Return the shapes and shardings of a batch beside `resident`.

  Args:
    resident: arrays or shapes of an input.
    image_shape: height, width and channels of the images.
    sharding: sharding of batches, over their first axis.
    *leading: B of a batch, or S, B of a stack.
  """
  spec = PartitionSpec(*(None for _ in leading[1:]), *sharding.spec)
  array: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(sharding.mesh, spec))
  numbers = array(leading, jnp.int32)
  if resident is not None:
    return {'index': numbers}
  return {'index': numbers, 'image': array((*leading, *image_shape), jnp.uint8), 'label': numbers}


def _is_resident(
  kind: str, count: int, image_shape: tuple[int, ...], sharding: NamedSharding, resident_bytes: int
) -> bool:
  of_device = _filled(count, sharding) // _shares(sharding) * math.prod(image_shape)
  return choose('data.input', kind, {'auto': of_device <= resident_bytes, 'device': True, 'stream': False})


def _shares(sharding: NamedSharding) -> int:
  """Return the number of shards of a batch."""
  return math.prod(sharding.mesh.shape[axis] for axis in _axes(sharding))


def _axes(sharding: NamedSharding) -> tuple[str, ...]:
  """Return the axes of the mesh that shard a batch."""
  axes = sharding.spec[0]
  return axes if isinstance(axes, tuple) else (axes,)


def _filled(count: int, sharding: NamedSharding) -> int:
  """Return the next multiple of the number of shards."""
  return -(-count // _shares(sharding)) * _shares(sharding)


def gather(resident: Resident, batch: Mapping[str, jax.Array]) -> Batch:
  """Complete a batch of either input. It is pure, made to run inside jit.

  Args:
    resident: the arrays of the input that the batch is from.
    batch: the batch as the input yields it.

  Returns:
    index: int32 [B], −1 for padding; image: uint8 [B, H, W, C]; label: int32 [B]; mask: bool [B], False for padding.
  """
  index = batch['index']
  mask = index >= 0
  if resident is None:
    return {**batch, 'mask': mask}
  image, label = _take(resident, jnp.where(mask, index, 0))
  image = jnp.where(mask[:, None], image, 0).reshape(-1, *resident.image_shape)
  return {'index': index, 'image': image, 'label': jnp.where(mask, label, 0), 'mask': mask}


def _take(resident: Examples, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return images uint8 [B, H·W·C] and labels int32 [B] of the examples `rows`, int32 [B], sharded like the rows."""
  if _shares(resident.sharding) == 1:
    return resident.image[rows], resident.label[rows]
  axes = _axes(resident.sharding)

  def of_share(image: jax.Array, label: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Every device looks for what all of them need, and gets its own of what they found: as many bytes as a batch has.
    # XLA by itself would give the whole batch to each.
    wanted = jax.lax.all_gather(rows, axes, tiled=True) - jax.lax.axis_index(axes) * len(label)
    here = (wanted >= 0) & (wanted < len(label))
    at = jnp.where(here, wanted, 0)
    found = jnp.where(here[:, None], image[at], 0), jnp.where(here, label[at], 0)
    return jax.tree.map(lambda z: jax.lax.psum_scatter(z, axes, tiled=True), found)

  split = resident.sharding.spec
  return jax.shard_map(of_share, mesh=resident.sharding.mesh, in_specs=split, out_specs=split)(
    resident.image, resident.label, rows
  )


def _local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
  """Return the rows of a global batch that the devices of this process hold."""
  shards = sharding.addressable_devices_indices_map((batch_size,)).values()
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[shard] for shard in shards if shard is not None]))


def _stack(batches: Sequence[HostBatch], size: int) -> HostBatch:
  """Stack batches on a new first axis, and repeat the last one to fill it."""
  filled = [*batches, *[batches[-1]] * (size - len(batches))]
  return {key: np.stack([batch[key] for batch in filled]) for key in batches[0]}


def _put(local: HostBatch, sharding: NamedSharding, shape: tuple[int, ...]) -> Batch:
  """Start the transfer of this process's rows to its devices. `shape` is the shape of all processes' indices."""
  return {
    key: jax.make_array_from_process_local_data(sharding, rows, (*shape, *rows.shape[len(shape) :]))
    for key, rows in local.items()
  }


def _look_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
  """Yield `batches`, some of them requested early, so that transfers overlap with steps."""
  waiting: collections.deque[Batch] = collections.deque()
  remaining = iter(batches)
  waiting.extend(itertools.islice(remaining, _TRANSFERS_AHEAD))
  while waiting:
    waiting.extend(itertools.islice(remaining, 1))
    yield waiting.popleft()
