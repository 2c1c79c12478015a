"""Nearness of images to the centers of a model. It is a score to detect out-of-distribution images."""

import jax
import numpy as np

from hbf.analysis.outlier_scores import greatest
from hbf.analysis.trained_run import TrainedRun


def image_nearness(run: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """Measure how near the tokens of each image are to the centers.

  The nearness is the mean, over the tokens of an image, of the greatest log K over the centers. If K may be 0 or
  negative, the depth b − s replaces log K. Such kernels are in `hbf.ops.kernels.BALLS` and `hbf.ops.kernels.VALUES`.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].

  Returns:
    A dict from the name of each block with centers to the nearness of the images, float64 [n]. {} if the network has
    no centers.
  """
  parts: dict[str, list[np.ndarray]] = {}
  for number, activations in run.capture_batches(images):
    for block, values in _nearest(activations.log_kernels).items():
      parts.setdefault(block, []).append(np.asarray(values)[number >= 0])
  return {block: np.concatenate(values).astype(np.float64) for block, values in parts.items()}


@jax.jit
def _nearest(log_kernels: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return {block: greatest(z) for block, z in log_kernels.items()}
