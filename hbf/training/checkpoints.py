"""Checkpoints with Orbax: asynchronous, atomic, the latest ones and the best."""

import contextlib
import dataclasses
import errno
import gc
import json
import logging
import pathlib
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from hbf.errors import UserError
from hbf.evaluation.scores import Score
from hbf.training import processes
from hbf.training.checksum import checksum
from hbf.training.schema import GONE, RENAMED, old_names, renamed
from hbf.training.state import TrainState
from hbf.training.workdir import reason_of

ITEMS = ('params', 'training', 'average')  # of a checkpoint
UNCHECKED = {'seconds', 'steps'}  # what a checkpoint may say of itself that has no checksums, being older


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

  Parameters and their average are items of their own, so that evaluation reads nothing else. The format has checksums
  of all but the arrays' own bytes; those are ours, beside what is said of the checkpoint.

  Several processes open, save and close together. Each reads by itself, and they add up checksums together.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep: int = 1,
    ranks: Score | None = None,
    scores: Mapping[int, float] | None = None,
    read_only: bool = False,
  ):
    """Opens the folder.

    Args:
      folder: made if it is missing, unless read_only.
      keep: how many of the latest checkpoints stay; the best stays too.
      ranks: says which checkpoint is the best; None: none is.
      scores: by step, this figure on the held-out part of train; steps may have no checkpoint, or no figure.
      read_only: never write or delete.
    """
    self._ranking = _Ranking(ranks, dict(scores or {}))
    self._folder = folder
    # With max_to_keep and a best_fn Orbax would throw away the newest checkpoint.
    self._policy = None if read_only else AnyPreservationPolicy([LatestN(keep), _Best(self._ranking)])
    self._open()

  def _open(self) -> None:
    try:
      self._reader = self._manager = _manager(self._folder, read_only=True, multiprocessing_options=_alone())
      if self._policy:  # what a killed run had begun to write goes
        self._manager = _manager(self._folder, preservation_policy=self._policy, cleanup_tmp_directories=True)
    except PermissionError as error:
      raise UserError(f'{self._folder} cannot be used (permission denied): see who may read and write it') from error

  def score(self, step: int, value: float) -> bool:
    """Takes note of a step's figure; returns whether it is better than that of every checkpoint."""
    assert self._ranking.score is not None, 'of what?'
    best = self._ranking.best(self._manager.all_steps())
    self._ranking.scores[step] = value
    return best is None or (self._ranking.best([step, best]) == step and value != self._ranking.scores[best])

  def scored(self, step: int) -> bool:
    """Whether the figure of a step is known."""
    return step in self._ranking.scores

  def save(self, step: int, state: TrainState, about: Mapping[str, Any] | None = None) -> None:
    """Starts to write the state, with what is to be known of it (for JSON); returns when its arrays may change."""
    if step in self._manager.all_steps():
      return
    items, about = _items(state), dict(about or {})
    sums = {'about': _checksum_of_json(about)} | {name: checksum(item) for name, item in items.items()}
    args = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()})
    self._manager.save(step, args=args, custom_metadata={'about': about, 'checksums': sums}, force=True)

  @property
  def latest(self) -> int | None:
    """The newest complete checkpoint's step; it may be damaged."""
    return max(self._steps(), default=None)

  def _steps(self) -> list[int]:
    """Of all that have a checkpoint's name; Orbax overlooks those that aren't folders any more."""
    return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())

  def find(self, which: str) -> int:
    """The step of checkpoint 'latest', 'best' (by the figure that ranks, on the held-out part of train) or a number.

    Raises:
      UserError: there is no such checkpoint; the message names those that exist.
    """
    steps = sorted(self._manager.all_steps())
    if not steps:
      raise UserError(f'no checkpoint in {self._folder}: train first')
    if which == 'latest':
      return steps[-1]
    if which == 'best':
      best = self._ranking.best(steps)
      if best is None:
        raise UserError(f'no checkpoint has {self._ranking} (data.validation was 0): use --checkpoint=latest')
      return best
    if which.isdecimal() and int(which) in steps:
      return int(which)
    known = ', '.join(map(str, steps))
    raise UserError(f'no checkpoint {which!r} in {self._folder}: use latest, best or one of {known}')

  def _read(self, step: int, items: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
    """What is said of a checkpoint, the checksums of its items, and these items as they are found."""
    about, sums = self._about(step)
    args = {name: ocp.args.StandardRestore(_abstract(item)) for name, item in items.items()}
    return about, sums, dict(self._reader.restore(step, args=ocp.args.Composite(**args)).items())

  def _about(self, step: int) -> tuple[dict[str, Any], dict[str, int]]:
    """What is said of a checkpoint, and the checksums by item; none if it is older than those."""
    # Orbax takes metadata that it can't read for empty ones, and reads those of all arrays too.
    said = json.loads((self._folder / str(step) / '_CHECKPOINT_METADATA').read_text())['custom_metadata']
    if said.keys() <= UNCHECKED:
      return said, {}
    about, sums = said.get('about', {}), said.get('checksums', {})
    if _checksum_of_json(about) != sums.get('about'):
      raise ValueError('_CHECKPOINT_METADATA is not what was saved')
    return about, sums

  def _as_saved(self, step: int, tree: Any, former: Any) -> Any:
    """Return `tree` with the parameters, and with the names of parameters, that the checkpoint holds.

    Args:
      step: of the checkpoint.
      tree: with today's parameters.
      former: the same with the parameters that are gone; None if none are.
    """
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
      held = handler.metadata((self._folder / str(step) / 'params').absolute()).tree
    paths = flatten_dict(held, sep='/').keys()
    return renamed(former if former is not None and GONE.keys() & paths else tree, old_names(paths))

  def restore_newest(self, state: TrainState, former: TrainState | None = None) -> Restored:
    """Restore the newest checkpoint that all can read; newer ones are set aside as <step>.damaged.

    Args:
      state: arrays or shapes, placed as what is restored.
      former: the state with the parameters that are gone, likewise; None if none are. They are read and dropped.

    Raises:
      UserError: none can be read; then all stay where they are.
    """
    steps = processes.on_first_process(lambda: self._steps()[::-1])
    reasons: dict[int, str] = {}
    for step in steps:
      reason = ''
      try:
        with _leaving_no_reads(), _raising_refusals(self._folder / str(step)):
          about, sums, items = self._read(step, self._as_saved(step, _items(state), former and _items(former)))
      except Exception as error:  # Orbax, TensorStore and JSON raise whatever they like
        if _is_the_machines(error):
          raise
        reason = _first_line(error)
      # All must have read it before they add up their checksums together.
      if not (reason := max(processes.exchange(reason)) or _wrong(items, sums)):
        return Restored(step, _part(_state(renamed(items, RENAMED)), state), about, self._set_aside(reasons))
      reasons[step] = reason
    raise UserError(
      f'no checkpoint in {self._folder} can be read ({reasons[steps[0]]}): '
      'if they are damaged, remove the folder to begin anew, or choose another --workdir'
    )

  def _set_aside(self, steps: Iterable[int]) -> dict[int, pathlib.Path]:
    """Renames checkpoints, for all processes; returns where they are."""
    moved = processes.on_first_process(lambda: [(step, str(_renamed(self._folder / str(step)))) for step in steps])
    if moved:
      self.close()
      self._open()  # Orbax's own reload reads the metadata of all
    return {step: pathlib.Path(path) for step, path in moved}

  def restore_params(self, step: int, params: Any, former: Any = None, *, average: bool = False) -> Any:
    """Restore the parameters alone, or their average; saved on any devices, restored on these.

    Args:
      step: of the checkpoint.
      params: arrays or shapes, placed as what is restored.
      former: with the parameters that are gone, as for `restore_newest`.
      average: whether to restore the average.

    Raises:
      UserError: they can't be read, or there is no average.
    """
    item = 'average' if average else 'params'
    if average and not (self._folder / str(step) / item).exists():
      raise UserError(
        f'checkpoint {step} in {self._folder} has no average of the parameters (train.average was 0): '
        'evaluate the parameters themselves, or train with --config.train.average=0.999'
      )
    try:
      _, sums, read = self._read(step, {item: self._as_saved(step, params, former)})
      if reason := _wrong(read, sums):
        raise ValueError(reason)
      return _part(renamed(read[item], RENAMED), params)
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


def _manager(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
  # Lightweight, or one checkpoint whose metadata are damaged would keep all from being opened.
  made = ocp.CheckpointManagerOptions(**options, lightweight_initialize=True)
  return ocp.CheckpointManager(folder.absolute(), options=made, item_names=ITEMS)


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
class _Ranking:
  """Which checkpoint is the best, by a figure and its values by step."""

  score: Score | None
  scores: dict[int, float]

  def best(self, steps: Iterable[int]) -> int | None:
    """The best of the steps that have a figure, of equal ones the first; None if none has one."""
    ranked = sorted(step for step in steps if step in self.scores)
    if not ranked or self.score is None:
      return None
    value = self.score.better(self.scores[step] for step in ranked)
    return next(step for step in ranked if self.scores[step] == value)

  def __str__(self) -> str:
    return f'a validation {self.score.name if self.score else "score"}'


@dataclasses.dataclass(frozen=True)
class _Best:
  """Has Orbax keep the best checkpoint; Orbax's own policy knows the figures of the moment of saving only."""

  ranking: _Ranking

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    best = self.ranking.best(checkpoint.step for checkpoint in checkpoints)
    return [checkpoint.step == best for checkpoint in checkpoints]


@contextlib.contextmanager
def _leaving_no_reads() -> Iterator[None]:
  """Keeps from the console what is left of a checkpoint that can't be read: reads that nobody waits for any more."""
  hook, log = sys.unraisablehook, logging.getLogger('asyncio')
  sys.unraisablehook, log.disabled = lambda _: None, True
  try:
    yield
  except Exception as error:
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    raise
  finally:
    sys.unraisablehook, log.disabled = hook, False


def _is_the_machines(error: Exception) -> bool:
  """Return whether memory, permission or a disk that answers is missing: the checkpoint may be sound."""
  wants_memory = isinstance(error, MemoryError | jax.errors.JaxRuntimeError)
  not_there = (None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)  # or another kind of thing is in its place
  return wants_memory or (isinstance(error, OSError) and error.errno not in not_there) or reason_of(error) is not None


@contextlib.contextmanager
def _raising_refusals(folder: pathlib.Path) -> Iterator[None]:
  """Raise the system's refusal to read a checkpoint. Orbax takes some files that it may not read for missing ones."""
  try:
    yield
  except Exception as error:
    if not _is_the_machines(error):
      _check_readable(folder)
    raise


def _check_readable(folder: pathlib.Path) -> None:
  """Read every byte of a checkpoint; raise OSError if the system refuses one."""
  folders = [folder]
  while folders:
    path = folders.pop()
    try:
      if path.is_dir():
        folders += path.iterdir()
      else:
        with open(path, 'rb') as file:
          while file.read(2**24):
            pass
    except OSError as error:
      if _is_the_machines(error):
        raise


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [''])[0][:150] or type(error).__name__


def _items(state: TrainState) -> dict[str, Any]:
  """What of a state goes where; without an average there is no such item."""
  training = {'step': state.step, 'opt_state': state.opt_state, 'totals': state.totals}
  items = {'params': state.params, 'training': training, 'average': state.average}
  return {name: item for name, item in items.items() if item is not None}


def _checksum_of_json(value: Mapping[str, Any]) -> int:
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _state(items: Mapping[str, Any]) -> TrainState:
  return TrainState(params=items['params'], average=items.get('average'), **items['training'])


def _part(found: Any, tree: Any) -> Any:
  """Return those leaves of `found` whose paths `tree` has, as that tree."""
  leaves = dict(jax.tree_util.tree_leaves_with_path(found))
  return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], tree)


def _wrong(items: Mapping[str, Any], sums: Mapping[str, int]) -> str:
  """What of items isn't what was saved, in words; '' if all is, or nothing is known. All processes ask together."""
  wrong = [name for name, item in items.items() if sums and checksum(item) != sums.get(name)]
  return f'the bytes of {" and ".join(wrong)} are not those that were saved' if wrong else ''


def _abstract(tree: Any) -> Any:
  return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=z.sharding), tree)
