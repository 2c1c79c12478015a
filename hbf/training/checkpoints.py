"""Checkpoints by Orbax: asynchronous and atomic. The latest ones and the best one are kept.

Checkpoints of older code may have parameters that the network has no longer (`hbf.training.schema.GONE`).
"""

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import logging
import math
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

from hbf.errors import UserError, first_line
from hbf.evaluation.scores import Score
from hbf.training import processes
from hbf.training.checksum import checksum
from hbf.training.schema import GONE, RENAMED, old_names, renamed
from hbf.training.state import TrainState
from hbf.training.workdir import reason_of

ITEMS = ('params', 'training', 'average')  # the parts of a checkpoint
UNCHECKED = {'seconds', 'steps'}  # the metadata keys of a checkpoint of older code, which has no checksums


class RestoredState(NamedTuple):
  """A restored training state.

  Attributes:
    step: the step of the checkpoint.
    state: the state at that step.
    about: the metadata that were saved with the state.
    damaged: the new path of each newer checkpoint, by step. None of these could be read, so they were renamed.
  """

  step: int
  state: TrainState
  about: Mapping[str, Any]
  damaged: Mapping[int, pathlib.Path]


class Checkpoints:
  """The folder `checkpoints/` of a run. Each checkpoint is a folder <step> with two or three items.

  The item `params` has the parameters, `average` their average if the run keeps one, and `training` the rest of the
  state. So an evaluation reads only one item. Orbax's format has no checksums of the arrays. This class adds a
  checksum of each item to the metadata.

  In a run of several processes, all must open, save and close together, and compute checksums together. But each
  process reads a checkpoint without waiting for the others.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep: int = 1,
    ranks: Score | None = None,
    scores: Mapping[int, float] | None = None,
    read_only: bool = False,
  ):
    """Open the folder.

    Args:
      folder: the folder. A missing one is made, unless read_only.
      keep: the number of latest checkpoints that stay. The best one stays too.
      ranks: the score that decides which checkpoint is the best. None: no checkpoint is the best.
      scores: values of the score `ranks` on the validation split, by step. Some of these steps may have no
        checkpoint, and some checkpoints may have no value.
      read_only: True if nothing may be written or deleted.
    """
    self._ranking = _Ranking(ranks, dict(scores or {}))
    self._folder = folder
    # With max_to_keep and a best_fn Orbax would throw away the newest checkpoint.
    self._policy = None if read_only else AnyPreservationPolicy([LatestN(keep), _Best(self._ranking)])
    self._open()

  def _open(self) -> None:
    try:
      self._reader = self._manager = _manager(self._folder, read_only=True, multiprocessing_options=_alone())
      if self._policy:  # unfinished checkpoints of a killed run are removed
        self._manager = _manager(self._folder, preservation_policy=self._policy, cleanup_tmp_directories=True)
    except PermissionError as error:
      raise UserError(f'{self._folder} cannot be used (permission denied): see who may read and write it') from error

  def score(self, step: int, value: float) -> bool:
    """Record the score of a step. Return True if it beats every checkpoint's score, so the caller should save one."""
    assert self._ranking.score is not None, 'the checkpoints were opened without `ranks`'
    self._ranking.scores[step] = value
    return self._ranking.best([*self._manager.all_steps(), step]) == step

  def scored(self, step: int) -> bool:
    """Return True if the score of a step is known."""
    return step in self._ranking.scores

  def scores_until(self, step: int) -> list[float]:
    """Return the scores of all evaluations up to a step, in order."""
    return [value for other, value in sorted(self._ranking.scores.items()) if other <= step]

  def evaluations_since_best(self, step: int) -> int:
    """Return how many evaluations followed the best one, among the evaluations up to `step`.

    If several scores are equal, the first one is the best.
    """
    steps = [other for other in self._ranking.scores if other <= step]
    best = self._ranking.best(steps)
    return 0 if best is None else sum(other > best for other in steps)

  def save(self, step: int, state: TrainState, about: Mapping[str, Any] | None = None) -> None:
    """Start to write the state, and the metadata `about` as JSON. After the return the state may be donated.

    If the step has a checkpoint already, do nothing.
    """
    if step in self._manager.all_steps():
      return
    self._save(step, _items(state), dict(about or {}))

  def save_params(self, step: int, params: Any) -> None:
    """Save only the parameters of a state. The checkpoint can be evaluated, but no run can continue from it."""
    self._save(step, {'params': params}, {})

  def _save(self, step: int, items: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    sums = {'about': _checksum_of_json(about)} | {name: checksum(item) for name, item in items.items()}
    args = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()})
    self._manager.save(step, args=args, custom_metadata={'about': about, 'checksums': sums}, force=True)

  @property
  def latest(self) -> int | None:
    """The step of the newest checkpoint, found without reading its files. None if there is no checkpoint."""
    return max(self._steps(), default=None)

  def _steps(self) -> list[int]:
    """Return the steps of all checkpoints, sorted."""
    # A file in place of a checkpoint's folder counts too. Orbax would ignore it, and hide the damage.
    return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal())

  def find(self, which: str) -> int:
    """Return the step of the checkpoint `which`: 'latest', 'best' (by the validation split) or a step as text.

    Raises:
      UserError: there is no such checkpoint. The message names the existing ones.
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
    """Load items of a checkpoint. Return its metadata, the saved checksums of all its items, and the loaded items.

    The checksums and the items are dicts by the name of the item. The caller must compare the saved checksums with
    those of the loaded items.

    Args:
      step: the step of the checkpoint.
      items: the items to load, by name: trees of arrays or shapes, with the shardings that the loaded arrays get.
    """
    about, sums = self._about(step)
    args = {name: ocp.args.StandardRestore(_abstract(item)) for name, item in items.items()}
    return about, sums, dict(self._reader.restore(step, args=ocp.args.Composite(**args)).items())

  def _about(self, step: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the metadata of a checkpoint, and its items' checksums by name, which an old checkpoint lacks."""
    # Orbax returns empty metadata for a file that it can't read, and also reads the metadata of all arrays.
    saved = json.loads((self._folder / str(step) / '_CHECKPOINT_METADATA').read_text())['custom_metadata']
    if saved.keys() <= UNCHECKED:
      return saved, {}
    about, sums = saved.get('about', {}), saved.get('checksums', {})
    if _checksum_of_json(about) != sums.get('about'):
      raise ValueError('_CHECKPOINT_METADATA is not what was saved')
    return about, sums

  def _as_saved(self, step: int, tree: Any, former: Any) -> Any:
    """Return `tree` with the names that its parameters have in a checkpoint. Orbax can restore only these names.

    In a checkpoint of older code, some parameters may have other names. If the checkpoint has parameters that the
    network has no longer, return `former` with the names in the checkpoint.

    Args:
      step: the step of the checkpoint.
      tree: a tree that contains the network's parameters.
      former: like `tree`, but also with the parameters that only older code had. None if it had no others.
    """
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
      held = handler.metadata((self._folder / str(step) / 'params').absolute()).tree
    paths = flatten_dict(held, sep='/').keys()
    return renamed(former if former is not None and GONE.keys() & paths else tree, old_names(paths))

  def restore_newest(self, state: TrainState, former: TrainState | None = None) -> RestoredState:
    """Restore the newest checkpoint that all processes can read. Rename the newer ones to <step>.damaged.

    Args:
      state: arrays or shapes, with the shardings that the restored state gets.
      former: like `state`, but also with the parameters that only older code had. If the checkpoint has these, they
        are loaded and dropped. None if older code had no others.

    Raises:
      UserError: no checkpoint can be read. Then nothing is renamed.
    """
    steps = processes.on_first_process(lambda: self._steps()[::-1])
    reasons: dict[int, str] = {}
    for step in steps:
      reason = ''
      try:
        with _ending_reads(), _raising_refusals(self._folder / str(step)):
          about, sums, items = self._read(step, self._as_saved(step, _items(state), former and _items(former)))
      except Exception as error:  # Orbax, TensorStore and JSON raise errors of many types
        if _is_system_error(error):
          raise
        reason = first_line(error)
      # All processes must have read the checkpoint before they compute checksums together.
      if not (reason := max(processes.exchange(reason)) or _describe_changed(items, sums)):
        return RestoredState(step, _select(_state(renamed(items, RENAMED)), state), about, self._set_aside(reasons))
      reasons[step] = reason
    raise UserError(
      f'no checkpoint in {self._folder} can be read ({reasons[steps[0]]}): '
      'if they are damaged, remove the folder to begin anew, or choose another --workdir'
    )

  def _set_aside(self, steps: Iterable[int]) -> dict[int, pathlib.Path]:
    """Rename the damaged checkpoints of these steps. Return their new paths by step. All processes must call this."""
    moved = processes.on_first_process(
      lambda: [(step, str(_rename_damaged(self._folder / str(step)))) for step in steps]
    )
    if moved:
      self.close()
      self._open()  # Orbax's own reload reads the metadata of all checkpoints
    return {step: pathlib.Path(path) for step, path in moved}

  def restore_params(self, step: int, params: Any, former: Any = None, *, average: bool = False) -> Any:
    """Restore only the parameters, or only their average. They may have been saved on other devices.

    Args:
      step: the step of the checkpoint.
      params: arrays or shapes, with the shardings that the restored parameters get.
      former: like `params`, but also with the parameters that only older code had; see `restore_newest`.
      average: True to restore the average.

    Raises:
      UserError: the checkpoint can't be read, or has no average.
    """
    item = 'average' if average else 'params'
    if average and step in self._steps() and not (self._folder / str(step) / item).exists():
      raise UserError(
        f'checkpoint {step} in {self._folder} has no average of the parameters (train.average was 0): '
        'evaluate the parameters themselves, or train with --config.train.average=0.999'
      )
    problem: Exception | None = None
    try:
      with _ending_reads():
        _, sums, read = self._read(step, {item: self._as_saved(step, params, former)})
      found = _select(renamed(read[item], RENAMED), params)
    except Exception as error:
      problem = error
    reason = first_line(problem) if problem else ''
    # Processes that share arrays must all have read the checkpoint before they compute checksums together.
    reason = max(processes.exchange(reason)) if _in_several_processes(params) else reason
    if not (reason := reason or _describe_changed(read, sums)):
      return found
    steps = self._steps()
    others = ', '.join(str(other) for other in steps if other != step)
    cure = f'use --checkpoint with one of {others}' if others else 'there is no other'
    cure = cure if step in steps else 'the run goes on and has removed it, so give the same command again'
    raise UserError(f'checkpoint {step} in {self._folder} cannot be read ({reason}): {cure}') from problem

  def wait(self) -> None:
    """Wait until the saved checkpoints are complete."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Wait until the saved checkpoints are complete, and close the folder."""
    self._manager.wait_until_finished()
    self._manager.close()
    self._reader.close()


def latest_step(folder: pathlib.Path) -> int | None:
  """Return the step of the newest checkpoint in a folder, which may be missing. None if there is no checkpoint."""
  if not folder.is_dir():
    return None
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    return checkpoints.latest


def _manager(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
  # Lightweight: otherwise the folder could not be opened if the metadata of one checkpoint are damaged.
  made = ocp.CheckpointManagerOptions(**options, lightweight_initialize=True)
  return ocp.CheckpointManager(folder.absolute(), options=made, item_names=ITEMS)


def _in_several_processes(tree: Any) -> bool:
  """Return True if arrays of a tree, or the arrays that its shapes describe, lie on devices of several processes."""
  shardings = [getattr(leaf, 'sharding', None) for leaf in jax.tree.leaves(tree)]
  return any(sharding is not None and not sharding.is_fully_addressable for sharding in shardings)


def _alone() -> ocp.options.MultiprocessingOptions:
  """Return the options with which Orbax reads without waiting for the other processes."""
  # With the default options, all processes would hang if one failed to read.
  own = jax.process_index()
  return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


def _rename_damaged(folder: pathlib.Path) -> pathlib.Path:
  """Rename the folder of a damaged checkpoint, and return the new path."""
  names = itertools.chain([f'{folder.name}.damaged'], (f'{folder.name}.damaged-{n}' for n in itertools.count(2)))
  aside = next(path for path in map(folder.with_name, names) if not path.exists())
  folder.rename(aside)
  return aside


@dataclasses.dataclass(frozen=True)
class _Ranking:
  """The ranking of checkpoints.

  Attributes:
    score: the score that ranks the checkpoints. None: no checkpoint is the best.
    scores: the value of this score for each step.
  """

  score: Score | None
  scores: dict[int, float]

  def best(self, steps: Iterable[int]) -> int | None:
    """Return the step with the best score, the first one if several are equal. None if no step has a score.

    A score that is NaN does not count. The outputs of a network may overflow before its parameters do.
    """
    ranked = sorted(step for step in steps if not math.isnan(self.scores.get(step, math.nan)))
    if not ranked or self.score is None:
      return None
    value = self.score.better(self.scores[step] for step in ranked)
    return next(step for step in ranked if self.scores[step] == value)

  def __str__(self) -> str:
    return f'a validation {self.score.name if self.score else "score"}'


@dataclasses.dataclass(frozen=True)
class _Best:
  """A policy by which Orbax keeps the best checkpoint.

  Orbax's own policy needs a score when a checkpoint is saved. This policy also takes scores that come later.
  """

  ranking: _Ranking

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    del context
    best = self.ranking.best(checkpoint.step for checkpoint in checkpoints)
    return [checkpoint.step == best for checkpoint in checkpoints]


@contextlib.contextmanager
def _ending_reads() -> Iterator[None]:
  """If Orbax fails to read inside the context, end its background reads too, and hide their messages."""
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


def _is_system_error(error: Exception) -> bool:
  """Return True for an error of memory, permissions or the disk. A checkpoint may be intact despite such an error."""
  wants_memory = isinstance(error, MemoryError | jax.errors.JaxRuntimeError)
  missing = (None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)  # the file is missing, or is of another kind
  return wants_memory or (isinstance(error, OSError) and error.errno not in missing) or reason_of(error) is not None


@contextlib.contextmanager
def _raising_refusals(folder: pathlib.Path) -> Iterator[None]:
  """If the context fails, and the system refuses to read a file in `folder`, raise the system's `OSError` instead."""
  try:
    yield
  except Exception as error:
    if not _is_system_error(error):  # Orbax reports some files without read permission as missing
      _check_readable(folder)
    raise


def _check_readable(folder: pathlib.Path) -> None:
  """Read all files of a checkpoint. Raise the `OSError` of the first one that the system refuses to read."""
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
      if _is_system_error(error):
        raise


def _items(state: TrainState) -> dict[str, Any]:
  """Return the items of a state by name (see `Checkpoints`)."""
  training = {'step': state.step, 'opt_state': state.opt_state, 'totals': state.totals}
  training |= {name: part for name in ('skips', 'norms') if (part := getattr(state, name)) is not None}
  items = {'params': state.params, 'training': training, 'average': state.average}
  return {name: item for name, item in items.items() if item is not None}


def _checksum_of_json(value: Mapping[str, Any]) -> int:
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _state(items: Mapping[str, Any]) -> TrainState:
  return TrainState(params=items['params'], average=items.get('average'), **items['training'])


def _select(found: Any, tree: Any) -> Any:
  """Return a tree like `tree`, whose leaves are those of `found` at the same paths."""
  leaves = dict(jax.tree_util.tree_leaves_with_path(found))
  return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], tree)


def _describe_changed(items: Mapping[str, Any], sums: Mapping[str, int]) -> str:
  """Describe in words the items whose checksums differ from the saved ones. All processes must call this together.

  Args:
    items: the items by name.
    sums: the saved checksums by name. {}: the checkpoint has none.

  Returns:
    A text. It is '' if all are equal, or if the checkpoint has no checksums.
  """
  changed = [name for name, item in items.items() if sums and checksum(item) != sums.get(name)]
  return f'the bytes of {" and ".join(changed)} are not those that were saved' if changed else ''


def _abstract(tree: Any) -> Any:
  return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=z.sharding), tree)
