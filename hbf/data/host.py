"""Batches as host arrays: what is read before anything goes to a device."""

import dataclasses
from concurrent import futures
from typing import Protocol

import numpy as np

from hbf.data import sources
from hbf.data.sources import Source
from hbf.errors import UserError

THREADS = 16  # More than cores, since a disk or a bucket makes them wait.
CHUNK = 64  # Examples that a thread reads at a time.


class Order(Protocol):
  """Which examples form a batch; see `hbf.data.order`."""

  @property
  def batch_size(self) -> int:
    """The rows of a batch."""

  def __call__(self, step: int) -> np.ndarray:
    """Returns the examples of batch `step`, int32 [batch_size], −1 for padding."""


@dataclasses.dataclass(frozen=True)
class HostBatches:
  """The batches start, …, stop − 1 of an order as host arrays by number: what Grain reads."""

  source: Source
  order: Order
  start: int
  stop: int
  rows: np.ndarray
  image_shape: tuple[int, ...]

  def __len__(self) -> int:
    return self.stop - self.start

  def __getitem__(self, number: int) -> dict[str, np.ndarray]:
    return assemble(self.source, self.order(self.start + number)[self.rows], self.image_shape)


def assemble(source: Source, indices: np.ndarray, image_shape: tuple[int, ...]) -> dict[str, np.ndarray]:
  """Reads a host batch; where an index is −1 the image and the label are 0."""
  images = np.zeros((len(indices), *image_shape), np.uint8)
  labels = np.zeros(len(indices), np.int32)
  rows = np.flatnonzero(indices >= 0)
  for row, example in zip(rows, sources.read(source, indices[rows]), strict=True):
    images[row], labels[row] = example
  return {'index': indices, 'image': images, 'label': labels}


def read_all(source: Source) -> tuple[np.ndarray, np.ndarray]:
  """Reads every image, uint8 [N, H, W, C], and label, int32 [N]."""
  shape = image_shape(source)
  images = np.empty((len(source), *shape), np.uint8)
  labels = np.empty(len(source), np.int32)
  chunks = np.array_split(np.arange(len(source)), -(-len(source) // CHUNK))
  with futures.ThreadPoolExecutor(THREADS) as pool:
    parts = pool.map(lambda chunk: assemble(source, chunk, shape), chunks)
    for chunk, part in zip(chunks, parts, strict=True):
      images[chunk], labels[chunk] = part['image'], part['label']
  return images, labels


def image_shape(source: Source) -> tuple[int, ...]:
  """Returns height, width, channels of the images.

  Raises:
    UserError: there is no image.
  """
  if not len(source):
    raise UserError('a split holds no example; expected at least one: hold out less, or choose another data set')
  return source[0][0].shape
