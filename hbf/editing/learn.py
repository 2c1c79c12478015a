"""New classes for a trained classifier from a few images each, without training.

The features of an image are the input of the head. The center of a class is the mean of the features of its images.
Let b be the classifier's answer for an image. A new class becomes the answer if the features are nearer to its center
than to the center of b (`hbf.models.extended.ExtendedClassifier`). In the metric of this distance, features of images
of the same trained class are near to each other.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hbf.data.images.folder import open_classes
from hbf.editing.edit import labeled_images
from hbf.editing.guard import Reader, metric_of_classes
from hbf.errors import UserError
from hbf.training.learned import Learned, LearnedClass, learned_if_any, read_learned, write_learned
from hbf.training.predict import read_image
from hbf.training.restore import check_classifies, restore, stored_dataset
from hbf.training.side_file import LEARNED, check_alone
from hbf.training.workdir import locked


def nothing_learned(
  reader: Reader, images: np.ndarray, labels: np.ndarray, classes: Sequence[str], step: int, average: bool
) -> Learned:
  """Return a `Learned` object without learned classes. It has the metric, and the centers of the trained classes.

  Args:
    reader: the classifier.
    images: images of the trained classes, uint8 [n, H, W, C]. The metric and the centers are computed from them.
    labels: the class of each image, int [n].
    classes: the names of the trained classes.
    step: the step of the checkpoint.
    average: True if the parameters are the moving average.

  Raises:
    UserError: a class has fewer than two images.
  """
  counts = np.bincount(labels, minlength=len(classes))
  if counts.min() < 2:
    rarest = classes[int(counts.argmin())]
    raise UserError(
      f'class {rarest} has {counts.min()} images among those of the trained classes: expected two or more of each '
      'class; train with more images of it, or give others to hbf.learn (among)'
    )
  features = reader(images).features
  centers = np.stack([features[labels == label].mean(axis=0) for label in range(len(classes))])
  return Learned(step, average, metric_of_classes(features, labels), centers)


def learn_images(
  reader: Reader, learned: Learned, images: np.ndarray, labels: Sequence[str], sources: Sequence[str]
) -> Learned:
  """Return all learned classes: those of `learned`, and new classes made from `images`.

  Args:
    reader: the classifier.
    learned: the classes that were learned earlier.
    images: the images of the new classes, uint8 [n, H, W, C].
    labels: the name of the class of each image, [n], which `check_names` has checked.
    sources: the name of each image, [n]. The result lists it as a source of its class.
  """
  features, classes = reader(images).features, []
  for name in dict.fromkeys(labels):
    rows = [number for number, label in enumerate(labels) if label == name]
    classes.append(LearnedClass(str(name), tuple(sources[row] for row in rows), features[rows].mean(axis=0)))
  return dataclasses.replace(learned, classes=(*learned.classes, *classes))


def check_names(labels: Sequence[Any], trained: Sequence[str], learned: Learned | None) -> None:
  """Check the names of new classes, before their images are read and before any work on the trained classes.

  Args:
    labels: the names.
    trained: the names of the trained classes.
    learned: the classes that were learned earlier. None: there are none.

  Raises:
    UserError: a name in `labels` is not a text, is empty, or is already the name of a class.
  """
  for name in labels:
    if not isinstance(name, str) or not name.strip():
      raise UserError(f"labels has {name!r}: expected the name of each image's class as a text, such as str(10)")
    if name in trained:
      raise UserError(f'{name} is a class that the classifier was trained on: give the new class another name')
    if learned and name in learned.names:
      raise UserError(f'{name} is learned already: forget it first, `hbf learn --forget={name}`')


def learn_folder(
  workdir: pathlib.Path, folder: str, checkpoint: str = 'latest', average: bool = False, **moved: str
) -> Learned:
  """Learn the classes of a folder of images, and write them into the run folder. Return all learned classes.

  Args:
    workdir: the run folder.
    folder: a folder with a subfolder for each class. Its images may have any size. They are resized as in training.
    checkpoint: 'latest', 'best' or a step.
    average: True to take the moving average of the parameters.
    **moved: see `hbf.editing.editor.task_with_data`.

  Raises:
    UserError: the run is not of task classification, is in use, has edits, or has learned classes of another
      checkpoint. Or its data are missing, an image can't be read, or `check_names` raises UserError. Nothing is
      written in these cases.
  """
  check_classifies(workdir, 'hbf learn')
  dataset = stored_dataset(workdir)
  names, source = open_classes(folder, dataset.image_shape[0])
  with locked(workdir):
    check_alone(workdir / LEARNED)
    check_names(names, dataset.class_names, read_learned(workdir))
    images = np.stack([read_image(path, dataset.image_shape) for path in source.paths])
    restored = restore(workdir, checkpoint, jax.devices()[:1], average, dataset)
    reader = Reader.of(restored.model, restored.params, restored.task)
    learned = learned_if_any(workdir, restored.step, average)
    if learned is None:
      known, classes = labeled_images(workdir, restored.config, **moved)
      learned = nothing_learned(reader, known, classes, dataset.class_names, restored.step, average)
    labels = [names[label] for label in source.read_labels()]
    learned = learn_images(reader, learned, images, labels, source.paths)
    write_learned(workdir, learned)
    return learned
