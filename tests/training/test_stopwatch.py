"""The stopwatch on a device that takes as long as it is told to."""

import itertools
import time

import pytest

from hbf.training import stopwatch

SECONDS = 0.05


class Device:
  """Takes calls one after another, SECONDS each; `eager` ones are done when the call returns."""

  def __init__(self, monkeypatch, eager):
    self.free, self.eager = 0.0, eager
    monkeypatch.setattr(stopwatch.jax, 'block_until_ready', self.wait)

  def call(self):
    self.free = max(time.perf_counter(), self.free) + SECONDS
    if self.eager:
      self.wait(self.free)
    return self.free

  def wait(self, until):
    time.sleep(max(until - time.perf_counter(), 0.0))


@pytest.mark.parametrize('eager', [False, True])
def test_calls_take_what_the_device_takes_for_them(monkeypatch, eager):
  """Whatever happens in pauses, and though the host only asks when the next call runs."""
  device, watch, seen = Device(monkeypatch, eager), stopwatch.Stopwatch(), []
  for number in range(1, 7):
    watch.begin()
    done = device.call()
    watch.settle()
    seen.append((watch.steps, watch.seconds))
    watch.add(10, done)
    if number in (3, 6):
      with watch.paused():
        time.sleep(4 * SECONDS)  # validation
  assert [steps for steps, _ in seen] == [0, 10, 20, 30, 40, 50]
  seen.append((watch.steps, watch.seconds))
  took = [after - before for (_, before), (_, after) in itertools.pairwise(seen)]
  assert took == pytest.approx([SECONDS] * 6, rel=0.5)
  assert watch.steps == 60


def test_a_host_that_is_late_does_not_make_the_call_before_longer(monkeypatch):
  device, watch = Device(monkeypatch, eager=False), stopwatch.Stopwatch()
  watch.begin()
  watch.add(1, device.call())
  time.sleep(4 * SECONDS)  # the next batch is read
  done = device.call()
  watch.settle()
  assert watch.seconds == pytest.approx(SECONDS, rel=0.5)
  watch.add(1, done)
  watch.settle()
  assert watch.seconds == pytest.approx(5 * SECONDS, rel=0.2)


def test_a_resumed_run_adds_to_what_was_timed(monkeypatch):
  device, watch = Device(monkeypatch, eager=True), stopwatch.Stopwatch(seconds=5.0, steps=3)
  time.sleep(SECONDS)  # compilation
  watch.begin()
  watch.add(1, device.call())
  watch.settle()
  assert (watch.seconds, watch.steps) == (pytest.approx(5.0 + SECONDS, abs=0.5 * SECONDS), 4)
