"""A trained run on images, with the activations of its network and the patches that its tokens stand for."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import Activations, capture
from hbf.analysis.image_run import BATCH, ImageRun
from hbf.analysis.unit_params import block_names, last_block
from hbf.errors import choose
from hbf.nn.trunk import growth

ROOM = 2**27  # most array elements in the activations of a batch


class Patches(NamedTuple):
  """The patches of an image for which the tokens of a block stand, row by row.

  Attributes:
    rows: number of rows of patches.
    columns: number of columns of patches.
    side: side of a patch in pixels.
  """

  rows: int
  columns: int
  side: int

  @property
  def middle(self) -> int:
    """Index of the patch in the middle of the image."""
    return self.rows // 2 * self.columns + self.columns // 2


@dataclasses.dataclass(frozen=True)
class TrainedRun(ImageRun):
  """The network of a run on images at a checkpoint.

  Every token of a block stands for a patch of the image, apart from a class token. In a network of several
  resolutions (`model.merge`), the tokens of later blocks stand for larger patches.
  """

  def untrained(self, seed: int) -> 'TrainedRun':
    """Return the run with random parameters, as a control.

    They are the initial parameters for a seed in a training without `init_from`.
    """
    inputs = self.normalized(self.read('train', BATCH).images)  # centers may start at tokens of these images
    init = jax.jit(functools.partial(self.model.init, train=False))
    return self.with_params(init(jax.random.key(seed), inputs)['params'])

  @property
  def last_block(self) -> str:
    """Name of the last block, as in the parameters."""
    return last_block(self.model)

  def patches_of(self, block: str) -> Patches:
    """Return the patches for which the tokens of a block stand, such as 'block0'.

    Raises:
      UserError: there is no such block.
    """
    number = choose('block', block, {name: i for i, name in enumerate(block_names(self.model))})
    side = self.model.embed.patch * growth(self.model.trunk.merge, number)
    height, width, _ = self.task.shape
    return Patches(height // side, width // side, side)

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
