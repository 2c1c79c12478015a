"""SIGTERM and Ctrl-C: the first asks a run to save and stop, a second ends it."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

KINDS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], bool]]:
  """Turn SIGTERM and SIGINT into an answer to 'shall I stop?'; the second of a kind ends the process at once.

  One of each kind does not: Ctrl-C reaches a run from the terminal, and from the comparison that started it, which
  sends SIGTERM.
  """
  received: list[int] = []
  before = [signal.signal(kind, lambda number, _: received.append(number)) for kind in KINDS]
  try:
    with _ended_by_a_second():
      yield lambda: bool(received)
  finally:
    for kind, handler in zip(KINDS, before, strict=True):
      signal.signal(kind, handler)


@contextlib.contextmanager
def _ended_by_a_second() -> Iterator[None]:
  """Hear signals in a thread: Python's handlers wait while the main thread compiles, which can take minutes."""
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  thread = threading.Thread(target=_listen, args=[reader], daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    os.close(writer)  # which ends the thread
    thread.join()
    os.close(reader)


def _listen(reader: int) -> None:
  heard = set[int]()
  while number := int.from_bytes(os.read(reader, 1)):
    if number in KINDS and number in heard:
      print(f'error: ended by a second {signal.Signals(number).name}', file=sys.stderr, flush=True)
      os._exit(128 + number)
    heard.add(number)
