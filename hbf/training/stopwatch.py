"""How long steps take, by when they are done on the devices."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import jax


class Stopwatch:
  """Adds up the seconds of steps; what happens in `paused` doesn't count.

  Around a call of steps come `begin`, the call, `settle`, `add`. Devices may work on one while the host prepares the
  next, so the time of a call is that between the moments at which it and the one before it were done; a thread waits
  for them, as the host may be busy then.

  Attributes:
    seconds: that the steps took.
    steps: that are done.
  """

  def __init__(self, seconds: float = 0.0, steps: int = 0, now: Callable[[], float] = time.perf_counter):
    """Goes on from what was timed before; `now` is a clock, in seconds."""
    self.seconds, self.steps = seconds, steps
    self._now = now
    self._since: float | None = None
    self._running: tuple[int, futures.Future[float]] | None = None
    self._waiter = futures.ThreadPoolExecutor(1)

  def begin(self) -> None:
    """Says that a call is about to be made."""
    if self._since is None:
      self._since = self._now()

  def add(self, steps: int, done: jax.Array) -> None:
    """Takes note of a call of so many steps that was made, and that is done when `done` is ready."""
    self._running = steps, self._waiter.submit(self._done, done)

  def settle(self) -> None:
    """Waits until the call that was added last is done, and counts it."""
    if self._running is None:
      return
    (steps, done), self._running = self._running, None
    assert self._since is not None
    end = done.result()
    self.seconds, self.steps, self._since = self.seconds + end - self._since, self.steps + steps, end

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Waits for the call that runs, and doesn't count what happens inside."""
    self.settle()
    yield
    self._since = None

  def _done(self, done: jax.Array) -> float:
    jax.block_until_ready(done)
    return self._now()
