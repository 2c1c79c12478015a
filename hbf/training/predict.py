"""Which classes images of one's own are of, by a trained classifier."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np

from hbf.data.images.codec import decode_file
from hbf.errors import UserError
from hbf.markdown import table
from hbf.training import export
from hbf.training.export import Images, Trained

BATCH = 100  # images


@dataclasses.dataclass(frozen=True)
class Classifier:
  """What answers.

  Attributes:
    classes: their names.
    image_shape: height, width, channels of the images that it takes.
    logits: uint8 [B, H, W, C] → float32 [B, classes].
  """

  classes: Sequence[str]
  image_shape: Sequence[int]
  logits: Callable[[Images], jax.Array]


@dataclasses.dataclass(frozen=True)
class Answer:
  """What is known of an image.

  Attributes:
    image: its path.
    classes: the likeliest first, with their probabilities.
    error: why it can't be read, in a line; '' if it could.
  """

  image: str
  classes: tuple[tuple[str, float], ...] = ()
  error: str = ''

  def to_json(self) -> dict[str, Any]:
    """{image, classes: [{class, probability}, …]}, or {image, error}."""
    if self.error:
      return {'image': self.image, 'error': self.error}
    found = [{'class': name, 'probability': probability} for name, probability in self.classes]
    return {'image': self.image, 'classes': found}


def of_trained(model: Trained) -> Classifier:
  """A classifier that is in memory."""
  logits = jax.jit(model.logits)
  return Classifier(model.about['classes'], model.about['image_shape'], lambda images: logits(model.params, images))


def of_export(folder: pathlib.Path) -> Classifier:
  """A classifier in an exported folder; errors as for `hbf.training.export.load_program`."""
  about = export.read_about(folder)
  return Classifier(about['classes'], about['image_shape'], export.load_program(folder))


def find_images(paths: Sequence[str]) -> list[str]:
  """The files among paths, and all files in the folders among them, sorted; hidden ones in folders are left out.

  A path where nothing is counts as a file, so that it is an image that can't be read.

  Raises:
    UserError: a folder has no file.
  """
  found: list[str] = []
  for path in paths:
    path = os.path.expanduser(path)
    files = sorted(_files(path)) if os.path.isdir(path) else [path]
    if not files:
      raise UserError(f'{path} has no files: expected images, or folders of images')
    found += files
  return found


def _files(folder: str) -> Iterator[str]:
  """The files of a folder and of those in it, but hidden ones."""
  for parent, folders, names in os.walk(folder, onerror=_refuse):
    folders[:] = [name for name in folders if not name.startswith('.')]
    yield from (os.path.join(parent, name) for name in names if not name.startswith('.'))


def _refuse(error: OSError) -> None:
  raise UserError(f'{error.filename} can not be read ({error.strerror}): change its permissions, or leave it out')


def answer(classifier: Classifier, images: Sequence[str], top: int, batch_size: int = BATCH) -> Iterator[Answer]:
  """The likeliest classes of images, in their order; one that can't be read keeps none from its answer.

  Args:
    classifier: to ask.
    images: paths of files of any size, brought to the classifier's as in training.
    top: how many classes at most, 1 or more.
    batch_size: most images that are in memory, and are computed at once.
  """
  size = min(batch_size, len(images))  # the last batch is filled up, so that one program answers all
  with futures.ThreadPoolExecutor() as pool:
    for start in range(0, len(images), size or 1):
      paths = images[start : start + size]
      read = [*pool.map(read_image, paths, itertools.repeat(classifier.image_shape))]
      batch = np.zeros((size, *classifier.image_shape), np.uint8)
      for row, image in zip(batch, read, strict=False):
        row[:] = 0 if isinstance(image, UserError) else image
      logits = np.asarray(classifier.logits(batch), np.float64)
      for path, image, scores in zip(paths, read, logits, strict=False):
        if isinstance(image, UserError):
          yield Answer(path, error=' '.join(str(image).split()))
        else:
          yield Answer(path, tuple(_likeliest(classifier.classes, scores, top)))


def read_image(path: str, shape: Sequence[int]) -> np.ndarray | UserError:
  """An image of a shape, uint8, or why there is none."""
  height, width, channels = shape
  try:
    # Data sets of oblong images are of one size as they are stored, and so are those that they are to be like.
    image = decode_file(path, channels=channels, size=height if height == width else None)
  except UserError as error:
    return error
  if image.shape != tuple(shape):
    found, expected = (f'{w}×{h}' for h, w in (image.shape[:2], shape[:2]))
    return UserError(f'{path} has {found} pixels: expected {expected}, as in training; crop or resize it to that')
  return image


def _likeliest(classes: Sequence[str], logits: np.ndarray, top: int) -> Iterator[tuple[str, float]]:
  weights = np.exp(logits - logits.max())
  for label in np.argsort(-logits, kind='stable')[:top]:
    yield classes[label], float(weights[label] / weights.sum())


def to_table(answers: Sequence[Answer]) -> str:
  """The answers as a Markdown table: an image a row, with its classes, the likeliest first."""
  ranks = range(max(len(a.classes) for a in answers))
  rows = [(_printable(a.image), *(f'{name} {probability:.1%}' for name, probability in a.classes)) for a in answers]
  return table(('image', *(f'{rank + 1}.' for rank in ranks)), rows)


def _printable(path: str) -> str:
  """A path with what isn't Unicode in it spelled out."""
  return path.encode(errors='backslashreplace').decode()
