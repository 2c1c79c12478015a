"""SIGTERM and Ctrl-C: the first asks a run to save and stop, a second ends it."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

KINDS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals(guest: bool = False) -> Iterator[Callable[[], bool]]:
  """Turn SIGTERM and SIGINT into an answer to 'shall I stop?'; the second of a kind ends the process at once.

  One of each kind does not: Ctrl-C reaches a run from the terminal, and from the comparison that started it, which
  sends SIGTERM. Signals reach a process's main thread only; in another thread none is heard.

  Args:
    guest: whether the process is a user's own, a notebook say. Its own handlers then hear the first signal when the
      run is saved, and the second of a kind at once: Ctrl-C becomes KeyboardInterrupt, as usual.
  """
  if threading.current_thread() is not threading.main_thread():
    yield lambda: False
    return
  received: list[int] = []
  before: dict[int, Any] = {kind: signal.getsignal(kind) or signal.SIG_DFL for kind in KINDS}

  def hear(number: int, _: object) -> None:
    if guest and number in received:
      signal.signal(number, before[number])
      signal.raise_signal(number)
    received.append(number)

  try:
    for kind in before:
      signal.signal(kind, hear)
    with contextlib.nullcontext() if guest else _ended_by_a_second():
      yield lambda: bool(received)
  finally:
    for kind, handler in before.items():
      signal.signal(kind, handler)
  if guest and received:
    signal.raise_signal(received[0])


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
