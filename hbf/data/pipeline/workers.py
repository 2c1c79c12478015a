"""Readers of batches, in threads or in processes. They read some batches in advance."""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import grain
import jax
import numpy as np

from hbf.data.pipeline.host import BatchSequence, HostBatch
from hbf.errors import UserError, first_line

_AHEAD = 4  # number of batches that each reader prepares in advance. More would only take memory.


def check_sendable(source: Any) -> None:
  """Check that a source of examples can be sent to reading processes.

  Raises:
    UserError: it cannot be pickled.
  """
  try:
    with open(os.devnull, 'wb') as nowhere:
      ForkingPickler(nowhere).dump(source)
  except Exception as error:  # pickle raises errors of several types
    raise UserError(
      f'a source of type {type(source).__name__} cannot be sent to the processes that read ({first_line(error)}): '
      'make its class importable, and open files in __getitem__; or set data.workers to 0'
    ) from error


def read_in_threads(batches: BatchSequence, first: int = 0, step: int = 1) -> Iterator[HostBatch]:
  """Yield the batches `first`, `first` + `step`, …. Closing the generator ends the threads."""
  options = grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)
  iterator = iter(grain.MapDataset.source(batches)[first::step].to_iter_dataset(options))
  try:
    yield from iterator
  finally:
    iterator.close()


def read_in_processes(batches: BatchSequence, count: int) -> Iterator[HostBatch]:
  """Yield all batches in order. `count` processes read them in turn. Closing the generator ends the processes.

  An exception that a source raises in one of these processes is raised in this process too.

  Raises:
    UserError: a process died before it had sent its batches.
  """
  # Grain's own processes (`mp_prefetch`) do not suit: if one is killed while it sends a batch, Grain waits forever.
  readers: list[_Reader] = []
  pool = futures.ThreadPoolExecutor(count)
  try:
    readers += (_Reader(batches, first, count) for first in range(count))
    waiting = deque(pool.submit(reader.receive) for reader in readers)
    for number in range(len(batches)):
      batch = waiting.popleft().result()
      # After the last batch of a reader this call fails, and nobody looks at the error.
      waiting.append(pool.submit(readers[number % count].receive))
      yield batch
  finally:
    for reader in readers:
      reader.kill()
    pool.shutdown()


class _Reader:
  """A process that reads the batches `first`, `first` + `step`, …, and the pipe that it sends them through."""

  def __init__(self, batches: BatchSequence, first: int, step: int):
    context = multiprocessing.get_context('spawn')
    self._pipe, end = context.Pipe(duplex=False)
    self._process = context.Process(target=_serve, args=(end, batches, first, step), daemon=True)
    self._process.start()
    end.close()  # Now only the new process has this end of the pipe. If it dies, the pipe ends.
    self._is_killed, self._has_sent = False, False
    atexit.register(self.kill)  # At its exit, Python would wait forever for a process that ignores SIGTERM.

  def receive(self) -> HostBatch:
    """Wait for the next batch.

    Raises:
      UserError: the process died.
    """
    try:
      received = self._pipe.recv()
      if not isinstance(received, Exception):
        self._has_sent = True
        return {name: _receive_array(self._pipe, *about) for name, about in received.items()}
    except (EOFError, OSError) as error:  # The pipe ended, before a batch or within it.
      self._process.join()
      raise _death(self._process.exitcode, self._has_sent) from error
    raise received

  def kill(self) -> None:
    """Kill the process and wait for its end."""
    if not self._is_killed:
      self._is_killed = True
      atexit.unregister(self.kill)
      self._process.kill()
      self._process.join()


def _death(exitcode: int | None, has_sent: bool) -> UserError:
  """Return the error for a process that has ended. `has_sent` is True if it has sent a batch."""
  if not has_sent and (exitcode or 0) > 0:  # it ended while it imported modules, and printed an error
    return UserError(
      f'a process that reads images could not start ({_cause(exitcode)}; its error is above). It imports your '
      "script: put its calls under `if __name__ == '__main__':`, or set data.workers to 0"
    )
  return UserError(
    f'a process that reads images died ({_cause(exitcode)}); expected it to live as long as this command: run it '
    'again, with a smaller data.workers if memory ran out; training goes on from its last checkpoint'
  )


def _cause(exitcode: int | None) -> str:
  """Return the cause of a process's end in words."""
  number = -(exitcode or 0)
  return signal.strsignal(number) or f'signal {number}' if number > 0 else f'exit status {exitcode}'


def _serve(pipe: Connection, batches: BatchSequence, first: int, step: int) -> None:
  """Read batches and send them through a pipe. This is the main function of a reading process.

  The process uses no accelerator, ignores SIGINT, SIGTERM and SIGHUP, and ends with its parent.
  """
  jax.config.update('jax_platforms', 'cpu')
  # A signal to the whole group is meant for the parent. The parent saves a checkpoint and then ends its readers.
  for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(kind, signal.SIG_IGN)
  threading.Thread(target=_exit_with_parent, daemon=True).start()
  try:
    for batch in read_in_threads(batches, first, step):
      pipe.send({name: (array.shape, array.dtype) for name, array in batch.items()})
      for array in batch.values():
        _send_array(pipe, array)
  except Exception as error:  # A source may raise anything, and so may Pillow.
    error.add_note(traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):  # The parent may have ended.
      pipe.send(_sendable(error))


def _sendable(error: Exception) -> Exception:
  """Return the error, or a UserError with its message if it cannot be pickled and read again."""
  try:
    pickle.loads(pickle.dumps(error))
    return error
  except Exception:  # the class of the error decides what happens
    replaced = UserError(f'a source raised {type(error).__name__}: {first_line(error)}')
    for note in error.__notes__:
      replaced.add_note(note)
    return replaced


def _send_array(pipe: Connection, array: np.ndarray) -> None:
  """Send the bytes of an array. To receive a pickled array would take the parent several times as long."""
  rest = _bytes(np.ascontiguousarray(array))
  while rest:
    rest = rest[os.write(pipe.fileno(), rest) :]


def _receive_array(pipe: Connection, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  """Receive an array from `_send_array`. Raise EOFError if the pipe ends."""
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
  """Wait for the end of the parent process, then exit. A parent that is killed could not end this process itself."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
