"""How near images are to what a model's centers stand for: a radial unit knows how far it is from all it has seen."""

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.trained_run import TrainedRun


def nearness(subject: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """The greatest log K of every token over the centers, its mean over the tokens of an image, by block: [n].

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].

  Returns:
    {} for a network without centers.
  """
  parts: dict[str, list[np.ndarray]] = {}
  for number, seen in subject.looks(images):
    for block, of_batch in _nearest(seen.log_kernels).items():
      parts.setdefault(block, []).append(np.asarray(of_batch)[number >= 0])
  return {block: np.concatenate(of_block).astype(np.float64) for block, of_block in parts.items()}


@jax.jit
def _nearest(log_kernels: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return {block: jnp.max(z, axis=-1).mean(axis=-1) for block, z in log_kernels.items()}
