"""The answers of a trained network for a user's own images: classes, labels or values."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from hbf.data.augment.batches import normalize
from hbf.data.images.codec import decode_file
from hbf.errors import UserError
from hbf.markdown import table
from hbf.models.build import build_model
from hbf.tasks.answers import LIKELIEST_CLASSES, AnswerForm, Named
from hbf.training import export
from hbf.training.export import Images, TrainedClassifier
from hbf.training.learned import Learned, learned_if_any

BATCH = 100  # images
NOT_FINITE = 'the outputs of the model for this image are not finite'


@dataclasses.dataclass(frozen=True)
class Classifier:
  """A network that answers images.

  Attributes:
    classes: the names of the classes, labels or targets.
    image_shape: the height, width and channels of its images.
    logits: a function uint8 [B, H, W, C] → float32 [B, classes].
    form: the form of its answers: likeliest classes, all labels or all values.
  """

  classes: Sequence[str]
  image_shape: Sequence[int]
  logits: Callable[[Images], jax.Array]
  form: AnswerForm = LIKELIEST_CLASSES


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer of a network for one image.

  Attributes:
    image: the path of the image.
    numbers: the names of classes, labels or targets with their numbers; see `AnswerForm.answer`.
    error: the reason why there is no answer, in one line. '' if there is one.
    form: the form of the answer, see `Classifier`.
  """

  image: str
  numbers: Named = ()
  error: str = ''
  form: AnswerForm = LIKELIEST_CLASSES

  def to_json(self) -> dict[str, Any]:
    """Return a dict with the path `image` and the entries of `AnswerForm.to_json`.

    Without an answer, the dict has only `image` and `error`.
    """
    if self.error:
      return {'image': self.image, 'error': self.error}
    return {'image': self.image, **self.form.to_json(self.numbers)}


def of_trained(model: TrainedClassifier, learned: Learned | None = None) -> Classifier:
  """Return the classifier of a model in memory, with learned classes if there are any."""
  about, logits, params = model.about, model.logits, model.params
  if not learned:
    return _compiled(about['classes'], about['image_shape'], logits, params, export.image_task(about).answers)
  network, extended = learned.applied(build_model(export.model_config(about), len(about['classes'])), _nested(params))

  def extended_logits(params: Any, images: Images) -> jax.Array:
    normalized = normalize(jnp.asarray(images), about['mean'], about['std'])
    return jnp.asarray(network.apply({'params': params}, normalized, train=False))

  return _compiled([*about['classes'], *learned.names], about['image_shape'], extended_logits, extended)


def _compiled(
  classes: Sequence[str], shape: Sequence[int], logits: Any, params: Any, form: AnswerForm = LIKELIEST_CLASSES
) -> Classifier:
  compiled = jax.jit(logits)
  return Classifier(classes, shape, lambda images: compiled(params, images), form)


def _nested(params: Mapping[str, Any]) -> dict[str, Any]:
  return dict(unflatten_dict(dict(params), sep='/'))


def learned_in(workdir: pathlib.Path, model: TrainedClassifier) -> Learned | None:
  """Return the learned classes of a run. None if the run has none.

  Args:
    workdir: the run folder.
    model: the network of one of the run's checkpoints.

  Raises:
    UserError: the learned classes are of another checkpoint, or their file is damaged.
  """
  return learned_if_any(workdir, model.about['step'], model.about['average'])


def of_export(folder: pathlib.Path) -> Classifier:
  """Return the classifier in an exported folder. See `hbf.training.export.load_program` for the errors."""
  about = export.read_about(folder)
  form = export.image_task(about).answers
  return Classifier(about['classes'], about['image_shape'], export.load_program(folder), form)


def find_images(paths: Sequence[str]) -> list[str]:
  """Return `paths`, with each folder replaced by the sorted paths of all files inside it, without hidden files.

  A path that does not exist is kept. Its answer will say that the file can't be read.

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
  """Yield the files in a folder and its subfolders, without hidden files."""
  for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
    folders[:] = [name for name in folders if not name.startswith('.')]
    if links := [path for name in folders if os.path.islink(path := os.path.join(parent, name))]:
      # A cycle of links would never end.
      raise UserError(f'{links[0]} is a link to a folder: replace it by the folder, remove it, or name its target')
    yield from (os.path.join(parent, name) for name in names if not name.startswith('.'))


def _raise_unreadable(error: OSError) -> None:
  raise UserError(f'{error.filename} can not be read ({error.strerror}): change its permissions, or leave it out')


def answer(classifier: Classifier, images: Sequence[str], top: int, batch_size: int = BATCH) -> Iterator[Answer]:
  """Yield an answer for each image, in the order of `images`.

  If an image can't be read, or the outputs for it are not finite, its answer has the error.

  Args:
    classifier: the classifier.
    images: paths of images. If the network takes square images, these images are resized as in training.
    top: the largest number of classes in an answer, 1 or more. Labels and values are always answered in full.
    batch_size: the largest number of images in memory.
  """
  size = min(batch_size, len(images))  # the last batch is padded, so that one program serves all batches
  with futures.ThreadPoolExecutor() as pool:
    for start in range(0, len(images), size or 1):
      paths = images[start : start + size]
      read = [*pool.map(_image_or_error, paths, itertools.repeat(classifier.image_shape))]
      batch = np.zeros((size, *classifier.image_shape), np.uint8)
      for row, image in zip(batch, read, strict=False):
        row[:] = 0 if isinstance(image, UserError) else image
      logits = np.asarray(classifier.logits(batch), np.float64)
      for path, image, scores in zip(paths, read, logits, strict=False):
        if isinstance(image, UserError):
          yield Answer(path, error=' '.join(str(image).split()))
        elif not np.isfinite(scores).all():
          yield Answer(path, error=f'{path}: {NOT_FINITE}: take another checkpoint')
        else:
          yield Answer(path, classifier.form.answer(classifier.classes, scores, top), form=classifier.form)


def _image_or_error(path: str, shape: Sequence[int]) -> np.ndarray | UserError:
  """Return what `read_image` returns. If the image can't be read, return the error instead."""
  try:
    return read_image(path, shape)
  except UserError as error:
    return error


def read_image(path: str, shape: Sequence[int], content: bytes | None = None) -> np.ndarray:
  """Return the image in a file, as uint8 [H, W, C] of this shape. If H = W, it is resized.

  If `content` is given, it has the bytes of the file. Then `path` only names the image in errors.

  Raises:
    UserError: the image can't be read, or H ≠ W and the image in the file has another size.
  """
  height, width, channels = shape
  # Only square images are resized. Data sets of oblong images have one size on disk, and so must these images.
  image = decode_file(path, channels=channels, size=height if height == width else None, content=content)
  if image.shape != tuple(shape):
    found, expected = (f'{w}×{h}' for h, w in (image.shape[:2], shape[:2]))
    raise UserError(f'{path} has {found} pixels: expected {expected}, as in training; crop or resize it to that')
  return image


def to_table(answers: Sequence[Answer]) -> str:
  """Return the answers as a Markdown table: a row for each image.

  If the answers are classes, a row has the likeliest class first. Else each label or value has a column.
  """
  form, names = answers[0].form, [name for name, _ in answers[0].numbers]
  if form.ranked:
    names = [f'{rank + 1}.' for rank in range(max(len(answer.numbers) for answer in answers))]
  rows = [
    (a.image, *(f'{name} {z:{form.form}}' if form.ranked else f'{z:{form.form}}' for name, z in a.numbers))
    for a in answers
  ]
  return table(('image', *names), rows)
