"""A trained run on images whose network has one token for each patch, with the data of the run."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import Activations, capture
from hbf.analysis.image_run import BATCH, ImageRun
from hbf.errors import UserError
from hbf.models.build import unlike_plain
from hbf.training.workdir import load_config

ROOM = 2**27  # most array elements in the activations of a batch


@dataclasses.dataclass(frozen=True)
class TrainedRun(ImageRun):
  """The network of a run on images at a checkpoint, with one token for each patch in all blocks."""

  @classmethod
  def check(cls, workdir: pathlib.Path) -> None:
    """Check that the run is of task classification, and that its network has one resolution and no windows.

    Raises:
      UserError: one of these is not so.
    """
    super().check(workdir)
    model = load_config(workdir).model
    if option := unlike_plain(model):
      words, plain = {'merge': ('several resolutions', '()'), 'window': ('windows', '0')}[option]
      raise UserError(
        f'{workdir} holds a network of {words} (model.{option}={model[option]}). The analysis needs one patch for '
        f'each token, and a stage 1 over all of them: give a run with model.{option}={plain}'
      )

  def untrained(self, seed: int) -> 'TrainedRun':
    """Return the run with the network's initial parameters for a seed, as a control."""
    inputs = self.normalized(self.read('train', BATCH).images)  # centers may start at tokens of these images
    init = jax.jit(functools.partial(self.model.init, train=False))
    return self.with_params(init(jax.random.key(seed), inputs)['params'])

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

  def capture_batches(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, Activations]]:
    """Yield the activations of the network, batch by batch.

    All batches have the same size, so JAX compiles one program.

    Args:
      images: uint8 [n, height, width, channels].

    Yields:
      The indices of the images in a batch, int [B], and the activations of this batch. The index −1 marks copies that
      only fill up the batch.
    """
    for number, inputs in self.batches(images):
      yield number, capture(self.model, self.params, inputs)

  def batches(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, jax.Array]]:
    """Yield batches of normalized images. All batches have the same size B.

    Args:
      images: uint8 [n, height, width, channels].

    Yields:
      The indices of the images in a batch, int [B], and the normalized images. The index −1 marks copies that only
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
