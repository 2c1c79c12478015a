"""The editor of a network. It makes the centers that correct the answers for single examples."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hbf.editing.guard import distance_to_others
from hbf.errors import UserError
from hbf.models.edited import Observed
from hbf.options import POSITIVE
from hbf.tasks.registry import make_task
from hbf.tasks.task import Task
from hbf.training.edits import Edit, Edits
from hbf.training.edits_file import write_edits
from hbf.training.workdir import check_data, load_config

REACH = 1.0  # docs/research/edit.md has the trials that chose it
GUARDED = 20_000  # the largest number of training examples whose answers should stay


class Editor:
  """A network to edit, and its guarded examples: the examples whose answers edits should not change.

  Every example has a point, a vector that the network computes from it (`hbf.models.edited.Observed`). The center of
  an edit is the point of the edited example, and acts in a ball. The radius of the ball is `reach` times a distance:
  from the center to the nearest guarded example whose answer is not the new one. Centers of earlier edits with
  another answer count as guarded examples here. With a reach of at most 1 the ball contains no guarded example with
  another answer, so the logits of these examples do not change. The center raises one logit of the edited example:
  the new answer's logit becomes the largest, by `margin`.

  Attributes:
    kind: the kind of the examples, for messages.
    overlap: the message if an example of a new edit is already edited by an earlier edit.
    guard: the logits and the points of the guarded examples.
    edits: the edits made so far.
  """

  kind: ClassVar[str]
  overlap: ClassVar[str]

  def __init__(self, guard: Observed, edits: Edits) -> None:
    self.guard, self.edits = guard, edits

  def _with_edit(
    self, edits: Edits, names: tuple[str, str, str], seen: Observed, answers: np.ndarray, reach: float, margin: float
  ) -> Edits:
    """Return edits with one more edit.

    Args:
      edits: the edits to which the new one is added.
      names: three texts about the new edit: the name of the image or the prompt, the answer before the edit, and the
        answer after it.
      seen: the outputs of the network without edits for the m examples of the new edit.
      answers: the index of the new answer for each example, int [m].
      reach: as in the class.
      margin: as in the class.

    Raises:
      UserError: an earlier edit has a center at a point of the new edit. Or all guarded examples already have the
        new answer, so the radius would be infinite.
    """
    radii = [
      reach * self._distance(point, answer, edits, names) for point, answer in zip(seen.points, answers, strict=True)
    ]
    return edits.added(Edit(*names, seen.points, np.array(radii), leading(seen.logits, answers, margin)))

  def _distance(self, point: np.ndarray, answer: int, edits: Edits, names: tuple[str, str, str]) -> float:
    """Return the distance from a point to the nearest guarded example or center whose answer is not `answer`.

    The centers are those of `edits`. The messages of errors use `names`.

    Raises:
      UserError: a center is at the point. Or all guarded examples and all centers have the answer `answer`.
    """
    source, _, label = names
    to_edits = np.inf
    for number, edit in enumerate(edits.edits):
      away = np.linalg.norm((edit.centers - point) @ edits.metric.T, axis=-1)
      if np.any(away < 1e-3 * edit.radii):
        found = self.overlap.format(source=source, number=number, label=edit.label)
        raise UserError(f'{found}: undo that edit first, `hbf edit --undo={number}`')
      to_edits = min(to_edits, float(np.min(away, initial=np.inf, where=edit.answers != answer)))
    distance = min(distance_to_others(self.guard, point, answer, edits.metric), to_edits)
    if not np.isfinite(distance):
      raise UserError(
        f'all {self.kind}s whose answers should stay are answered {label}: give some that have other answers'
      )
    return distance

  @property
  def changed(self) -> np.ndarray:
    """True for each guarded example whose answer the edits change, bool [n]."""
    return edited_answers(self.guard, self.edits) != self.guard.logits.argmax(axis=-1)


def check_options(reach: float, margin: float) -> None:
  """Raise UserError unless reach and margin are positive numbers."""
  POSITIVE.check('reach', reach)
  POSITIVE.check('margin', margin)


def edited_answers(seen: Observed, edits: Edits) -> np.ndarray:
  """Return the answers of the edited network to n examples, int [n].

  Args:
    seen: the outputs of the network without edits for the n examples.
    edits: the edits.
  """
  return np.asarray((seen.logits + edits.changes(seen.points)).argmax(axis=-1))


def leading(logits: np.ndarray, answers: Sequence[int] | np.ndarray, margin: float) -> np.ndarray:
  """Return changes [n, C] to add to `logits`, so that the logit of each example's answer leads by exactly `margin`.

  Args:
    logits: the logits without edits, [n, C].
    answers: the index of the new answer of each example, int [n].
    margin: difference between the answer's logit and the largest other logit, after the change.
  """
  changes, others, rows = np.zeros_like(logits), logits.copy(), np.arange(len(logits))
  others[rows, answers] = -np.inf
  changes[rows, answers] = others.max(axis=1) - logits[rows, answers] + margin
  return changes


class Made(NamedTuple):
  """The numbers that a command prints about an edit.

  Attributes:
    guarded: the number of guarded examples.
    changed: the number of guarded examples whose answers the edits change, minus this number before the new edit.
  """

  guarded: int
  changed: int


def record(workdir: pathlib.Path, editor: Editor, edit: Callable[[], None]) -> Made:
  """Call `edit`, which adds edits to `editor`. Write all edits of the editor into the run folder.

  Return the numbers that a command prints about the added edits.
  """
  before = editor.changed.sum()
  edit()
  write_edits(workdir, editor.edits)
  return Made(len(editor.changed), int(editor.changed.sum() - before))


def task_with_data(workdir: pathlib.Path, config: Any, **moved: str) -> Task:
  """Return the task of a run with its data set.

  Args:
    workdir: the run folder.
    config: the config of the run.
    **moved: new values of the config keys data.dir and data.root, if the data have moved since training. '' keeps the
      value of the run.

  Raises:
    UserError: the data set is missing, or differs from the run's.
  """
  config = config.copy_and_resolve_references()
  config.data.update({key: value for key, value in moved.items() if value})
  task = make_task(config)
  check_data(workdir, task.identity())
  return task


def check_task(workdir: pathlib.Path, wanted: str) -> None:
  """Raise UserError unless the run in a folder is of the task `wanted`."""
  if (task := load_config(workdir).task) != wanted:
    ways = {'classification': 'give images with their --label', 'next_token': 'give --prompt with --answer'}
    cure = ways.get(task, 'edits are for runs of task classification or next_token')
    raise UserError(f'{workdir} holds a run of task {task}: {cure}')
