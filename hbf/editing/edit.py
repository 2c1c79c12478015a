"""The editor of a classifier: it corrects the answer for one image by adding one center."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hbf.data.augment.transforms import read_transforms
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.editing.guard import Reader, distance_to_others, measure_metric
from hbf.errors import UserError, choose
from hbf.tasks.classification import Classification
from hbf.tasks.registry import make_task
from hbf.training.edits import Edit, Edits
from hbf.training.edits_file import check_checkpoint, read_edits, write_edits
from hbf.training.experiment import make_splits
from hbf.training.learned import FILE as LEARNED
from hbf.training.predict import read_image
from hbf.training.restore import check_on_images, restore, stored_dataset
from hbf.training.workdir import check_data, locked

REACH, MARGIN = 1.0, 16.0  # docs/research/edit.md has the trials that chose them
GUARDED = 20_000  # the largest number of training images whose answers should stay


class Editor:
  """A classifier to edit, and the images whose answers should not change. These are the guarded images.

  The center of an edit is the point p(x) of the edited image (`hbf.models.edited.EditedClassifier`). The edit acts in
  a ball around this center. The radius of the ball is `reach` times a distance: from the center to the nearest
  guarded image whose answer is not the new label. Centers of earlier edits with another label count as such images.
  With a reach of at most 1 the ball contains none of these images, so their logits do not change. The edit raises one
  logit of the edited image: the new label's logit becomes the largest, by `margin`.

  Attributes:
    reader: the classifier without edits, as a function of images.
    classes: the names of the classes.
    guard: the logits and the points of the guarded images.
    edits: the edits made so far.
  """

  def __init__(self, reader: Reader, classes: Sequence[str], among: np.ndarray, edits: Edits) -> None:
    """Compute the logits and the points of the guarded images, `among`, uint8 [n, H, W, C]."""
    self.reader, self.classes, self.edits = reader, tuple(classes), edits
    self.guard = reader(among)

  def edit(
    self,
    images: np.ndarray,
    labels: Sequence[str | int],
    sources: Sequence[str],
    reach: float = REACH,
    margin: float = MARGIN,
  ) -> None:
    """Add an edit for each image, unless the edit of an earlier image in `images` already corrects it.

    Args:
      images: the images to correct, uint8 [n, H, W, C].
      labels: name or number of the right class of each image, [n].
      sources: the names of the images [n], for the list of edits and for messages.
      reach: radius of the ball, divided by the distance to the nearest guarded image with another answer.
      margin: difference between the label's logit and the largest other logit, after the edit.

    Raises:
      UserError: a class is unknown, or the classifier already answers it. Or an earlier edit gives the same image
        another class. Or no guarded image has another answer. Then no edit is made.
    """
    if not (0 < reach < np.inf and 0 < margin < np.inf):
      raise UserError(f'reach is {reach} and margin {margin}: expected numbers above 0')
    numbers = [self._number(label) for label in labels]
    logits, points, _ = self.reader(images)
    answers, edits = self._answers(logits, points, self.edits), self.edits
    for answer, number, source in zip(answers, numbers, sources, strict=True):
      if answer == number:
        raise UserError(f'{source} is answered {self.classes[number]} already: there is nothing to edit')
    for z, point, answer, number, source in zip(logits, points, answers, numbers, sources, strict=True):
      if edits is not self.edits and self._answers(z[None], point[None], edits)[0] == number:
        continue
      radius = reach * self._distance(point, number, edits, source)
      change = np.zeros_like(z)
      change[number] = np.delete(z, number).max() - z[number] + margin
      edits = edits.added(Edit(source, self.classes[answer], self.classes[number], point, radius, change))
    self.edits = edits

  def _answers(self, logits: np.ndarray, points: np.ndarray, edits: Edits) -> np.ndarray:
    """Return the answers of the edited classifier, int [n]."""
    return np.asarray((logits + edits.changes(points)).argmax(axis=-1))

  def _number(self, label: str | int) -> int:
    """Return the number of a class."""
    if isinstance(label, str):
      choose('label', label, dict.fromkeys(self.classes))
      return self.classes.index(label)
    if not 0 <= label < len(self.classes):
      raise UserError(f'label is {label}: expected 0 to {len(self.classes) - 1}, or the name of a class')
    return int(label)

  def _distance(self, point: np.ndarray, label: int, edits: Edits, source: str) -> float:
    """Return the distance from a point to the nearest guarded image or earlier edit with another class than `label`.

    Raises:
      UserError: an earlier edit with another class has its center at this point. Or no guarded image and no edit has
        another class.
    """
    metric = edits.metric
    to_edits = np.inf
    for number, edit in enumerate(edits.edits):
      if edit.label != self.classes[label]:
        away = float(np.linalg.norm(metric @ (edit.center - point)))
        if away < 1e-3 * edit.radius:
          raise UserError(
            f'{source} is the image of edit {number}, which answers {edit.label}: undo that edit first, '
            f'`hbf edit --undo={number}`'
          )
        to_edits = min(to_edits, away)
    distance = min(distance_to_others(self.guard, point, label, metric), to_edits)
    if not np.isfinite(distance):
      raise UserError(
        f'all images whose answers should stay are answered {self.classes[label]}: give some of other classes'
      )
    return distance

  @property
  def changed(self) -> np.ndarray:
    """True for each guarded image whose answer the edits change, bool [n]."""
    return self._answers(self.guard.logits, self.guard.points, self.edits) != self.guard.logits.argmax(axis=-1)


def guarded_images(workdir: pathlib.Path, config: Any, **moved: str) -> np.ndarray:
  """Return at most `GUARDED` training images of a run, uint8 [n, H, W, C]. See `labeled_images`."""
  return labeled_images(workdir, config, **moved)[0]


def labeled_images(workdir: pathlib.Path, config: Any, **moved: str) -> tuple[np.ndarray, np.ndarray]:
  """Return at most `GUARDED` training images of a run, evenly spaced, and their classes.

  Args:
    workdir: the run folder.
    config: the config of the run.
    **moved: new values of the config keys data.dir and data.root, if the data have moved since training. '' keeps the
      value of the run.

  Raises:
    UserError: the data set is missing, or differs from the run's.

  Returns:
    The images, uint8 [n, H, W, C], and the classes, int32 [n].
  """
  config = config.copy_and_resolve_references()
  config.data.update({key: value for key, value in moved.items() if value})
  task = make_task(config)
  assert isinstance(task, Classification)
  check_data(workdir, task.identity())
  return training_images(task, config.data.validation)


def training_images(task: Classification, validation: float) -> tuple[np.ndarray, np.ndarray]:
  """Return at most `GUARDED` training images, evenly spaced, uint8 [n, H, W, C], and their classes, int32 [n].

  Args:
    task: the task of a run.
    validation: the fraction of the training images that the run holds out. Held-out images are not returned.
  """
  source = make_splits(task, validation)['train']
  return read_many(source, evenly_spaced(len(source), GUARDED), task.shape)


def no_edits(reader: Reader, config: Any, step: int, average: bool, among: np.ndarray) -> Edits:
  """Return an `Edits` object that has no edit yet. Its metric is measured on copies of the images `among`."""
  metric = measure_metric(reader, among, read_transforms(config.data.transforms))
  return Edits(step, average, metric)


class Made(NamedTuple):
  """The numbers that `edit_files` returns.

  Attributes:
    guarded: the number of guarded images.
    changed: the increase in the number of guarded images with a changed answer.
  """

  guarded: int
  changed: int


def edit_files(
  workdir: pathlib.Path,
  paths: Sequence[str],
  label: str,
  reach: float = REACH,
  margin: float = MARGIN,
  checkpoint: str = 'latest',
  average: bool = False,
  **moved: str,
) -> Made:
  """Edit the answers of a run for images in files, and write the edits into the run folder.

  Args:
    workdir: the run folder.
    paths: paths of images of any size. They are resized as in training.
    label: the name of the right class of all these images.
    reach: see `Editor`.
    margin: see `Editor`.
    checkpoint: 'latest', 'best' or a step.
    average: True to edit the moving average of the parameters.
    **moved: see `guarded_images`.

  Raises:
    UserError: the run is not on images, is in use, or has edits of another checkpoint. Or its data are missing. Or an
      image can't be read. Or `Editor.edit` raises UserError. Nothing is written in these cases.
  """
  check_on_images(workdir)
  dataset = stored_dataset(workdir)
  with locked(workdir):
    if (workdir / LEARNED).exists():
      raise UserError(f'{workdir} has learned classes, which edits can not join yet: forget them by `hbf learn`')
    restored = restore(workdir, checkpoint, jax.devices()[:1], average, dataset)
    edits = read_edits(workdir)
    if edits is not None:
      check_checkpoint(workdir, edits, restored.step, average)
    images = []
    for path in paths:
      image = read_image(path, dataset.image_shape)
      if isinstance(image, UserError):
        raise image
      images.append(image)
    among = guarded_images(workdir, restored.config, **moved)
    reader = Reader.of(restored.model, restored.params, restored.task)
    if edits is None:
      edits = no_edits(reader, restored.config, restored.step, average, among)
    editor = Editor(reader, dataset.class_names, among, edits)
    before = editor.changed.sum()
    editor.edit(np.stack(images), [label] * len(paths), paths, reach, margin)
    write_edits(workdir, editor.edits)
    return Made(len(among), int(editor.changed.sum() - before))
