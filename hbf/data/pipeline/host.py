"""Batches as NumPy arrays on the host, before their transfer to devices."""

import dataclasses
from concurrent import futures
from typing import Protocol

import numpy as np

from hbf.data.images import sources
from hbf.data.images.sources import Source
from hbf.errors import UserError

THREADS = 16  # more threads than cores, because threads wait for a disk or a bucket
CHUNK = 64  # number of examples that a thread reads in one call

HostBatch = dict[str, np.ndarray]


class Order(Protocol):
  """The order of the examples: a function from the index of a batch to the indices of its examples."""

  @property
  def batch_size(self) -> int:
    """Return the number of rows of a batch."""

  def __call__(self, step: int) -> np.ndarray:
    """Return the indices of the examples in batch `step`, int32 [batch_size], −1 for padding."""


class BatchSequence(Protocol):
  """A sequence of batches that Grain can read in any order."""

  def __len__(self) -> int:
    """Return the number of batches."""

  def __getitem__(self, number: int) -> HostBatch:
    """Return the batch with this index."""


@dataclasses.dataclass(frozen=True)
class HostBatches:
  """The batches start, …, stop − 1 of an order, as a sequence that Grain can read.

  Attributes:
    source: the examples.
    order: the choice of examples for each batch.
    start: index of the first batch.
    stop: index of the last batch, plus one.
    rows: the rows of each batch that this process reads, because its devices hold them, int [n].
    image_shape: height, width and channels of the images.
    target_shape: shape of the target of an image: () for classes, (K,) for labels or values.
  """

  source: Source
  order: Order
  start: int
  stop: int
  rows: np.ndarray
  image_shape: tuple[int, ...]
  target_shape: tuple[int, ...] = ()

  def __len__(self) -> int:
    return self.stop - self.start

  def __getitem__(self, number: int) -> HostBatch:
    indices = self.order(self.start + number)[self.rows]
    return assemble(self.source, indices, self.image_shape, self.target_shape)


def assemble(
  source: Source, indices: np.ndarray, image_shape: tuple[int, ...], target_shape: tuple[int, ...] = ()
) -> HostBatch:
  """Read the examples `indices`, int [n], as a batch on the host. The image and the target of index −1 are 0.

  See `HostBatches` for the other arguments.

  Returns:
    A dict. `index` is `indices`. `image` has the images, uint8 [n, H, W, C]. `label` has the targets: classes, int32
    [n], or labels or values, float32 [n, K].
  """
  images = np.zeros((len(indices), *image_shape), np.uint8)
  labels = np.zeros((len(indices), *target_shape), np.float32 if target_shape else np.int32)
  rows = np.flatnonzero(indices >= 0)
  for row, example in zip(rows, sources.read(source, indices[rows]), strict=True):
    images[row], labels[row] = example
  return {'index': indices, 'image': images, 'label': labels}


def read_many(
  source: Source, indices: np.ndarray, image_shape: tuple[int, ...], target_shape: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
  """Read the examples `indices`, int [n], in threads. The image and the target of index −1 are 0.

  See `HostBatches` for the other arguments.

  Returns:
    Images, uint8 [n, H, W, C], and targets, int32 [n]. If `target_shape` is (K,), the targets are float32 [n, K].
  """
  images = np.empty((len(indices), *image_shape), np.uint8)
  labels = np.empty((len(indices), *target_shape), np.float32 if target_shape else np.int32)
  starts = range(0, len(indices), CHUNK)
  with futures.ThreadPoolExecutor(THREADS) as pool:
    parts = pool.map(
      lambda start: assemble(source, indices[start : start + CHUNK], image_shape, target_shape), starts
    )
    for start, part in zip(starts, parts, strict=True):
      images[start : start + CHUNK], labels[start : start + CHUNK] = part['image'], part['label']
  return images, labels


def image_shape(source: Source) -> tuple[int, ...]:
  """Return height, width and channels of a source's images.

  Raises:
    UserError: the source is empty.
  """
  if not len(source):
    raise UserError('a split holds no example; expected at least one: hold out less, or choose another data set')
  return source[0][0].shape


def target_shape(source: Source) -> tuple[int, ...]:
  """Return the shape of a target in a source that is not empty: () for classes, (K,) for labels or values."""
  return np.shape(source[0][1])
