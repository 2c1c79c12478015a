"""Test-time augmentation: changed copies of a test image. Evaluation averages the model's outputs on the copies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Copies = Callable[[jax.Array], tuple[jax.Array, np.ndarray]]


def mirror(images: jax.Array) -> tuple[jax.Array, np.ndarray]:
  """Return images and their mirrored copies as one array [2, B, H, W, C], and the weights of the two, [2]."""
  return jnp.stack([images, images[:, :, ::-1]]), np.full(2, 1 / 2, np.float32)


def mirror_shift(images: jax.Array) -> tuple[jax.Array, np.ndarray]:
  """Return six copies of images and their weights (Jordan 2024, `infer_mirror_translate` of airbench).

  Copy 1 is the image itself. Copy 3 is moved by one pixel down and right, and copy 5 by one pixel up and left, with
  borders filled by reflection. Copies 2, 4 and 6 are copies 1, 3 and 5, mirrored. Copies 1 and 2 together have half
  of the total weight.

  Args:
    images: images [B, H, W, C] with at least two rows and two columns.

  Returns:
    Copies [6, B, H, W, C] and their weights [6].
  """
  _, height, width, _ = images.shape
  padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode='reflect')
  unmoved, moved = mirror(images), [mirror(padded[:, i : i + height, i : i + width]) for i in (0, 2)]
  parts = [(unmoved, 1 / 2), *((z, 1 / 4) for z in moved)]
  return jnp.concatenate([z for (z, _), _ in parts]), np.concatenate(
    [share * weights for (_, weights), share in parts]
  )


COPIES: dict[str, Copies | None] = {'none': None, 'mirror': mirror, 'mirror_shift': mirror_shift}
