"""Attention heads on images: the distances over which they attend, their maps, and differences between tokens."""

import dataclasses

import numpy as np

from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.weights import attention_weights
from hbf.errors import choose
from hbf.nn.context import grid_positions

IMAGES = 50  # images whose attention weights are in memory at a time


@dataclasses.dataclass(frozen=True)
class Heads:
  """Statistics of the heads of a block, as means over the queries of all images.

  Attributes:
    distance: for each head, the mean distance Σ_j w_ij ‖p_i − p_j‖ from a query patch i to the attended patches j,
      [heads]. A patch has the side 1. The weights w_ij are scaled so that they sum to 1 over the patches j.
    tokens: for each head, the effective number of tokens that a query token attends to, [heads]. It is exp of the
      entropy of the token's weights.
  """

  distance: np.ndarray
  tokens: np.ndarray


def heads(run: TrainedRun, images: np.ndarray) -> dict[str, Heads]:
  """Return statistics of the heads of every block. Return {} if stage 1 is not attention.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
  """
  found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
  for start in range(0, len(images), IMAGES):
    for block, w in _weights(run, images[start : start + IMAGES]).items():
      distances = patch_distances(run, block)
      patch_weights = w[:, :, run.first_patch :, run.first_patch :]
      far = (patch_weights * distances).sum(-1) / np.maximum(patch_weights.sum(-1), 1e-12)
      part = w / np.maximum(w.sum(-1, keepdims=True), 1e-12)
      entropy = -np.sum(part * np.log(np.maximum(part, 1e-300)), axis=-1)
      found.setdefault(block, []).append((far.mean(-1), np.exp(entropy).mean(-1)))
  return {
    block: Heads(*(np.concatenate(kind).mean(axis=0) for kind in zip(*parts, strict=True)))
    for block, parts in found.items()
  }


def patch_distances(run: TrainedRun, block: str) -> np.ndarray:
  """Return the distances [N, N] between the midpoints of a block's patches. A patch has the side 1."""
  rows, columns, _ = run.patches_of(block)
  positions = grid_positions(rows, columns).astype(np.float64)
  return np.sqrt(np.square(positions[:, None] - positions[None]).sum(-1))


def maps(run: TrainedRun, images: np.ndarray, query: str = 'middle') -> dict[str, np.ndarray]:
  """Return for each block the weights with which one token attends to all patches, [n, heads, rows, columns].

  Args:
    run: the run.
    images: uint8 [n, height, width, channels], n at most `IMAGES`.
    query: 'middle' for the patch in the middle of the image, or 'class' for the class token.

  Raises:
    UserError: the network has no class token, or `query` is something else.
  """
  queries = ('middle', 'class') if run.first_patch else ('middle',)
  choose('query', query, dict.fromkeys(queries))
  found = {}
  for block, w in _weights(run, images).items():
    patches = run.patches_of(block)
    token = run.first_patch + patches.middle if query == 'middle' else 0
    found[block] = w[:, :, token, run.first_patch :].reshape(*w.shape[:2], patches.rows, patches.columns)
  return found


def _weights(run: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """Return for each block the attention weights of at most `IMAGES` images, float64 [n, heads, N, N].

  The batch is padded to `IMAGES` with copies of the last image, so that JAX compiles only one program.
  """
  filled = images[np.minimum(np.arange(IMAGES), len(images) - 1)]
  weights = attention_weights(run.model, run.params, run.normalized(filled))
  return {block: np.asarray(w[: len(images)], np.float64) for block, w in weights.items()}


def token_differences(run: TrainedRun, images: np.ndarray) -> np.ndarray:
  """Return how much the tokens of an image differ before the first block and after each block, [depth + 1].

  The measure for an image is ‖X − 1x̄ᵀ‖/‖X‖, where X [N, D] are the tokens and x̄ is their mean. The result
  is the mean of this measure over the images. It falls to 0 with depth if attention makes all tokens alike (Dong et
  al. 2021).
  """
  parts = [
    [_difference(np.asarray(tokens, np.float64)[number >= 0]) for tokens in activations.tokens]
    for number, activations in run.capture_batches(images)
  ]
  return np.concatenate(parts, axis=1).mean(axis=1)


def _difference(x: np.ndarray) -> np.ndarray:
  """Return ‖X − 1x̄ᵀ‖/‖X‖ for each image of tokens [n, N, D], [n]."""
  rest = x - x.mean(axis=1, keepdims=True)
  return np.sqrt(np.square(rest).sum((1, 2)) / np.square(x).sum((1, 2)))
