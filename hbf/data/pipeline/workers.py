"""Batches that are read ahead, in threads or in processes."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from multiprocessing.connection import Connection

import grain
import jax
import numpy as np

from hbf.data.pipeline.host import HostBatch, HostBatches
from hbf.errors import UserError

_AHEAD = 4  # Batches that each reader prepares; more would only take memory.


def read_in_threads(batches: HostBatches, first: int = 0, step: int = 1) -> Iterator[HostBatch]:
  """Yield the batches of number `first`, `first` + `step`, …. Closing the generator ends the threads."""
  options = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
  iterator = iter(grain.MapDataset.source(batches)[first::step].to_iter_dataset(options))
  try:
    yield from iterator
  finally:
    iterator.close()


def read_in_processes(batches: HostBatches, count: int) -> Iterator[HostBatch]:
  """Yield the batches in their order, read by `count` processes in turn. Closing the generator ends the processes.

  Raises:
    UserError: a process died. An error of a source in a process is raised here too.
  """
  # Grain has processes too (`mp_prefetch`): of one that is killed while it sends a batch, it waits for the rest for
  # ever.
  readers: list[_Reader] = []
  pool = futures.ThreadPoolExecutor(count)
  try:
    readers += (_Reader(batches, first, count) for first in range(count))
    waiting = deque(pool.submit(reader.receive) for reader in readers)
    for number in range(len(batches)):
      batch = waiting.popleft().result()
      waiting.append(pool.submit(readers[number % count].receive))  # one after the last meets an end; nobody asks
      yield batch
  finally:
    for reader in readers:
      reader.kill()
    pool.shutdown()


class _Reader:
  """A process that reads the batches of number `first`, `first` + `step`, …, and the pipe that they come through."""

  def __init__(self, batches: HostBatches, first: int, step: int):
    context = multiprocessing.get_context('spawn')
    self._pipe, end = context.Pipe(duplex=False)
    self._process = context.Process(target=_serve, args=(end, batches, first, step), daemon=True)
    self._process.start()
    end.close()  # The process alone holds it now: whenever it dies, the pipe is at its end.
    self._is_killed = False
    atexit.register(self.kill)  # If nobody does: when Python ends, it waits for processes that don't heed SIGTERM.

  def receive(self) -> HostBatch:
    """Wait for the next batch.

    Raises:
      UserError: the process died.
    """
    try:
      received = self._pipe.recv()
      if not isinstance(received, Exception):
        return {name: _receive_array(self._pipe, *about) for name, about in received.items()}
    except (EOFError, OSError) as error:  # before a batch, or within one
      self._process.join()
      raise UserError(
        f'a process that reads images died ({_cause(self._process.exitcode)}); expected it to live as long as this '
        'command: run it again, with a smaller data.workers if memory ran out; training goes on from its last '
        'checkpoint'
      ) from error
    raise received

  def kill(self) -> None:
    """End the process, whatever it does."""
    if not self._is_killed:
      self._is_killed = True
      atexit.unregister(self.kill)
      self._process.kill()
      self._process.join()


def _cause(exitcode: int | None) -> str:
  """Describe how a process ended."""
  number = -(exitcode or 0)
  return signal.strsignal(number) or f'signal {number}' if number > 0 else f'exit status {exitcode}'


def _serve(pipe: Connection, batches: HostBatches, first: int, step: int) -> None:
  """Run a reader process, without accelerators or signals, until its parent ends."""
  jax.config.update('jax_platforms', 'cpu')
  # A signal to the whole group is for the parent, which saves a checkpoint and then ends its readers.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  threading.Thread(target=_exit_with_parent, daemon=True).start()
  try:
    for batch in read_in_threads(batches, first, step):
      pipe.send({name: (array.shape, array.dtype) for name, array in batch.items()})
      for array in batch.values():
        _send_array(pipe, array)
  except Exception as error:  # a source's, and Pillow's are anything
    error.add_note(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):  # The parent is gone.
      pipe.send(error)


def _send_array(pipe: Connection, array: np.ndarray) -> None:
  """Send the bytes alone. A pickled image costs the parent seven times as long."""
  rest = _bytes(np.ascontiguousarray(array))
  while rest:
    rest = rest[os.write(pipe.fileno(), rest) :]


def _receive_array(pipe: Connection, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Receive an array from `_send_array`, or raise EOFError if the pipe ends."""
  array = np.empty(shape, dtype)
  rest = _bytes(array)
  while rest:
    count = os.readv(pipe.fileno(), [rest])
    if not count:
      raise EOFError
    rest = rest[count:]
  return array


def _bytes(array: np.ndarray) -> memoryview:
  return array.reshape(-1).view(np.uint8).data


def _exit_with_parent() -> None:
  """Wait until the parent is gone, because a killed parent cannot end its readers."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
