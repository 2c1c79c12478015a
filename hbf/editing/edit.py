"""Edits of a classifier. An edit corrects the answer for one image by adding one center.

The guarded images are images whose answers edits should not change: training images, unless the user gives others.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hbf.data.augment.transforms import read_transforms
from hbf.data.images.sources import labels
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.editing.editor import (
  GUARDED,
  REACH,
  Editor,
  Made,
  check_options,
  check_task,
  edited_answers,
  record,
  task_with_data,
)
from hbf.editing.guard import Reader, measure_metric
from hbf.errors import UserError, choose
from hbf.options import whole
from hbf.tasks.classification import Classification
from hbf.training.edits import Edits
from hbf.training.edits_file import edits_if_any
from hbf.training.experiment import make_splits
from hbf.training.predict import read_image
from hbf.training.restore import restore, stored_dataset
from hbf.training.side_file import EDITS, check_alone
from hbf.training.workdir import locked

FEWEST = 10  # guarded images of a class, if it has them: a learned class needs two of each trained class
MARGIN = 16.0  # docs/research/edit.md has the trials that chose it


class ImageEditor(Editor):
  """The editor of a classifier.

  The center of an edit is the point of the edited image: the mean of its tokens after the first half of the blocks.

  Attributes:
    reader: the classifier without edits, as a function of images.
    classes: the names of the classes.
  """

  kind = 'image'
  overlap = '{source} is the image of edit {number}, which answers {label}'

  def __init__(self, reader: Reader, classes: Sequence[str], among: np.ndarray, edits: Edits) -> None:
    """Compute the logits and the points of the guarded images.

    Args:
      reader: the classifier without edits.
      classes: the names of the classes.
      among: the guarded images, uint8 [n, H, W, C].
      edits: the edits made so far.
    """
    super().__init__(reader(among), edits)
    self.reader, self.classes = reader, tuple(classes)

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
      labels: name or index of the right class of each image, [n].
      sources: the names of the images [n], for the list of edits and for messages.
      reach: radius of the ball in which an edit acts, divided by a distance: from the edited image to the nearest
        guarded image with another answer.
      margin: difference between the right class's logit and the largest other logit, after the edit.

    Raises:
      UserError: a label is unknown, or is already the answer to its image. Or an earlier edit gives the same image
        another class. Or a label is already the answer to all guarded images. In these cases, no edit is
        made.
    """
    numbers = [class_number(label, self.classes) for label in labels]
    seen = self.reader(images)
    answers, edits = edited_answers(seen, self.edits), self.edits
    for answer, number, source in zip(answers, numbers, sources, strict=True):
      if answer == number:
        raise UserError(f'{source} is answered {self.classes[number]} already: there is nothing to edit')
    for row, (answer, number, source) in enumerate(zip(answers, numbers, sources, strict=True)):
      one = seen.at([row])
      if edits is not self.edits and edited_answers(one, edits)[0] == number:
        continue
      names = source, self.classes[answer], self.classes[number]
      edits = self._with_edit(edits, names, one, np.array([number]), reach, margin)
    self.edits = edits


def class_number(label: str | int, classes: Sequence[str]) -> int:
  """Return the index of the class `label`, which is the name or the index of one of `classes`.

  Raises:
    UserError: there is no such class.
  """
  if isinstance(label, str):
    choose('label', label, dict.fromkeys(classes))
    return classes.index(label)
  if label not in whole(0, len(classes) - 1):
    raise UserError(f'label is {label}: expected 0 to {len(classes) - 1}, or the name of a class')
  return int(label)


def guarded_images(workdir: pathlib.Path, config: Any, **moved: str) -> np.ndarray:
  """Return the guarded images of a run, uint8 [n, H, W, C]: the training images that `labeled_images` returns."""
  return labeled_images(workdir, config, **moved)[0]


def labeled_images(workdir: pathlib.Path, config: Any, **moved: str) -> tuple[np.ndarray, np.ndarray]:
  """Return training images of a run, uint8 [n, H, W, C], and their classes, int32 [n]: those of `training_images`.

  Args:
    workdir: the run folder.
    config: the config of the run.
    **moved: see `hbf.editing.editor.task_with_data`.

  Raises:
    UserError: the data set is missing, or differs from the run's.
  """
  task = task_with_data(workdir, config, **moved)
  assert isinstance(task, Classification)
  return training_images(task, config.data.validation)


def training_images(task: Classification, validation: float) -> tuple[np.ndarray, np.ndarray]:
  """Return training images, uint8 [n, H, W, C], and their classes, int32 [n].

  If there are more than `GUARDED` images, only `GUARDED` evenly spaced images are returned, and more of rare classes:
  of each class at least `FEWEST` images, or all that it has.

  Args:
    task: the task of a run.
    validation: the fraction of the training images that the run holds out. Held-out images are not returned.
  """
  source = make_splits(task, validation)['train']
  chosen = evenly_spaced(len(source), GUARDED)
  if len(chosen) < len(source):
    chosen = _with_rare(chosen, labels(source))
  return read_many(source, chosen, task.shape)


def _with_rare(chosen: np.ndarray, classes: np.ndarray) -> np.ndarray:
  """Return the indices of chosen images, and of more images of the classes with fewer than `FEWEST` of them.

  Args:
    chosen: indices of images, int [n].
    classes: the class of every image, int [N].
  """
  counts = np.bincount(classes[chosen], minlength=classes.max() + 1)
  rare = [np.flatnonzero(classes == label) for label in np.flatnonzero(counts < FEWEST)]
  return np.unique(np.concatenate([chosen, *(own[evenly_spaced(len(own), FEWEST)] for own in rare)]))


def no_edits(reader: Reader, config: Any, step: int, average: bool, among: np.ndarray) -> Edits:
  """Return an `Edits` object without edits. It has the metric W that later edits of the classifier use.

  Args:
    reader: the classifier.
    config: the config of the run. Its key `data.transforms` has the transforms of the copies.
    step: the step of the checkpoint.
    average: True if the parameters are the moving average.
    among: the guarded images, uint8 [n, H, W, C]. W is computed from transformed copies of these images.
  """
  metric = measure_metric(reader, among, read_transforms(config.data.transforms))
  return Edits(step, average, metric)


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
    reach: see `ImageEditor.edit`.
    margin: see `ImageEditor.edit`.
    checkpoint: 'latest', 'best' or a step.
    average: True to edit the moving average of the parameters.
    **moved: see `hbf.editing.editor.task_with_data`.

  Raises:
    UserError: the run is not of task classification, is in use, has learned classes, or has edits of another
      checkpoint. Or its data are missing. Or an image can't be read. Or `reach` or `margin` is not positive. Or
      `ImageEditor.edit` raises UserError. Nothing is written in these cases.
  """
  check_options(reach, margin)
  check_task(workdir, 'classification')
  dataset = stored_dataset(workdir)
  class_number(label, dataset.class_names)  # before any work on the images
  images = np.stack([read_image(path, dataset.image_shape) for path in paths])
  with locked(workdir):
    check_alone(workdir / EDITS)
    restored = restore(workdir, checkpoint, jax.devices()[:1], average, dataset)
    edits = edits_if_any(workdir, restored.step, average)
    among = guarded_images(workdir, restored.config, **moved)
    reader = Reader.of(restored.model, restored.params, restored.task)
    if edits is None:
      edits = no_edits(reader, restored.config, restored.step, average, among)
    editor = ImageEditor(reader, dataset.class_names, among, edits)
    return record(workdir, editor, lambda: editor.edit(images, [label] * len(paths), paths, reach, margin))
