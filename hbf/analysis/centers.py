"""What learned centers stand for: the training patches nearest to each, how often it responds, what it writes."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.analysis.capture import unrolled
from hbf.analysis.trained_run import TrainedRun
from hbf.evaluation.unit_health import Health, awake, health, low_share
from hbf.models.classifier import ImageClassifier

NEAREST = 9
SUMS = ('tokens', 'count', 'awake', 'sum', 'products')  # over a batch
DOUBLED = 0.99  # responses of two centers are so correlated


@dataclasses.dataclass(frozen=True)
class Census:
  """Of the U centers of a block's stage 2 (of all heads), over the M tokens of n images.

  A center's share of a token is K_a / ΣK, whatever normalization the unit has; its even share is 1 / U.

  Attributes:
    health: which centers are dead or constant.
    images: the images that have the tokens nearest to each center, nearest first, each once: int [U, k].
    tokens: which token of them it is, int [U, k].
    log_kernels: log K there, float32 [U, k].
    rate: part of the tokens for which the center is awake (`hbf.evaluation.unit_health.awake`), [U].
    mean: response as it goes into the output, [U].
    deviation: of it from token to token, [U].
    correlation: of the responses of two centers, [U, U]; 0 for those that don't vary.
    awake: the effective number of centers awake for a token, 1 / Σ share², its mean over the tokens.
  """

  health: Health
  images: np.ndarray
  tokens: np.ndarray
  log_kernels: np.ndarray
  rate: np.ndarray
  mean: np.ndarray
  deviation: np.ndarray
  correlation: np.ndarray
  awake: float

  @property
  def low_share(self) -> np.ndarray:
    """Centers that are hardly ever awake, bool [U]; they may be alive."""
    return np.asarray(low_share(self.rate))

  @property
  def doubled(self) -> np.ndarray:
    """Centers that respond as another one of a lower number does, bool [U]."""
    return np.any(np.tril(self.correlation, -1) > DOUBLED, axis=1)


def census(
  subject: TrainedRun, images: np.ndarray, nearest: int = NEAREST, labels: np.ndarray | None = None
) -> dict[str, Census]:
  """Count what the centers of every block do; {} for a network without any.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
    nearest: k, of which images are found for each center; at most n.
    labels: int [n]. With them, a center whose coefficients have no gradient is dead too.
  """
  found: dict[str, list[dict[str, np.ndarray]]] = {}
  for number, seen in subject.looks(images):
    for block in seen.points:
      part = jax.device_get(_reduced(seen.responses[block], seen.log_kernels[block], number >= 0, nearest))
      found.setdefault(block, []).append(part | {'image': number[part['image']]})
  gradients = {} if labels is None or not found else coefficient_gradients(subject, images, labels)
  return {block: _census(parts, nearest, gradients.get(block)) for block, parts in found.items()}


def coefficient_gradients(subject: TrainedRun, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
  """Return the greatest |gradient| of the loss by each center's coefficients, over batches, [U], by block.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels].
    labels: int [n].
  """
  parts = [
    jax.device_get(_gradients(subject.model, subject.params, inputs, labels[number], number >= 0))
    for number, inputs in subject.batches(images)
  ]
  return {block: np.max([part[block] for part in parts], axis=0) for block in parts[0]}


@functools.partial(jax.jit, static_argnums=0)
def _gradients(
  model: ImageClassifier, params: Any, inputs: jax.Array, labels: jax.Array, real: jax.Array
) -> dict[str, jax.Array]:
  """Compute `coefficient_gradients` of a batch, of which those images count that are real."""
  units = {block: part['stage2'] for block, part in params.items() if block.startswith('block')}

  def loss(coefficients: dict[str, jax.Array]) -> jax.Array:
    changed = {
      block: params[block] | {'stage2': units[block] | {'coefficients': c}} for block, c in coefficients.items()
    }
    logits = unrolled(model).apply({'params': params | changed}, inputs, train=False)
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, labels) * real) / real.sum()

  gradients = jax.grad(loss)({block: unit['coefficients'] for block, unit in units.items()})
  return {block: jnp.abs(g).max(axis=-1).reshape(-1) for block, g in gradients.items()}


@functools.partial(jax.jit, static_argnums=3)
def _reduced(responses: jax.Array, log_kernels: jax.Array, real: jax.Array, nearest: int) -> dict[str, jax.Array]:
  """What is kept of a batch, [B, N, U], of which those images count that are real: sums, and of each center the
  nearest images, [U, k].
  """
  units = log_kernels.shape[-1]
  share = jax.nn.softmax(log_kernels, axis=-1)
  counted = real[:, None, None]
  flat = jnp.where(counted, responses, 0).reshape(-1, units)
  of_images = jnp.where(counted[:, 0], log_kernels.max(axis=1), -jnp.inf)
  best, image = jax.lax.top_k(of_images.T, min(nearest, len(log_kernels)))
  token = jnp.argmax(log_kernels, axis=1)  # of each image the nearest
  return {
    'image': image,
    'token': jnp.take_along_axis(token.T, image, axis=1),
    'log_kernel': best,
    'count': jnp.sum(awake(log_kernels) & counted, axis=(0, 1)),
    'awake': jnp.sum(jnp.where(real[:, None], 1 / jnp.sum(share**2, axis=-1), 0)),
    'peak': jnp.abs(flat).max(axis=0),
    'sum': flat.sum(axis=0),
    'products': flat.T @ flat,
    'tokens': real.sum() * log_kernels.shape[1],
  }


def _census(parts: Sequence[Mapping[str, np.ndarray]], nearest: int, gradient: np.ndarray | None) -> Census:
  together = {
    name: np.concatenate([part[name] for part in parts], axis=1) for name in ('image', 'token', 'log_kernel')
  }
  order = np.argsort(-together['log_kernel'], axis=1, kind='stable')[:, :nearest]
  image, token, log_kernel = (np.take_along_axis(z, order, axis=1) for z in together.values())
  sums: dict[str, Any] = {name: np.sum([part[name] for part in parts], axis=0, dtype=np.float64) for name in SUMS}
  tokens, count, effective, total, products = (sums[name] for name in SUMS)
  mean: np.ndarray = total / tokens
  covariance = products / tokens - np.outer(mean, mean)
  deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
  scale = np.outer(deviation, deviation)
  correlation = np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)
  peak = np.max([part['peak'] for part in parts], axis=0)
  found = jax.device_get(health(peak, mean, deviation, gradient))
  share = count / tokens, mean, deviation, correlation, float(effective / tokens)
  return Census(found, image, token, log_kernel, *share)


def purity(labels: np.ndarray, found: Census) -> np.ndarray:
  """Return for each center the share of the commonest class among its nearest images, [U]."""
  classes = labels[found.images]
  return np.array([np.bincount(row).max() / len(row) for row in classes])


def random_tokens(
  subject: TrainedRun, images: np.ndarray, found: Mapping[str, Census], nearest: int = NEAREST
) -> dict[str, Census]:
  """Take the census with random tokens in the place of the centers: a null for what training made of them.

  The centers of one block at a time are replaced, so that the tokens that reach it are those of the network. The
  image that a token is from isn't counted among the nearest.

  Args:
    subject: the run.
    images: those that the census is of.
    found: of all blocks.
    nearest: k, of which images are found for each token.
  """
  random = np.random.default_rng(0)
  rows, columns = subject.grid
  nulls = {}
  for block, of_block in found.items():
    own = random.integers(len(images), size=len(of_block.rate))
    token = random.integers(subject.first_patch + rows * columns, size=len(own))
    params = _placed(subject, images, {block: (own, token)})
    null = census(subject.with_params(params), images, nearest + 1)[block]
    kept = np.argsort(null.images == own[:, None], axis=1, kind='stable')[:, :nearest]
    near: dict[str, Any] = {
      name: np.take_along_axis(getattr(null, name), kept, axis=1) for name in ('images', 'tokens', 'log_kernels')
    }
    nulls[block] = dataclasses.replace(null, **near)
  return nulls


def overlap(one: Census, other: Census) -> np.ndarray:
  """Of each center, which part of its nearest images is so in both: [U]."""
  shared = (one.images[:, :, None] == other.images[:, None]).any(axis=2)
  return shared.mean(axis=1)


def projected(subject: TrainedRun, images: np.ndarray, found: Mapping[str, Census]) -> Any:
  """Move every center onto the training token nearest to it (after Chen et al. 2019, ProtoPNet).

  Args:
    subject: the run.
    images: those that the census is of.
    found: of all blocks.

  Returns:
    The changed parameters.
  """
  nearest = {block: (of_block.images[:, 0], of_block.tokens[:, 0]) for block, of_block in found.items()}
  return _placed(subject, images, nearest)


def _placed(subject: TrainedRun, images: np.ndarray, chosen: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Any:
  """Return parameters with the centers of blocks at tokens: of each center which image and which token, int [U]."""
  wanted = np.unique(np.concatenate([image for image, _ in chosen.values()]))
  parts = [(number >= 0, seen.points) for number, seen in subject.looks(images[wanted])]
  params = dict(subject.params)
  for block, (image, token) in chosen.items():
    points = np.concatenate([np.asarray(part[block])[real] for real, part in parts])
    tokens = points[np.searchsorted(wanted, image), token]
    unit = params[block]['stage2']
    heads, centers, dimensions = unit['centers'].shape
    of_heads = tokens.reshape(heads, centers, heads, dimensions)  # a head sees its own dimensions
    moved = jnp.asarray(of_heads[np.arange(heads), :, np.arange(heads)])
    params[block] = params[block] | {'stage2': unit | {'centers': moved}}
  return params


def written(subject: TrainedRun, block: str) -> np.ndarray:
  """What each center's coefficients say to the head past all later blocks, [U, classes], of mean 0 over the classes.

  The last norm's scale counts, its division doesn't: the numbers tell classes apart, they aren't logits.
  """
  params = subject.params
  coefficients = np.asarray(params[block]['stage2']['coefficients'], np.float64)
  coefficients = coefficients.reshape(-1, coefficients.shape[-1])
  centered = coefficients - coefficients.mean(axis=1, keepdims=True)
  scores = centered * np.asarray(params['norm']['scale']) @ np.asarray(params['head']['kernel'], np.float64)
  return scores - scores.mean(axis=1, keepdims=True)


def crops(subject: TrainedRun, images: np.ndarray, tokens: np.ndarray, around: int = 1) -> np.ndarray:
  """The patches of tokens with what is around them, uint8 [..., side, side, channels]; gray beyond the image.

  Args:
    subject: the run.
    images: uint8 [..., height, width, channels].
    tokens: of each image one, int [...]; a class token has the middle of its image.
    around: how many patches are shown to each side of it.
  """
  rows, columns = subject.grid
  patch, places = subject.patch, np.asarray(tokens) - subject.first_patch
  places = np.where(places < 0, rows // 2 * columns + columns // 2, places)
  flat = images.reshape(-1, *images.shape[-3:])
  margin = around * patch
  padded = np.pad(flat, ((0, 0), (margin, margin), (margin, margin), (0, 0)), constant_values=128)
  side = patch + 2 * margin
  cut = [
    image[(row := place // columns * patch) : row + side, (column := place % columns * patch) : column + side]
    for image, place in zip(padded, places.ravel(), strict=True)
  ]
  return np.stack(cut).reshape(*places.shape, side, side, images.shape[-1])
