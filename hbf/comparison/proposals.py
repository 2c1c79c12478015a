"""The options of each trial of a search: drawn at random, or asked from Optuna.

Optuna (Akiba et al. 2019) is an extra. It keeps a study for each arm in a SQLite file in the folder of the search. A
study is asked for each trial only once. If the search is killed, the next call finds the trial in the study, and
finishes it.

In this module, the options of a trial are config keys with their values. `label` is the label of an arm, and `number`
is the index of a trial of this arm.

References: Bergstra et al. 2011, "Algorithms for hyper-parameter optimization" (TPE); Golovin et al. 2017, "Google
Vizier" (the median rule for pruning).
"""

import importlib.util
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hbf.comparison.space import Option, draw, options_of
from hbf.errors import UserError
from hbf.evaluation.scores import Score

STUDY = 'study.db'
RANDOM, TPE = 'random', 'tpe'
DRAWN = 5  # the first trials of TPE are drawn at random; the median rule begins after as many finished trials


class Method(NamedTuple):
  """The method of a search.

  Attributes:
    sampler: 'random' or 'tpe'.
    prune: True to stop bad trials before their end (`Studies.prunes`).
  """

  sampler: str = RANDOM
  prune: bool = False

  @property
  def needs_optuna(self) -> bool:
    """True if Optuna proposes options or stops trials."""
    return self.sampler != RANDOM or self.prune


RANDOM_SEARCH = Method()


class Proposals(Protocol):
  """An object that proposes the options of trials."""

  def options(self, label: str, number: int) -> dict[str, str]:
    """Return the options of trial `number` of arm `label`, by config key. A second call returns the same options."""

  def report(self, label: str, number: int, values: Sequence[float]) -> None:
    """Record the held-out scores of trial `number` of arm `label`, at all its evaluations so far."""

  def prunes(self, label: str, number: int) -> bool:
    """Return True if the recorded scores of trial `number` of arm `label` are so bad that it should be stopped."""

  def settle(self, label: str, number: int, value: float | None) -> None:
    """Record the end of trial `number` of arm `label`.

    `value` is the trial's held-out score, or None if the trial was stopped or has diverged.
    """


class Draws:
  """Proposals of options that are drawn at random (`hbf.comparison.space.draw`)."""

  def __init__(self, space: Sequence[Option], count: int):
    """Prepare the draws of `count` trials of each arm."""
    self._space, self._count = space, count

  def options(self, label: str, number: int) -> dict[str, str]:
    """Return the options of trial `number` of arm `label`, by config key."""
    return draw(self._space, label, self._count)[number]

  def report(self, label: str, number: int, values: Sequence[float]) -> None:
    """Do nothing, because the draws do not depend on scores."""

  def prunes(self, label: str, number: int) -> bool:
    """Return False, because a search without Optuna stops no trial."""
    return False

  def settle(self, label: str, number: int, value: float | None) -> None:
    """Do nothing, because the draws do not depend on scores."""


class Studies:
  """Proposals of options by Optuna, which has a study for each arm.

  The first `DRAWN` trials of TPE, and all trials of a random search, have the options that `Draws` gives. So if
  two arms have the same distribution of a key, these trials have the same values of the key in both arms. A trial
  that diverged or was stopped is `PRUNED` for Optuna, so it counts as worse than every finished trial.
  """

  def __init__(
    self, folder: pathlib.Path, method: Method, space: Sequence[Option], count: int, score: Score, seed: int
  ):
    """Open the studies of a folder.

    Args:
      folder: folder of the search.
      method: the method of the search.
      space: distributions of config keys.
      count: number of trials of each arm.
      score: the held-out score that Optuna optimizes.
      seed: seed of Optuna's random numbers. The options of trial n are proposed with the seed `seed` + n.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._optuna, self._method, self._space, self._seed = optuna, method, space, seed
    self._drawn = Draws(space, count)
    self._direction = 'maximize' if score.better is max else 'minimize'
    self._storage = optuna.storages.RDBStorage(f'sqlite:///{(folder / STUDY).absolute()}')
    self._trials: dict[tuple[str, int], Any] = {}

  def options(self, label: str, number: int) -> dict[str, str]:
    """Return the options of trial `number` of arm `label`, by config key."""
    own, trial = options_of(self._space, label), self._trial(label, number)
    return {
      key: trial.suggest_categorical(key, option.choices)
      if option.choices
      else f'{trial.suggest_float(key, option.low, option.high, log=True):.3g}'
      for key, option in own.items()
    }

  def report(self, label: str, number: int, values: Sequence[float]) -> None:
    """Record the held-out scores of trial `number` of arm `label`, at all its evaluations so far."""
    trial = self._trial(label, number)
    for evaluation in range(len(trial.study.trials[number].intermediate_values), len(values)):
      trial.report(values[evaluation], evaluation)

  def prunes(self, label: str, number: int) -> bool:
    """Return True if the method stops bad trials, and trial `number` of arm `label` is bad.

    A trial is bad if its best score so far is worse than the median score of the arm's finished trials at the same
    evaluation.
    """
    return self._method.prune and self._trial(label, number).should_prune()

  def settle(self, label: str, number: int, value: float | None) -> None:
    """Record the end of the trial in the arm's study, unless it is already recorded. See `Proposals.settle`."""
    study, states = self._trial(label, number).study, self._optuna.trial.TrialState
    if not study.trials[number].state.is_finished():
      finished = value is not None and math.isfinite(value)
      study.tell(number, value if finished else None, state=states.COMPLETE if finished else states.PRUNED)

  def _trial(self, label: str, number: int) -> Any:
    """Return Optuna's object for trial `number` of arm `label`. If the arm's study lacks it, ask the study for it."""
    if (label, number) not in self._trials:
      study = self._study(label, number)
      if number == len(study.trials) and (number < DRAWN or self._method.sampler == RANDOM):
        study.enqueue_trial(self._inside(label, self._drawn.options(label, number)))
      known = study.trials
      asked = number < len(known) and known[number].state != self._optuna.trial.TrialState.WAITING
      # Optuna has no public function that returns a trial which another process has asked for.
      trial = self._optuna.trial.Trial(study, known[number]._trial_id) if asked else study.ask()
      self._trials[label, number] = trial
    return self._trials[label, number]

  def _study(self, label: str, number: int) -> Any:
    """Open the study of an arm, with the sampler that proposes the options of trial `number`."""
    study = self._optuna.create_study(
      storage=self._storage,
      study_name=label,
      direction=self._direction,
      load_if_exists=True,
      sampler=self._optuna.samplers.TPESampler(n_startup_trials=DRAWN, seed=self._seed + number),
      pruner=self._optuna.pruners.MedianPruner(n_startup_trials=DRAWN),
    )
    own = options_of(self._space, label)
    space: dict[str, list] = {key: [*option.choices] or [option.low, option.high] for key, option in own.items()}
    if study.user_attrs.get('space', space) != space:
      raise UserError(
        f'the search has another space for arm {label}: give the same --space, or choose another --workdir'
      )
    study.set_user_attr('space', space)
    return study

  def _inside(self, label: str, options: dict[str, str]) -> dict[str, Any]:
    """Return drawn options in Optuna's form: choices as texts, and values from ranges as numbers.

    Drawn values are rounded. A value that rounding moved out of its range becomes the nearest end of the range.
    """
    own = options_of(self._space, label)
    return {
      key: text if own[key].choices else min(max(float(text), own[key].low), own[key].high)
      for key, text in options.items()
    }


def check_optuna(method: Method, folder: pathlib.Path) -> None:
  """Raise UserError if the method needs Optuna, and Optuna is not installed or cannot use the search's folder."""
  if not method.needs_optuna:
    return
  missing = [name for name in ('optuna', 'sqlalchemy') if importlib.util.find_spec(name) is None]
  if missing:
    flag = '--prune' if method.sampler == RANDOM else f'--sampler={method.sampler}'
    raise UserError(f"{flag} needs the package optuna: install it by pip install 'hbf[optuna]'")
  # Optuna takes the path of its database as a part of an address, in which these characters have other meanings.
  if wrong := [character for character in '?{}' if character in str(folder.absolute())]:
    raise UserError(
      f'{folder.absolute()} has a {wrong[0]} in its path, which Optuna cannot use: choose another --workdir'
    )
