"""SIGTERM, Ctrl-C and SIGHUP: the first signal makes a run save and stop.

A second SIGTERM or a second Ctrl-C ends the process. SIGHUP comes when the terminal closes.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_OUTPUTS = (1, 2)  # file descriptors of the standard output and of standard error


def handled() -> list[int]:
  """Return the signals that stop a run. SIGHUP is left out if the process ignores it, as after `nohup`."""
  is_deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
  return [signal.SIGTERM, signal.SIGINT, *([] if is_deaf else [signal.SIGHUP])]


@contextlib.contextmanager
def signals(guest: bool = False) -> Iterator[Callable[[], bool]]:
  """Remember SIGTERM, SIGINT and SIGHUP inside the context. A second SIGTERM or SIGINT ends the process at once.

  A closed terminal can send several SIGHUP, from the system and from the shell, so they do not end the process. The
  process may still print, but nothing shows it. A process that ignores SIGHUP, as after `nohup`, keeps ignoring it.

  One SIGTERM and one SIGINT together do not end the process: if a comparison started the run, a single Ctrl-C sends
  both. SIGINT comes from the terminal, SIGTERM from the comparison. Only the main thread of a process can handle
  signals. In other threads this function does nothing.

  Args:
    guest: True if the process belongs to a user, such as a notebook. Then the first signal calls the process's own
      handler at the end of the context, when the run is saved. So Ctrl-C raises KeyboardInterrupt, as usual. A second
      SIGTERM or SIGINT calls the process's own handler at once.

  Yields:
    A function that returns True once a signal has come.
  """
  if threading.current_thread() is not threading.main_thread():
    yield lambda: False
    return
  received: list[int] = []
  before: dict[int, Any] = {kind: signal.getsignal(kind) or signal.SIG_DFL for kind in handled()}
  terminals = [output for output in _OUTPUTS if os.isatty(output)]

  def handle(number: int, _: object) -> None:
    if number == signal.SIGHUP:
      _silence(terminals)
    elif guest and number in received:
      signal.signal(number, before[number])
      signal.raise_signal(number)
    received.append(number)

  try:
    for kind in before:
      signal.signal(kind, handle)
    with contextlib.nullcontext() if guest else _ended_by_a_second():
      yield lambda: bool(received)
  finally:
    for kind, handler in before.items():
      signal.signal(kind, handler)
  if guest and received:
    signal.raise_signal(received[0])


def _silence(outputs: Sequence[int]) -> None:
  """Send what is written to file descriptors to nowhere: to write to a closed terminal would be an error."""
  if outputs:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
      os.dup2(nowhere, output)
    os.close(nowhere)


@contextlib.contextmanager
def _ended_by_a_second() -> Iterator[None]:
  """End the process at the second SIGTERM or the second SIGINT."""
  # A thread reads the signals. Python's own handlers would wait while the main thread compiles, maybe for minutes.
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  thread = threading.Thread(target=_listen, args=[reader], daemon=True)
  thread.start()
  try:
    yield
  finally:
    signal.set_wakeup_fd(before)
    os.close(writer)  # this ends the thread
    thread.join()
    os.close(reader)


def _listen(reader: int) -> None:
  received = set[int]()
  while number := int.from_bytes(os.read(reader, 1)):
    if number in (signal.SIGTERM, signal.SIGINT) and number in received:
      print(f'error: ended by a second {signal.Signals(number).name}', file=sys.stderr, flush=True)
      os._exit(128 + number)
    received.add(number)
