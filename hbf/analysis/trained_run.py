"""A trained run on images, with its network and its data, for analysis."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import Activations, capture
from hbf.analysis.restored_run import RestoredRun
from hbf.data.augment.batches import normalize
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError, choose
from hbf.evaluation.batches import in_batches
from hbf.models.classifier import ImageClassifier
from hbf.tasks.classification import Classification
from hbf.training.experiment import make_splits
from hbf.training.workdir import load_config

MOST_TESTED = 10_000  # most test images
BATCH = 100  # most images of a batch
ROOM = 2**27  # most array elements in the activations of a batch


class LabeledImages(NamedTuple):
  """Images and their labels: uint8 [n, height, width, channels] and int32 [n]."""

  images: np.ndarray
  labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class TrainedRun(RestoredRun):
  """The network of a run on images at a checkpoint, and the images of the run."""

  @classmethod
  def check(cls, workdir: pathlib.Path) -> None:
    """Raise `UserError` unless the run is of task classification and its network has one resolution (model.merge)."""
    config = load_config(workdir)
    if config.task != 'classification':
      raise UserError(f'{workdir} holds a run of task {config.task}: give a run of task classification')
    if merge := config.model.get('merge', 0):
      raise UserError(
        f'{workdir} holds a network of two resolutions (model.merge={merge}). The analysis needs one patch for each '
        'token: give a run with model.merge=0'
      )

  def untrained(self, seed: int) -> 'TrainedRun':
    """Return the run with the network's initial parameters for a seed, as a control."""
    inputs = self.normalized(self.read('train', BATCH).images)  # centers may start at tokens of these images
    init = jax.jit(functools.partial(self.model.init, train=False))
    return self.with_params(init(jax.random.key(seed), inputs)['params'])

  def with_params(self, params: Any) -> 'TrainedRun':
    """Return the run with other parameters in its network."""
    return dataclasses.replace(self, restored=dataclasses.replace(self.restored, params=params))

  @property
  def task(self) -> Classification:
    """The task of the run."""
    assert isinstance(self.restored.task, Classification)
    return self.restored.task

  @property
  def classes(self) -> tuple[str, ...]:
    """Names of the classes."""
    return tuple(map(str, self.task.dataset.class_names))

  @property
  def model(self) -> ImageClassifier:
    """The network."""
    assert isinstance(self.restored.model, ImageClassifier)
    return self.restored.model

  @property
  def patch(self) -> int:
    """Side of a patch in pixels."""
    return self.model.embed.patch

  @property
  def grid(self) -> tuple[int, int]:
    """Number of rows and number of columns of patches in an image."""
    height, width, _ = self.task.shape
    return height // self.patch, width // self.patch

  @property
  def first_patch(self) -> int:
    """Index of the first patch's token: 1 after a class token, otherwise 0."""
    return int(self.model.embed.pool == 'cls')

  def read(self, split: str, most: int) -> LabeledImages:
    """Return at most `most` images of a split, evenly spaced in its order.

    Raises:
      UserError: there is no such split, or an image cannot be read.
    """
    source = choose('split', split, make_splits(self.task, self.restored.config.data.validation))
    return LabeledImages(*read_many(source, evenly_spaced(len(source), most), self.task.shape))

  @functools.cached_property
  def test(self) -> LabeledImages:
    """The test images, at most `MOST_TESTED`."""
    return self.read('test', MOST_TESTED)

  @functools.cached_property
  def test_logits(self) -> np.ndarray:
    """Logits of the test images, float32 [n, classes]."""
    return self.logits(self.test.images)

  def normalized(self, images: np.ndarray) -> jax.Array:
    """Normalize uint8 images [n, height, width, channels] with the mean and standard deviation of each channel."""
    return normalize(jnp.asarray(images), self.task.mean, self.task.std)

  def logits(self, images: np.ndarray, params: Any = None) -> np.ndarray:
    """Return the logits of uint8 images [n, height, width, channels], float32 [n, classes].

    Args:
      images: uint8 [n, height, width, channels].
      params: parameters to use in place of the run's.
    """
    params = self.params if params is None else params
    return np.asarray(in_batches(lambda batch: self._apply(params, batch), images, BATCH))

  @functools.cached_property
  def _apply(self) -> Any:
    task, model = self.task, self.model
    return jax.jit(
      lambda params, images: model.apply({'params': params}, normalize(images, task.mean, task.std), train=False)
    )

  def capture_batches(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, Activations]]:
    """Yield the activations of the network, batch by batch.

    All batches have the same size, so JAX compiles one program.

    Args:
      images: uint8 [n, height, width, channels].

    Yields:
      The numbers of the images in a batch, int [B], and the activations of this batch. The number −1 marks copies
      that only fill up the batch.
    """
    for number, inputs in self.batches(images):
      yield number, capture(self.model, self.params, inputs)

  def batches(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Yield batches of normalized images. All batches have the same size B.

    Args:
      images: uint8 [n, height, width, channels].

    Yields:
      The numbers of the images in a batch, int [B], and the normalized images. The number −1 marks copies that only
      fill up the batch.
    """
    for start in range(0, len(images), self._batch):
      number = np.arange(start, start + self._batch)
      shown = images[np.minimum(number, len(images) - 1)]
      yield np.where(number < len(images), number, -1), self.normalized(shown)

  @functools.cached_property
  def _batch(self) -> int:
    """The number of images in a batch."""
    shapes = jax.eval_shape(
      lambda images: capture(self.model, self.params, images),
      jax.ShapeDtypeStruct((1, *self.task.shape), jnp.float32),
    )
    return max(1, min(BATCH, ROOM // sum(leaf.size for leaf in jax.tree.leaves(shapes))))
