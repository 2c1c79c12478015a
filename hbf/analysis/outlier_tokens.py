"""Scores of images, computed from the inputs of stage 2 in each block of any image classifier."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import by_token
from hbf.analysis.image_run import ImageRun
from hbf.analysis.outlier_scores import greatest, log_density, nearest_tokens
from hbf.evaluation.batches import in_batches
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.nn.hyperbf import HyperBFCenters
from hbf.ops.distances import squared_distances
from hbf.ops.hyperbf import nearness
from hbf.ops.kernels import DIRECT
from hbf.ops.kmeans import kmeans, sample

GREATEST, CENTERS = 'greatest response', 'density over centers'
MEANS, TOKENS = 'density over k-means centers', 'k nearest tokens'
IMAGES, PER_IMAGE = 2_500, 8  # training images for k-means, and tokens of each
BANK = 2_000  # training tokens of a block that are searched for neighbors
RANKS = (1, 5, 20)  # values of k for the nearest tokens


class Stage2(NamedTuple):
  """Arrays of stage 2 in a block for B images.

  Attributes:
    tokens: input of the stage, after the LayerNorm, float32 [B, N, D].
    responses: a number for each unit and token, [B, N, U], for the score `GREATEST`. For a center, it is log K,
      without a normalization over the centers. If K may be 0 or negative, the depth b − s replaces log K. For a unit
      of an MLP, it is w·x + b before the activation. In a gated MLP, w and b are those of the gate.
    log_kernels: log K of each center for each token, [B, N, U], for the score `CENTERS`. If K may be 0 or negative,
      a Gaussian with the stage's sigma replaces K. None in an MLP.
  """

  tokens: jax.Array
  responses: jax.Array
  log_kernels: jax.Array | None


class Seen(NamedTuple):
  """Arrays that a network computes from B images.

  Attributes:
    logits: [B, classes].
    features: input of the head, [B, F].
    blocks: a `Stage2` for each block, by the block's name. Blocks whose stage 2 is neither a HyperBF nor an MLP are
      left out.
  """

  logits: Any
  features: Any
  blocks: dict[str, Any]


class Fitted(NamedTuple):
  """Training tokens of a block, and centers that k-means finds among them.

  New tokens are compared with them: with the centers in the score `MEANS`, with the training tokens in `TOKENS`.

  Attributes:
    means: the centers of k-means, as many as stage 2 has units, [U, D].
    variance: mean squared distance of a token to the nearest center of k-means, divided by D. It is the variance of
      the Gaussians in the score `MEANS`.
    bank: random training tokens, among which nearest tokens are searched, [M, D].
  """

  means: Any
  variance: Any
  bank: Any


def _observe(model: ImageClassifier, params: Any, images: jax.Array) -> Seen:
  tokens: dict[str, jax.Array] = {}
  found: dict[str, Stage2] = {}
  features = []

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module, path = context.module, context.module.path
    if context.method_name == '__call__' and path[-1:] == ('stage2',):
      tokens[path[0]] = args[0].astype(jnp.float32)
    out = call(*args, **kwargs)
    if isinstance(module, HyperBFCenters) and context.method_name == '_basis':
      points, centers = args
      found[path[0]] = _of_centers(tokens[path[0]], points, centers, out)
    elif context.method_name == '__call__' and path[-2:] == ('stage2', 'hidden'):
      before = tokens[path[0]]
      found[path[0]] = Stage2(before, out[0].astype(jnp.float32).reshape(*before.shape[:2], -1), None)
    elif context.method_name == '__call__' and path == ('head',):
      features.append(args[0])
    return out

  with nn.intercept_methods(intercept):
    logits = unrolled(model).apply({'params': params}, images, train=False)
  return Seen(logits, features[0], found)


def _of_centers(tokens: jax.Array, points: jax.Array, centers: jax.Array, basis: Any) -> Stage2:
  radial = basis.replace(kernel='gaussian', squared_radius=0.0) if basis.kernel in DIRECT else basis
  responses, log_kernels = (by_token(nearness(points, centers, z), tokens.shape[:2]) for z in (basis, radial))
  return Stage2(tokens, responses, log_kernels)


def features(run: ImageRun, images: np.ndarray) -> np.ndarray:
  """Return the inputs of the head [n, F] for n uint8 images."""
  return np.asarray(in_batches(lambda batch: _features(run.model, run.params, run.normalized(batch)), images))


@functools.partial(jax.jit, static_argnums=0)
def _features(model: ImageClassifier, params: Any, images: jax.Array) -> jax.Array:
  return jnp.asarray(_observe(model, params, images).features)


@functools.partial(jax.jit, static_argnums=0)
def _tokens(model: ImageClassifier, params: Any, images: jax.Array) -> dict[str, jax.Array]:
  """Return, by block, about `PER_IMAGE` evenly spaced tokens of each image, [B, tokens, D]."""
  seen = _observe(model, params, images)
  return {
    block: found.tokens[:, :: max(1, found.tokens.shape[1] // PER_IMAGE)] for block, found in seen.blocks.items()
  }


def fit(run: ImageRun, images: np.ndarray, seed: int = 0) -> dict[str, Fitted]:
  """Return k-means centers and training tokens of every block. Return {} if no block has centers or an MLP.

  Args:
    run: the run.
    images: training images, uint8 [n, height, width, channels].
    seed: seed of k-means and of the random tokens.
  """
  shapes = jax.eval_shape(functools.partial(_observe, run.model), run.params, run.normalized(images[:1]))
  tokens = in_batches(lambda batch: _tokens(run.model, run.params, run.normalized(batch)), images)
  return {
    block: _fit(jnp.asarray(tokens[block].reshape(-1, tokens[block].shape[-1])), found.responses.shape[-1], seed)
    for block, found in shapes.blocks.items()
  }


@functools.partial(jax.jit, static_argnums=1)
def _fit(tokens: jax.Array, units: int, seed: int) -> Fitted:
  one, other = jax.random.split(jax.random.key(seed))
  means = kmeans(one, tokens, units)
  variance = squared_distances(tokens, means).min(axis=-1).mean() / tokens.shape[-1]
  return Fitted(means, variance, sample(other, tokens, min(BANK, len(tokens))))


class Scores(NamedTuple):
  """Arrays and scores of n images. A greater score says that an image is more like the training images.

  Attributes:
    logits: [n, classes].
    features: input of the head, [n, F].
    tokens: the scores that come from tokens, as `tokens[score][block]`. Each is an array [n]. Only the score
      `TOKENS` has a column for each k in `RANKS`.
  """

  logits: np.ndarray
  features: np.ndarray
  tokens: dict[str, dict[str, np.ndarray]]


def scores(run: ImageRun, fitted: Mapping[str, Fitted], images: np.ndarray) -> Scores:
  """Compute the scores of uint8 images [n, height, width, channels]. `fitted` is the result of `fit`."""
  found = in_batches(lambda batch: _scores(run.model, run.params, dict(fitted), run.normalized(batch)), images)
  return Scores(*found)


@functools.partial(jax.jit, static_argnums=0)
def _scores(model: ImageClassifier, params: Any, fitted: dict[str, Fitted], images: jax.Array) -> Any:
  seen = _observe(model, params, images)
  found: dict[str, dict[str, jax.Array]] = {}
  for block, stage in seen.blocks.items():
    known = fitted[block]
    around = -squared_distances(stage.tokens, known.means) / (2 * known.variance)
    of_block = {
      GREATEST: greatest(stage.responses),
      MEANS: log_density(around),
      TOKENS: nearest_tokens(stage.tokens, known.bank, RANKS),
    }
    if stage.log_kernels is not None:
      of_block[CENTERS] = log_density(stage.log_kernels)
    for name, values in of_block.items():
      found.setdefault(name, {})[block] = values
  return seen.logits, seen.features, found
