"""The evaluation of a split during a run: the parameters, their average, and both with copies of the examples.

With copies, the network's outputs for several changed copies of an image are averaged (`hbf.data.augment.copies`).
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hbf.tasks.evaluator import Evaluator, Interrupted, SplitResult
from hbf.training.experiment import Experiment
from hbf.training.state import TrainState


class StateEvaluation(NamedTuple):
  """All evaluations of a split at one step.

  Attributes:
    params: the evaluation of the parameters.
    average: the evaluation of the average of the parameters. None if the run keeps no average.
    copies: the same two evaluations with copies (`evaluate.copies`). None if the run uses no copies.
  """

  params: SplitResult
  average: SplitResult | None
  copies: 'StateEvaluation | None' = None

  def scores(self, *names: str) -> dict[str, Any]:
    """Return the scores of these names for the parameters.

    If there are other evaluations, the entries `average` and `copies` hold their scores of the same names.
    """
    values = {name: self.params.summary[name] for name in names}
    if self.average is not None:
      values['average'] = {name: self.average.summary[name] for name in names}
    if self.copies is not None:
      values['copies'] = self.copies.scores(*names)
    return values


def evaluate_state(
  experiment: Experiment, state: TrainState, split: str, stopped: Callable[[], bool]
) -> StateEvaluation | None:
  """Return all evaluations of a split (`StateEvaluation`). Return None if `stopped` returns True before the end."""
  examples, copies = experiment.inputs[split], experiment.copies_evaluator

  def evaluate(evaluator: Evaluator) -> StateEvaluation:
    params = evaluator(state.params, examples, stopped)
    return StateEvaluation(params, None if state.average is None else evaluator(state.average, examples, stopped))

  with contextlib.suppress(Interrupted):
    return evaluate(experiment.evaluator)._replace(copies=evaluate(copies) if copies else None)
  return None
