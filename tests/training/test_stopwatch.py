"""Tests of the stopwatch with a simulated device and clock."""

import threading

import pytest

from hbf.training import stopwatch

SECONDS = 2.0


class Device:
  """A device that takes SECONDS for each call, one after another. An `eager` device ends a call before it returns."""

  def __init__(self, monkeypatch, eager=False, **timed):
    self.time, self.free, self.eager = 100.0, 0.0, eager
    self._waiter = threading.local()
    monkeypatch.setattr(stopwatch.jax, 'block_until_ready', self._wait)
    self.watch = stopwatch.Stopwatch(now=self._now, **timed)

  def call(self):
    self.free = max(self.time, self.free) + SECONDS
    if self.eager:
      self.time = self.free
    return self.free

  def settle(self, done):
    """Let the host wait for a call."""
    self.watch.settle()
    self.time = max(self.time, done)

  def _wait(self, done):
    self._waiter.time = done

  def _now(self):
    return getattr(self._waiter, 'time', self.time)  # whoever waited for a call has the time when it was done


@pytest.mark.parametrize('eager', [False, True])
@pytest.mark.parametrize('work', [0.0, 1.5])
def test_calls_take_what_the_device_takes_for_them(monkeypatch, eager, work):
  """Pauses do not count, and it does not matter that the host waits only when the next call runs."""
  device, seen, done = Device(monkeypatch, eager), [], 0.0
  for number in range(1, 7):
    device.watch.begin()
    before, done = done, device.call()
    device.settle(before)
    seen.append((device.watch.steps, device.watch.seconds))
    device.watch.add(10, done)
    if number in (3, 6):
      with device.watch.paused():
        device.time = max(device.time, done) + 1000.0  # validation
    elif not eager:
      device.time += work
  assert seen == [(10 * number, SECONDS * number) for number in range(6)]
  assert (device.watch.steps, device.watch.seconds) == (60, 6 * SECONDS)


def test_a_host_that_is_late_does_not_make_the_call_before_longer(monkeypatch):
  device = Device(monkeypatch)
  device.watch.begin()
  first = device.call()
  device.watch.add(1, first)
  device.time += 5 * SECONDS  # until the next batch is read
  second = device.call()
  device.settle(first)
  assert device.watch.seconds == SECONDS
  device.watch.add(1, second)
  device.settle(second)
  assert device.watch.seconds == 6 * SECONDS


def test_a_resumed_run_adds_to_what_was_timed(monkeypatch):
  device = Device(monkeypatch, seconds=5.0, steps=3)
  device.time += 50.0  # compilation
  device.watch.begin()
  done = device.call()
  device.watch.add(1, done)
  device.settle(done)
  assert (device.watch.seconds, device.watch.steps) == (5.0 + SECONDS, 4)
