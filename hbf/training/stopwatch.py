"""The time that steps take on the devices."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import jax


class Stopwatch:
  """A stopwatch for steps. The time inside the context `paused` does not count.

  A call of the compiled program takes several training steps, and returns before the devices have taken them. So the
  host can prepare the next call meanwhile. For each call, the host does four things in this order: `begin`, the call
  itself, `settle`, which waits for the end of the previous call, and `add`. The time of a call goes from the end of
  the previous call to its own end. A thread waits for these ends, because the host may be busy.

  Attributes:
    seconds: the time of all counted steps, in seconds.
    steps: the number of counted steps.
  """

  def __init__(self, seconds: float = 0.0, steps: int = 0, now: Callable[[], float] = time.perf_counter):
    """Begin with the number of earlier `steps` and their `seconds`. `now` returns the time of a clock in seconds."""
    self.seconds, self.steps = seconds, steps
    self._now = now
    self._since: float | None = None
    self._running: tuple[int, futures.Future[float]] | None = None
    self._waiter = futures.ThreadPoolExecutor(1)

  def begin(self) -> None:
    """Start to time a call, unless this has already begun at the end of the previous call."""
    if self._since is None:
      self._since = self._now()

  def add(self, steps: int, done: jax.Array) -> None:
    """Record a call that the devices have received.

    Args:
      steps: number of training steps in the call.
      done: an array that the call returns. The call ends when this array is ready.
    """
    self._running = steps, self._waiter.submit(self._wait, done)

  def settle(self) -> None:
    """Wait for the end of the call that `add` has recorded, and count its time and its steps."""
    if self._running is None:
      return
    (steps, done), self._running = self._running, None
    assert self._since is not None
    end = done.result()
    self.seconds, self.steps, self._since = self.seconds + end - self._since, self.steps + steps, end

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Wait for the end of the call that `add` has recorded. Do not count the time inside the context."""
    self.settle()
    yield
    self._since = None

  def _wait(self, done: jax.Array) -> float:
    jax.block_until_ready(done)
    return self._now()
