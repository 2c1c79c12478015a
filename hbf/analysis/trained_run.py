"""A run on images, with its data, ready to be looked at."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import Activations, look
from hbf.data.augment.batches import normalize
from hbf.data.pipeline.host import read_many
from hbf.data.pipeline.order import evenly_spaced
from hbf.errors import UserError, choose
from hbf.models.classifier import ImageClassifier
from hbf.tasks.classification import Classification
from hbf.training.evaluate import Restored, restore
from hbf.training.experiment import make_splits
from hbf.training.workdir import load_config

MOST_TESTED = 10_000  # images
BATCH = 100  # images that pass at once
ROOM = 2**27  # most numbers that one pass keeps, in all


class Labeled(NamedTuple):
  """Images and what they are of: uint8 [n, height, width, channels] and int32 [n]."""

  images: np.ndarray
  labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class TrainedRun:
  """A run's network at a checkpoint, and its images.

  Attributes:
    workdir: of the run.
    restored: its network.
    average: whether its parameters are their moving average.
  """

  workdir: pathlib.Path
  restored: Restored
  average: bool = False

  @classmethod
  def of(
    cls, workdir: pathlib.Path, checkpoint: str = 'latest', dir: str = '', root: str = '', average: bool = False
  ) -> 'TrainedRun':
    """Restores a run.

    Args:
      workdir: of the run.
      checkpoint: 'latest', 'best' or a step.
      dir: where prepared TFDS data lie, if not where they were in training.
      root: the image folder, likewise.
      average: whether to take the moving average of the parameters.

    Raises:
      UserError: it is no run on images, or as `hbf.training.evaluate.restore`.
    """
    config = load_config(workdir)
    if config.task != 'classification':
      raise UserError(f'{workdir} holds a run of task {config.task}: give one of classification')
    if merge := config.model.get('merge', 0):
      raise UserError(
        f'{workdir} holds a network of two resolutions (model.merge={merge}). Each token is set beside one patch: '
        'give a run with model.merge=0'
      )
    return cls(workdir, restore(workdir, checkpoint, jax.devices()[:1], average, dir=dir, root=root), average)

  def untrained(self, seed: int) -> 'TrainedRun':
    """Return the same network at initialization: a control for what training has made."""
    inputs = self.normalized(self.read('train', BATCH).images)  # centers may start as their tokens
    init = jax.jit(functools.partial(self.model.init, train=False))
    return self.with_params(init(jax.random.key(seed), inputs)['params'])

  def with_params(self, params: Any) -> 'TrainedRun':
    """Return the same network with other parameters."""
    return dataclasses.replace(self, restored=dataclasses.replace(self.restored, params=params))

  @property
  def task(self) -> Classification:
    """What the run was trained for."""
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
  def params(self) -> Any:
    """Its parameters."""
    return self.restored.params

  @property
  def patch(self) -> int:
    """Side of a token's patch in pixels."""
    return self.model.embed.patch

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of patches."""
    height, width, _ = self.task.shape
    return height // self.patch, width // self.patch

  @property
  def first_patch(self) -> int:
    """The token of the first patch: 1 where a class token comes before."""
    return int(self.model.embed.pool == 'cls')

  def read(self, split: str, most: int) -> Labeled:
    """At most so many images of a split, evenly spaced in its order.

    Raises:
      UserError: there is no such split, or an image can't be read.
    """
    source = choose('split', split, make_splits(self.task, self.restored.config.data.validation))
    return Labeled(*read_many(source, evenly_spaced(len(source), most), self.task.shape))

  @functools.cached_property
  def test(self) -> Labeled:
    """The test images, of more than `MOST_TESTED` as many."""
    return self.read('test', MOST_TESTED)

  @functools.cached_property
  def test_logits(self) -> np.ndarray:
    """Of the test images, float32 [n, classes]."""
    return self.logits(self.test.images)

  def normalized(self, images: np.ndarray) -> jax.Array:
    """Images uint8 as the network takes them."""
    return normalize(jnp.asarray(images), self.task.mean, self.task.std)

  def logits(self, images: np.ndarray, params: Any = None) -> np.ndarray:
    """Of images uint8 [n, height, width, channels], float32 [n, classes]; with other parameters if they are given."""
    params = self.params if params is None else params
    filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % BATCH, axis=0)])
    parts = [filled[start : start + BATCH] for start in range(0, len(filled), BATCH)]
    found = [self._apply(params, jnp.asarray(part)) for part in parts]
    return np.concatenate(jax.device_get(found))[: len(images)]

  @functools.cached_property
  def _apply(self) -> Any:
    task, model = self.task, self.model
    return jax.jit(
      lambda params, images: model.apply({'params': params}, normalize(images, task.mean, task.std), train=False)
    )

  def looks(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, Activations]]:
    """What passes through the network, batch by batch, all of one size, so that there is one program.

    Args:
      images: uint8 [n, height, width, channels].

    Yields:
      Numbers of the images of a batch, int [B], −1 for what only fills the last one up, and what passes.
    """
    for number, inputs in self.batches(images):
      yield number, look(self.model, self.params, inputs)

  def batches(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Yield images in batches of one size: their numbers, −1 for what only fills the last batch up, and themselves.

    Args:
      images: uint8 [n, height, width, channels].
    """
    for start in range(0, len(images), self._batch):
      number = np.arange(start, start + self._batch)
      shown = images[np.minimum(number, len(images) - 1)]
      yield np.where(number < len(images), number, -1), self.normalized(shown)

  @functools.cached_property
  def _batch(self) -> int:
    """Images that are looked at at once."""
    shapes = jax.eval_shape(
      lambda images: look(self.model, self.params, images), jax.ShapeDtypeStruct((1, *self.task.shape), jnp.float32)
    )
    return max(1, min(BATCH, ROOM // sum(leaf.size for leaf in jax.tree.leaves(shapes))))
