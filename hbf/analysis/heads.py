"""What the heads of stage 1 look at in images, and what becomes of the tokens with depth."""

import dataclasses

import numpy as np

from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.weights import attention_weights

IMAGES = 50  # whose weights are held at a time


@dataclasses.dataclass(frozen=True)
class Heads:
  """Of the heads of a block, means over the tokens of all images.

  Attributes:
    distance: Σ w ‖p_i − p_j‖ over the patches, in patches, [heads]; of the patches that a head looks at.
    tokens: effective number of tokens looked at, exp of the weights' entropy, [heads].
  """

  distance: np.ndarray
  tokens: np.ndarray


def heads(subject: TrainedRun, images: np.ndarray) -> dict[str, Heads]:
  """What the heads of every block look at; {} where stage 1 is no attention.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
  """
  found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
  away = between_patches(subject)
  for start in range(0, len(images), IMAGES):
    for block, w in _weights(subject, images[start : start + IMAGES]).items():
      of_patches = w[:, :, subject.first_patch :, subject.first_patch :]
      far = (of_patches * away).sum(-1) / np.maximum(of_patches.sum(-1), 1e-12)
      part = w / np.maximum(w.sum(-1, keepdims=True), 1e-12)
      entropy = -np.sum(part * np.log(np.maximum(part, 1e-300)), axis=-1)
      found.setdefault(block, []).append((far.mean(-1), np.exp(entropy).mean(-1)))
  return {
    block: Heads(*(np.concatenate(kind).mean(axis=0) for kind in zip(*parts, strict=True)))
    for block, parts in found.items()
  }


def between_patches(subject: TrainedRun) -> np.ndarray:
  """The distance of any two patches, in patches: [N, N]."""
  rows, columns = subject.grid
  places = np.mgrid[:rows, :columns].reshape(2, -1).T
  return np.sqrt(np.square(places[:, None] - places[None]).sum(-1))


def maps(subject: TrainedRun, images: np.ndarray, token: int) -> dict[str, np.ndarray]:
  """What a token of each image takes of every patch, by block: [n, heads, rows, columns]; give at most `IMAGES`."""
  return {
    block: w[:, :, token, subject.first_patch :].reshape(*w.shape[:2], *subject.grid)
    for block, w in _weights(subject, images).items()
  }


def _weights(subject: TrainedRun, images: np.ndarray) -> dict[str, np.ndarray]:
  """The weights in at most `IMAGES`, float64 [n, heads, N, N], by one program for any number."""
  filled = images[np.minimum(np.arange(IMAGES), len(images) - 1)]
  weights = attention_weights(subject.model, subject.params, subject.normalized(filled))
  return {block: np.asarray(w[: len(images)], np.float64) for block, w in weights.items()}


def differing(subject: TrainedRun, images: np.ndarray) -> np.ndarray:
  """How far the tokens of an image are from all being the same: ‖X − 1x̄ᵀ‖/‖X‖, mean over the images, [depth + 1].

  Before the first block and after each; it falls to 0 where attention makes all tokens alike (Dong et al. 2021).
  """
  parts = []
  for number, seen in subject.looks(images):
    x = np.asarray(seen.tokens, np.float64)[:, number >= 0]
    rest = x - x.mean(axis=2, keepdims=True)
    parts.append(np.sqrt(np.square(rest).sum((2, 3)) / np.square(x).sum((2, 3))))
  return np.concatenate(parts, axis=1).mean(axis=1)
