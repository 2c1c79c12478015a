"""Batches of images that arrive one by one. Each image gets its logits back."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

GROWTH = 4  # each fixed size of a batch is at most this many times the size before it


class OverloadedError(Exception):
  """The error of a request that comes while the server holds as many images as it may."""


def fixed_sizes(most: int) -> tuple[int, ...]:
  """Return the sizes to which batches are padded: 1, 4, 16, … and `most`. JAX compiles one program for each size."""
  sizes = [1]
  while sizes[-1] * GROWTH < most:
    sizes.append(sizes[-1] * GROWTH)
  return (*sizes, most) if most > 1 else (1,)


@dataclasses.dataclass(frozen=True)
class _Waiting:
  image: np.ndarray
  since: float  # the loop's clock, in seconds
  logits: asyncio.Future[np.ndarray]


class Batcher:
  """A queue of waiting images, and an asyncio task that computes the logits of batches in one thread.

  A batch is computed as soon as it is full, or when its first image has waited for `deadline` seconds. While a batch
  is computed, the next images wait, so batches grow with the load. A batch is padded to one of a few fixed sizes.
  After `compile`, nothing is compiled any more.
  """

  def __init__(
    self,
    logits: Callable[[np.ndarray], jax.Array | np.ndarray],
    image_shape: Sequence[int],
    batch: int = 32,
    deadline: float = 0.005,
    queue: int = 128,
  ):
    """Make the batcher.

    Args:
      logits: a function uint8 [B, H, W, C] → float32 [B, classes].
      image_shape: the height, width and channels of the images.
      batch: the largest number of images in a batch.
      deadline: the longest time that the first image of a batch waits for other images, in seconds.
      queue: the largest number of images in the server. An image counts from its first byte to its answer.
    """
    self._compute, self._shape = logits, tuple(image_shape)
    self._batch, self._deadline, self._most = batch, deadline, queue
    self._sizes = fixed_sizes(batch)
    self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
    self._thread = futures.ThreadPoolExecutor(1, 'compute')
    self._turn = asyncio.Lock()
    self.inside = 0  # images in the server
    self.batches = 0  # batches computed

  def compile(self) -> None:
    """Compile a program for every fixed size of a batch."""
    for size in self._sizes:
      self._logits([np.zeros(self._shape, np.uint8)] * size)

  @contextlib.asynccontextmanager
  async def open(self) -> AsyncIterator[None]:
    """Open a context in which the logits of the images in the queue are computed."""
    task = asyncio.create_task(self._run())
    try:
      yield
    finally:
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)
      self._thread.shutdown()

  @contextlib.contextmanager
  def admitted(self) -> Iterator[None]:
    """Open a context in which one more image counts among the images in the server.

    Raises:
      OverloadedError: the server already has as many images as it may hold.
    """
    if self.inside >= self._most:
      raise OverloadedError(f'{self.inside} images are waiting, the most that this server takes: try again later')
    self.inside += 1
    try:
      yield
    finally:
      self.inside -= 1

  async def logits(self, image: np.ndarray) -> np.ndarray:
    """Return the logits [classes] of an image, uint8 [H, W, C], in float64, as soon as its batch is computed."""
    loop = asyncio.get_running_loop()
    waiting = _Waiting(image, loop.time(), loop.create_future())
    self._queue.put_nowait(waiting)
    return await waiting.logits

  async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in the thread that computes the batches, so that no batch is computed at the same time.

    Calls take turns with the batches: only one of them waits for the thread at a time.
    """
    async with self._turn:
      return await self._in_thread(function, *args)

  async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

  async def _run(self) -> None:
    while True:
      batch = [one for one in await self._take() if not one.logits.done()]  # done: nobody waits for it any more
      if not batch:
        continue
      self.batches += 1
      try:
        found = await self._in_thread(self._logits, [one.image for one in batch])
      except Exception as error:  # such as a lack of memory; the requests get it, and the server goes on
        for one in batch:
          if not one.logits.done():
            one.logits.set_exception(error)
        continue
      for one, logits in zip(batch, found, strict=True):
        if not one.logits.done():
          one.logits.set_result(logits)

  async def _take(self) -> list[_Waiting]:
    """Wait for the next batch, and return its images, at least one."""
    batch = [await self._queue.get()]
    until = batch[0].since + self._deadline
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout_at(until):  # images that came while the last batch was computed are taken at once
        while len(batch) < self._batch:
          batch.append(await self._queue.get())
    return batch

  def _logits(self, images: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logits of n images, float64 [n, classes]. They are computed in a padded batch."""
    size = next(size for size in self._sizes if size >= len(images))
    padded = np.zeros((size, *self._shape), np.uint8)
    padded[: len(images)] = images
    return np.asarray(self._compute(padded), np.float64)[: len(images)]
