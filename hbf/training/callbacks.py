"""The user's callbacks: functions that a run calls after every few steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hbf.errors import UserError
from hbf.training.experiment import Experiment
from hbf.training.state import Totals, TrainState, training_means

Callback = Callable[[int, Mapping[str, Any], TrainState], bool | None]


class Callbacks:
  """The callbacks of a user, see `hbf.train`.

  If a callback raises an exception, the run is saved and stops, as after a signal. `raise_error` then raises this
  exception again.

  Attributes:
    stopped: True once a callback has returned True or raised an exception.
  """

  def __init__(self, callbacks: Sequence[Callback] = ()):
    """Store the callbacks. They are called in the given order."""
    self.stopped = False
    self._callbacks = tuple(callbacks)
    self._error: BaseException | None = None

  def __bool__(self) -> bool:
    """Return True if there are callbacks. Without them, a run never waits until the devices have computed metrics."""
    return bool(self._callbacks)

  def __call__(self, step: int, metrics: Mapping[str, Any], state: TrainState, last: bool) -> None:
    """Call all callbacks after a step. Set `stopped` if one returns True, unless the run ends with this step anyway.

    Args:
      step: the number of steps taken so far.
      metrics: the metrics that the callbacks see (`callback_metrics`).
      state: the state after the step.
      last: True if the run ends with this step.
    """
    try:
      answers = [_stops(callback(step, metrics, state)) for callback in self._callbacks]
    except BaseException as error:  # Ctrl-C too: the run is saved in any case
      self._error, self.stopped = error, True
    else:
      self.stopped = self.stopped or (any(answers) and not last)

  def raise_error(self) -> None:
    """Raise the exception of a callback, if there was one."""
    if self._error is not None:
      raise self._error


def _stops(answer: Any) -> bool:
  """Return True if a callback's answer stops the run. The answer may be a boolean of Python, NumPy or JAX, or None.

  Raises:
    UserError: the answer is neither a bool nor None.
  """
  if answer is not None and np.asarray(answer).dtype != bool:
    raise UserError(f'a callback returned {answer!r}: expected True, which stops the run, False or None')
  return bool(answer)


def callback_metrics(
  experiment: Experiment, step: int, totals: Totals, validation: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Wait for the devices, and return the metrics that callbacks see after a step.

  Args:
    experiment: the run.
    step: the number of steps taken so far.
    totals: the sums of losses and of correct predictions since the last report.
    validation: the scores of the validation split. None if it was not evaluated after this step.
  """
  clock, found = experiment.clock, jax.device_get(totals)
  steps = int(found.steps) or float('nan')  # without a step, as all were skipped, means are not numbers
  metrics = {'epoch': clock.epoch(step), **training_means(experiment.task, found, steps * clock.batch_size)}
  return metrics if validation is None else {**metrics, 'validation': dict(validation)}
