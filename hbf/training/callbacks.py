"""Functions of a user's own that a run calls after each call of steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY
from hbf.training.state import Totals, TrainState

Callback = Callable[[int, Mapping[str, Any], TrainState], bool | None]


class Callbacks:
  """A user's callbacks, see `hbf.train`.

  An exception in a callback ends the run like a signal, so the run is saved first; `raise_error` raises it.

  Attributes:
    stopped: whether a callback has stopped the run.
  """

  def __init__(self, callbacks: Sequence[Callback] = ()):
    """Takes the functions, which are called in this order."""
    self.stopped = False
    self._callbacks = tuple(callbacks)
    self._validation: tuple[int, Mapping[str, Any]] | None = None
    self._error: BaseException | None = None

  def __bool__(self) -> bool:
    """Return whether there are any: a run without callbacks never waits for the numbers they get."""
    return bool(self._callbacks)

  def validated(self, step: int, values: Mapping[str, Any]) -> None:
    """Note the scores of the held-out part of train after a step."""
    self._validation = step, values

  def __call__(self, step: int, metrics: dict[str, Any], state: TrainState, last: bool) -> None:
    """Call all functions after a step; after the last one they cannot stop the run any more."""
    if self._validation is not None and self._validation[0] == step:
      metrics['validation'] = dict(self._validation[1])
    try:
      asked = [_stops(callback(step, metrics, state)) for callback in self._callbacks]
    except BaseException as error:  # Ctrl-C too: the run is saved, whatever it is
      self._error, self.stopped = error, True
    else:
      self.stopped = self.stopped or (any(asked) and not last)

  def raise_error(self) -> None:
    """Raise the exception of a callback, if there was one."""
    if self._error is not None:
      raise self._error


def _stops(answer: Any) -> bool:
  """Return whether a callback's answer stops the run; True of NumPy or JAX does too.

  Raises:
    UserError: the answer is neither a bool nor None.
  """
  if answer is not None and np.asarray(answer).dtype != bool:
    raise UserError(f'a callback returned {answer!r}: expected True, which stops the run, False or None')
  return bool(answer)


def train_metrics(totals: Totals, examples: int) -> dict[str, Any]:
  """Return loss and accuracy since the last report; this waits for the devices.

  Args:
    totals: since then.
    examples: predictions in a step.
  """
  found = jax.device_get(totals)
  steps = int(found.steps)
  return {'loss': float(found.loss) / steps, ACCURACY.name: 100 * int(found.correct) / (steps * examples)}
