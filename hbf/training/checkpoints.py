"""Checkpoints with Orbax: asynchronous, atomic, the latest ones and the best."""

import contextlib
import dataclasses
import errno
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from hbf.errors import UserError
from hbf.evaluation.figures import CLASSIFICATION
from hbf.training import processes
from hbf.training.state import TrainState

RANKS = CLASSIFICATION[0]  # says which checkpoint is the best
ITEMS = ('params', 'training', 'average')  # of a checkpoint


class Restored(NamedTuple):
  """What a run goes on from.

  Attributes:
    step: of the checkpoint.
    state: then.
    about: what was said of it when it was saved.
    damaged: by step, where the newer checkpoints are that could not be read.
  """

  step: int
  state: TrainState
  about: Mapping[str, Any]
  damaged: Mapping[int, pathlib.Path]


class Checkpoints:
  """The folder `checkpoints/` of a run: <step>/params, <step>/training, and <step>/average where there is one.

  Parameters and their average are items of their own, so that evaluation reads nothing else. Several processes open,
  save and close together; each reads by itself.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep: int = 1,
    scores: Mapping[int, float] | None = None,
    read_only: bool = False,
  ):
    """Opens the folder.

    Args:
      folder: made if it is missing, unless read_only.
      keep: how many of the latest checkpoints stay; the best stays too.
      scores: by step, the figure RANKS on the held-out part of train; steps may have no checkpoint, or no figure.
      read_only: never write or delete.
    """
    self._scores = dict(scores or {})
    self._folder = folder
    self._reader = _open(folder, read_only=True, multiprocessing_options=_alone())
    # With max_to_keep and a best_fn Orbax would throw away the newest checkpoint.
    policy = AnyPreservationPolicy([LatestN(keep), _Best(self._scores)])
    self._manager = self._reader if read_only else _open(folder, preservation_policy=policy)

  def score(self, step: int, value: float) -> bool:
    """Takes note of a step's figure; returns whether it is better than that of every checkpoint."""
    best = _best(self._manager.all_steps(), self._scores)
    self._scores[step] = value
    return best is None or (value != self._scores[best] and RANKS.better(value, self._scores[best]) == value)

  def scored(self, step: int) -> bool:
    """Whether the figure of a step is known."""
    return step in self._scores

  def save(self, step: int, state: TrainState, about: Mapping[str, Any] | None = None) -> None:
    """Starts to write the state, with what is to be known of it (for JSON); returns when its arrays may change."""
    if step in self._manager.all_steps():
      return
    items = {name: ocp.args.StandardSave(item) for name, item in _items(state).items()}
    self._manager.save(step, args=ocp.args.Composite(**items), custom_metadata=dict(about or {}), force=True)

  @property
  def latest(self) -> int | None:
    """The newest complete checkpoint's step."""
    return self._manager.latest_step()

  def find(self, which: str) -> int:
    """The step of checkpoint 'latest', 'best' (by the figure RANKS on the held-out part of train) or a number.

    Raises:
      UserError: there is no such checkpoint; the message names those that exist.
    """
    steps = sorted(self._manager.all_steps())
    if not steps:
      raise UserError(f'no checkpoint in {self._folder}: train first')
    if which == 'latest':
      return steps[-1]
    if which == 'best':
      best = _best(steps, self._scores)
      if best is None:
        raise UserError(
          f'no checkpoint has a validation {RANKS.name} (data.validation was 0): use --checkpoint=latest'
        )
      return best
    if which.isdecimal() and int(which) in steps:
      return int(which)
    known = ', '.join(map(str, steps))
    raise UserError(f'no checkpoint {which!r} in {self._folder}: use latest, best or one of {known}')

  def restore(self, step: int, state: TrainState) -> TrainState:
    """The state at a step, placed like `state` (arrays, or shapes with shardings)."""
    items = {name: ocp.args.StandardRestore(_abstract(item)) for name, item in _items(state).items()}
    restored = self._reader.restore(step, args=ocp.args.Composite(**items))
    return TrainState(params=restored['params'], average=restored.get('average'), **restored['training'])

  def restore_newest(self, state: TrainState) -> Restored:
    """The newest checkpoint that all can read, placed like `state`; newer ones are set aside as <step>.damaged.

    Raises:
      UserError: none can be read; then all stay where they are.
    """
    steps = processes.from_first(lambda: sorted(self._manager.all_steps(), reverse=True))
    reasons: dict[int, str] = {}
    for step in steps:
      reason = ''
      try:
        about = self._reader.metadata(step).custom_metadata
        restored = self.restore(step, state)
      except Exception as error:  # Orbax, TensorStore and JSON raise whatever they like
        if _is_the_machines(error):
          raise
        reason = _first_line(error)
      if not any(found := processes.exchange(reason)):
        return Restored(step, restored, about or {}, self._set_aside(reasons))
      reasons[step] = max(found)
    raise UserError(
      f'no checkpoint in {self._folder} can be read ({reasons[steps[0]]}): '
      'if they are damaged, remove the folder to begin anew, or choose another --workdir'
    )

  def _set_aside(self, steps: Iterable[int]) -> dict[int, pathlib.Path]:
    """Renames checkpoints, for all processes; returns where they are."""
    moved = processes.from_first(lambda: [(step, str(_renamed(self._folder / str(step)))) for step in steps])
    for manager in (self._manager, self._reader):
      manager.reload()
    return {step: pathlib.Path(path) for step, path in moved}

  def restore_params(self, step: int, params: Any, average: bool = False) -> Any:
    """The parameters, or their average, alone, placed like `params`; saved on any devices, restored on these.

    Raises:
      UserError: they can't be read, or there is no average.
    """
    item = 'average' if average else 'params'
    if average and not (self._folder / str(step) / item).exists():
      raise UserError(
        f'checkpoint {step} in {self._folder} has no average of the parameters (train.average was 0): '
        'evaluate the parameters themselves, or train with --config.train.average=0.999'
      )
    items = ocp.args.Composite(**{item: ocp.args.StandardRestore(_abstract(params))})
    try:
      return self._reader.restore(step, args=items)[item]
    except Exception as error:
      others = ', '.join(str(other) for other in sorted(self._manager.all_steps()) if other != step)
      cure = f'use --checkpoint with one of {others}' if others else 'there is no other'
      raise UserError(f'checkpoint {step} in {self._folder} cannot be read ({_first_line(error)}): {cure}') from error

  def wait(self) -> None:
    """Waits until what was saved is complete."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()
    self._reader.close()


def has_checkpoint(folder: pathlib.Path) -> bool:
  """Whether a complete checkpoint lies in the folder, which needn't be there."""
  if not folder.is_dir():
    return False
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    return checkpoints.latest is not None


def _open(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(**options), item_names=ITEMS)


def _alone() -> ocp.options.MultiprocessingOptions:
  """Has Orbax wait for no other process: where one can't read, the others would wait for ever."""
  own = jax.process_index()
  return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


def _renamed(folder: pathlib.Path) -> pathlib.Path:
  """Sets a checkpoint aside; returns where it is."""
  taken = len([*folder.parent.glob(f'{folder.name}.damaged*')])
  aside = folder.with_name(f'{folder.name}.damaged' + (f'-{taken + 1}' if taken else ''))
  folder.rename(aside)
  return aside


@dataclasses.dataclass(frozen=True)
class _Best:
  """Has Orbax keep the best checkpoint; Orbax's own policy knows the figures of the moment of saving only."""

  scores: Mapping[int, float]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    best = _best((checkpoint.step for checkpoint in checkpoints), self.scores)
    return [checkpoint.step == best for checkpoint in checkpoints]


def _best(steps: Iterable[int], scores: Mapping[int, float]) -> int | None:
  """The best of the steps that have a figure, of equal ones the first; None if none has one."""
  ranked = sorted(step for step in steps if step in scores)
  if not ranked:
    return None
  value = RANKS.better(scores[step] for step in ranked)
  return next(step for step in ranked if scores[step] == value)


def _is_the_machines(error: Exception) -> bool:
  """Whether a checkpoint can't be read for want of memory, or of a disk that answers: it may be sound."""
  wants_memory = isinstance(error, MemoryError | jax.errors.JaxRuntimeError)
  return wants_memory or (isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [''])[0][:150] or type(error).__name__


def _items(state: TrainState) -> dict[str, Any]:
  """What of a state goes where; without an average there is no such item."""
  training = {'step': state.step, 'opt_state': state.opt_state, 'totals': state.totals}
  items = {'params': state.params, 'training': training, 'average': state.average}
  return {name: item for name, item in items.items() if item is not None}


def _abstract(tree: Any) -> Any:
  return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=z.sharding), tree)
