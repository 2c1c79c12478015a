"""Traces of a run's steps, for TensorBoard or Perfetto."""

import dataclasses
import pathlib
import re
import sys
from typing import Any

import jax

from hbf.errors import UserError

FOLDER = 'profile'  # folder of the traces inside a run folder


@dataclasses.dataclass(frozen=True)
class TracedSteps:
  """The steps that a trace shows: those after step `first`, up to step `last`."""

  first: int
  last: int

  def after(self, step: int) -> int:
    """Return the first step after `step` at which the trace begins or ends. A huge number if there is none."""
    return next((limit for limit in (self.first, self.last) if limit > step), sys.maxsize)


def traced_steps(text: str, steps: int) -> TracedSteps | None:
  """Return the steps that the config key `log.profile` names, such as '100..110'. None for ''.

  Args:
    text: the value of the key.
    steps: the number of steps of the run.

  Raises:
    UserError: the text has another form, or the steps are not in the run.
  """
  if not text:
    return None
  match = re.fullmatch(r'(\d+)\.\.(\d+)', text)
  if match is None:
    raise UserError(f"log.profile is {text!r}: expected two steps FIRST..LAST such as '100..110', or ''")
  first, last = map(int, match.groups())
  if not first < last <= steps:
    raise UserError(f'log.profile is {text}, and the run has {steps} steps: expected FIRST < LAST ≤ {steps}')
  return TracedSteps(first, last)


class Profiler:
  """The trace of some steps of a run."""

  def __init__(self, traced: TracedSteps | None, workdir: pathlib.Path):
    """Make a profiler that traces nothing so far. If `traced` is None, it never traces."""
    self._traced = traced
    self._folder = workdir / FOLDER
    self._running = False

  def is_due(self, step: int) -> bool:
    """Return True if the trace begins or ends after a step."""
    return self._traced is not None and step in (self._traced.first, self._traced.last)

  def __call__(self, step: int, state: Any) -> None:
    """Begin or end the trace, which is due after a step. First wait until the devices have taken the step.

    Args:
      step: the number of steps taken so far.
      state: arrays that these steps have computed.
    """
    jax.block_until_ready(state)
    self.close()
    if self._traced and step == self._traced.first:
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
      self._running = True

  def close(self) -> None:
    """End a trace that is running, and write it."""
    if self._running:
      self._running = False
      jax.profiler.stop_trace()
