"""A trained run on images, with its network and its data. Any network of task classification is accepted."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class LabeledImages(NamedTuple):
  """Images and their labels: uint8 [n, height, width, channels] and int32 [n]."""

  images: np.ndarray
  labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class ImageRun(RestoredRun):
  """The classifier of a run at a checkpoint, and the images of the run."""

  @classmethod
  def check(cls, workdir: pathlib.Path) -> None:
    """Raise `UserError` unless the run is of task classification."""
    task = load_config(workdir).task
    if task != 'classification':
      raise UserError(f'{workdir} holds a run of task {task}: give a run of task classification')

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

  def about(self) -> dict[str, Any]:
    """Return the name of the run folder, the model, the seed and the step of the checkpoint, for stored numbers."""
    config = self.restored.config
    return {'run': self.workdir.name, 'model': config.model.name, 'seed': config.seed, 'step': self.restored.step}

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
    apply = functools.partial(_logits, self.model, tuple(self.task.mean), tuple(self.task.std), params)
    return np.asarray(in_batches(apply, images, BATCH))


# Runs of one model share the compiled program, such as a run and its copies with other parameters.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _logits(
  model: ImageClassifier, mean: tuple[float, ...], std: tuple[float, ...], params: Any, images: jax.Array
) -> jax.Array:
  return jnp.asarray(model.apply({'params': params}, normalize(images, mean, std), train=False))
