"""Learned classes: classes that are added to a trained classifier without training.

Each class has one center in the space of features. The features of an image are the F numbers that the network's head
gets for it. `hbf.models.extended.ExtendedClassifier` has the equations, and `hbf.editing.learn` computes the centers.
The classes of the trained head are called trained classes. They get centers too.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np

from hbf.errors import UserError, choose, warn
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.extended import LEARNED, ExtendedClassifier
from hbf.training import side_file
from hbf.training.workdir import check_kinds, load_config, locked

FILE, VERSION = side_file.LEARNED, 1
_CURE = 'restore it from a copy, or remove it; the run then has no learned classes'


@dataclasses.dataclass(frozen=True, eq=False)
class LearnedClass:
  """One learned class.

  Attributes:
    name: the name of the class.
    sources: the names of the images from which it was learned, such as their paths.
    center: the mean of these images' features, the inputs of the network's head, float32 [F].
  """

  name: str
  sources: tuple[str, ...]
  center: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
  """The learned classes of a classifier, in the order in which they were learned.

  Attributes:
    step: the step of the checkpoint to which the classes were added.
    average: True if they were added to the moving average of the parameters.
    metric: the matrix W, float32 [F, F]. The distance of features f from a center t is ‖W(f − t)‖.
    trained: the centers of the B classes of the network's own head, float32 [B, F].
    classes: the learned classes.
  """

  step: int
  average: bool
  metric: np.ndarray
  trained: np.ndarray
  classes: tuple[LearnedClass, ...] = ()

  def __repr__(self) -> str:
    """Return a text with the checkpoint's step and the names of the classes."""
    return f'Learned(step={self.step}, {", ".join(self.names) or "no class"})'

  def __len__(self) -> int:
    """Return the number of learned classes."""
    return len(self.classes)

  @property
  def names(self) -> tuple[str, ...]:
    """Return the names of the learned classes."""
    return tuple(each.name for each in self.classes)

  def without(self, name: str) -> 'Learned':
    """Return the learned classes without the class of this name.

    Raises:
      UserError: there is no learned class of this name.
    """
    choose('learned class', name, dict.fromkeys(self.names))
    return dataclasses.replace(self, classes=tuple(each for each in self.classes if each.name != name))

  @property
  def params(self) -> dict[str, np.ndarray]:
    """Return the parameters of `hbf.models.extended.LearnedClasses`. There must be at least one class."""
    centers = np.stack([each.center for each in self.classes])
    arrays = {'trained_centers': self.trained, 'centers': centers, 'metric': self.metric}
    return {name: value.astype(np.float32) for name, value in arrays.items()}

  def applied(self, model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the classifier with the learned classes, and its parameters. Without classes, return the arguments."""
    if not self.classes:
      return model, dict(params)
    assert isinstance(model, ImageClassifier)
    return ExtendedClassifier(unrolled(model), len(self)), {**params, LEARNED: self.params}


def unextended(model: nn.Module, params: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
  """Return a classifier and its parameters without its learned classes, if it has any."""
  own = {name: value for name, value in params.items() if name != LEARNED}
  return (model.classifier if isinstance(model, ExtendedClassifier) else model), own


def write_learned(workdir: pathlib.Path, learned: Learned | None) -> None:
  """Write or replace the file learned.npz of a run atomically. If there are no classes, remove the file.

  Raises:
    UserError: the file can't be written, or the run has edits.
  """
  path = workdir / FILE
  if not learned:
    path.unlink(missing_ok=True)
    return
  side_file.check_alone(path)
  classes = [{'name': each.name, 'sources': each.sources} for each in learned.classes]
  about = {'version': VERSION, 'step': learned.step, 'average': learned.average, 'classes': classes}
  side_file.write_arrays(path, about, learned.params, _read)


def read_learned(workdir: pathlib.Path) -> Learned | None:
  """Return the learned classes of a run. None if the run has none.

  Raises:
    UserError: the folder is not a run folder, or the file is damaged.
  """
  load_config(workdir)  # raises if it is no run folder
  path = workdir / FILE
  return _read(path) if path.exists() else None


def _read(path: pathlib.Path) -> Learned:
  with side_file.read_arrays(path, _CURE, 'version', 'step', 'average', 'classes') as (about, arrays):
    side_file.check_shapes(arrays, trained_centers='bf', centers='nf', metric='ff')
    side_file.check_of_checkpoint(about, path, _CURE)
    for said in about['classes']:
      check_kinds(said, path, _CURE, name=str, sources=list)
      if not said['sources'] or not all(isinstance(source, str) for source in said['sources']):
        raise ValueError(f'the sources of {said["name"]} are not names of images')
    parts = zip(about['classes'], arrays['centers'], strict=True)
    classes = tuple(LearnedClass(said['name'], tuple(said['sources']), center) for said, center in parts)
    return Learned(about['step'], about['average'], arrays['metric'], arrays['trained_centers'], classes)


def forget(workdir: pathlib.Path, name: str) -> None:
  """Remove a learned class of a run.

  Raises:
    UserError: the run has no such learned class, or another process uses the folder.
  """
  load_config(workdir)  # raises if it is no run folder, and `locked` would make one
  with locked(workdir):
    learned = read_learned(workdir)
    if learned is None:
      raise UserError(f'{workdir} has no learned classes: there is nothing to forget')
    write_learned(workdir, learned.without(name))


def learned_of(workdir: pathlib.Path, step: int, average: bool) -> Learned:
  """Return the learned classes of a run, after a check that they belong to the checkpoint of this step.

  Args:
    workdir: the run folder.
    step: the step of the checkpoint.
    average: True if the classes must belong to the moving average of the parameters.

  Raises:
    UserError: the run has no learned classes, or `step` or `average` differs from that of the classes.
  """
  learned = learned_if_any(workdir, step, average)
  if learned is None:
    raise UserError(f'{workdir} has no learned classes: add some by `hbf learn`, or leave them out')
  return learned


def learned_if_any(workdir: pathlib.Path, step: int, average: bool) -> Learned | None:
  """Return what `learned_of` returns, or None if the run has no learned classes.

  Raises:
    UserError: `step` or `average` differs from that of the learned classes.
  """
  learned = read_learned(workdir)
  if learned is not None:
    side_file.check_checkpoint('learned classes', learned, step, average, workdir=workdir, remedy='forget')
  return learned


def refuse_learned(workdir: pathlib.Path, what: str) -> None:
  """Raise UserError if a run has any learned classes. The message says not to use flag `what` with them."""
  if (workdir / FILE).exists():
    raise UserError(f'{workdir} has learned classes, and {what} is for the trained ones: give --nolearned too')


def warn_of_learned(workdir: pathlib.Path) -> None:
  """Warn that the command leaves out the learned classes of a run, if the run has any."""
  if (workdir / FILE).exists():
    warn(f'{workdir} has learned classes, which are left out: only `hbf predict` answers them')


def to_rows(learned: Learned) -> list[tuple[str, ...]]:
  """Return a table row for each class: its name, the number of its images and the first image."""
  return [(each.name, str(len(each.sources)), each.sources[0]) for each in learned.classes]
