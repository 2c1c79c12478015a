"""Checkpoints with Orbax: asynchronous, atomic, the latest ones and the best."""

import contextlib
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from hbf.errors import UserError
from hbf.training.state import TrainState


class Checkpoints:
  """The folder `checkpoints/` of a run: <step>/params and <step>/training.

  Parameters are an item of their own, so that evaluation reads nothing else.
  """

  def __init__(self, folder: pathlib.Path, keep: int = 1, read_only: bool = False):
    """Opens the folder.

    Args:
      folder: made if it is missing, unless read_only.
      keep: how many of the latest checkpoints stay; the best by validation accuracy stays too.
      read_only: never write or delete.
    """
    best = BestN(get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False)
    options = ocp.CheckpointManagerOptions(
      # Orbax writes metrics only if there is a best_fn. With max_to_keep it would throw away the newest checkpoint,
      # so what stays is said by the policy.
      best_fn=_accuracy,
      preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
      create=not read_only,
      read_only=read_only,
    )
    self._folder = folder
    self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=('params', 'training'))

  def save(self, step: int, state: TrainState, validation: dict[str, Any] | None) -> None:
    """Starts to write the state; returns when its arrays may change. `validation` ranks it among the best."""
    if step in self._manager.all_steps():
      return
    items = ocp.args.Composite(
      params=ocp.args.StandardSave(state.params), training=ocp.args.StandardSave(_without_params(state))
    )
    metrics = {'accuracy': validation['accuracy']} if validation else None
    self._manager.save(step, args=items, metrics=metrics, force=True)

  @property
  def latest(self) -> int | None:
    """The newest complete checkpoint's step."""
    return self._manager.latest_step()

  def find(self, which: str) -> int:
    """The step of checkpoint 'latest', 'best' (validation accuracy) or a number.

    Raises:
      UserError: there is no such checkpoint; the message names those that exist.
    """
    steps = sorted(self._manager.all_steps())
    if not steps:
      raise UserError(f'no checkpoint in {self._folder}: train first')
    if which == 'latest':
      return steps[-1]
    if which == 'best':
      ranked = [(_accuracy(metrics), step) for step in steps if (metrics := self._manager.metrics(step))]
      if not ranked:
        raise UserError('no checkpoint has a validation accuracy (data.validation was 0): use --checkpoint=latest')
      return max(ranked)[1]
    if which.isdigit() and int(which) in steps:
      return int(which)
    known = ', '.join(map(str, steps))
    raise UserError(f'no checkpoint {which!r} in {self._folder}: use latest, best or one of {known}')

  def restore(self, step: int, state: TrainState) -> TrainState:
    """The state at a step, placed like `state` (arrays, or shapes with shardings)."""
    items = ocp.args.Composite(
      params=ocp.args.StandardRestore(_abstract(state.params)),
      training=ocp.args.StandardRestore(_abstract(_without_params(state))),
    )
    restored = self._manager.restore(step, args=items)
    return TrainState(params=restored['params'], **restored['training'])

  def restore_params(self, step: int, params: Any) -> Any:
    """The parameters alone, placed like `params`; saved on any devices, restored on these."""
    items = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
    return self._manager.restore(step, args=items)['params']

  def close(self) -> None:
    """Waits until everything is written."""
    self._manager.wait_until_finished()
    self._manager.close()


def has_checkpoint(folder: pathlib.Path) -> bool:
  """Whether a complete checkpoint lies in the folder, which needn't be there."""
  if not folder.is_dir():
    return False
  with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
    return checkpoints.latest is not None


def _accuracy(metrics: dict[str, float]) -> float:
  return metrics['accuracy']


def _without_params(state: TrainState) -> dict[str, Any]:
  return {'step': state.step, 'opt_state': state.opt_state, 'totals': state.totals}


def _abstract(tree: Any) -> Any:
  return jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=z.sharding), tree)
