"""Processes that read for Grain."""

import multiprocessing
import os
import signal
import sys
import threading

import grain
import jax
from absl import flags


def read_in_processes(dataset: grain.IterDataset, count: int) -> grain.IterDataset:
  """Returns `dataset` with its elements read by `count` processes, in the same order."""
  if not flags.FLAGS.is_parsed():  # Grain asks for flags of its own, in a notebook or a test too.
    flags.FLAGS.mark_as_parsed()
  # Shared memory would be faster for large images, but a container has 64 MiB of it and dies when it is full.
  options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
  piped = grain.experimental.WithOptionsIterDataset(dataset, options)
  processes = grain.MultiprocessingOptions(num_workers=count, per_worker_buffer_size=1)
  return piped.mp_prefetch(processes, worker_init_fn=_set_up)


def _set_up(index: int, count: int) -> None:
  """Runs in a worker process before it reads: no accelerator, no signals, no life after its parent."""
  del index, count
  jax.config.update('jax_platforms', 'cpu')
  # A signal to the whole group is for the parent, which saves a checkpoint and then closes its workers.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
  """Waits until the parent is gone; a killed one can't close its workers."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)
