"""Meaning of the learned centers: their nearest training patches, their responses, and the classes they favor."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.unit_params import directions
from hbf.evaluation.unit_health import Health, awake, doubled, health, low_share
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier

NEAREST = 9
SUMS = ('tokens', 'count', 'awake', 'sum', 'products')  # keys that are summed over the batches


@dataclasses.dataclass(frozen=True)
class Census:
  """Statistics of the U centers in stage 2 of a block, over the tokens of n images.

  U counts the centers of all heads. The share of center a for a token is K_a / ΣK, for every normalization. On
  average it is 1 / U. A center is awake for a token if its share is at least 2 / U. For ball kernels and the other
  kernels in `hbf.ops.kernels.DIRECT`, the depth b − s replaces log K.

  Attributes:
    health: the dead and the constant centers.
    images: indices of the k images nearest to each center, the nearest first, int [U, k]. Only the nearest token of
      an image counts.
    tokens: index of the nearest token in each of these images, int [U, k].
    log_kernels: log K of the nearest token in each of these images, float32 [U, k].
    responses: response R to this token, float32 [U, k].
    rate: fraction of the tokens for which the center is awake (`hbf.evaluation.unit_health.awake`), [U].
    mean: mean over the tokens of the response R, [U].
    deviation: standard deviation over the tokens of the response, [U].
    correlation: correlation over the tokens of the responses of two centers, [U, U]. It is 0 for a constant response.
    awake: effective number of centers that respond to a token. It is the mean of 1 / Σ_a share_a² over the tokens.
  """

  health: Health
  images: np.ndarray
  tokens: np.ndarray
  log_kernels: np.ndarray
  responses: np.ndarray
  rate: np.ndarray
  mean: np.ndarray
  deviation: np.ndarray
  correlation: np.ndarray
  awake: float

  @property
  def low_share(self) -> np.ndarray:
    """True for centers that are awake for fewer than one token in a thousand, bool [U]. They need not be dead."""
    return np.asarray(low_share(self.rate))

  @property
  def doubled(self) -> np.ndarray:
    """True for centers whose responses correlate above 0.99 with the responses of an earlier center, bool [U]."""
    return np.asarray(doubled(self.correlation))


def census(
  run: TrainedRun, images: np.ndarray, nearest: int = NEAREST, labels: np.ndarray | None = None
) -> dict[str, Census]:
  """Compute the statistics of the centers of every block. Return {} if the network has no centers.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
    nearest: number of nearest images to find for each center. If there are fewer images, all are found.
    labels: the true classes, int [n]. If they are given, a center also counts as dead if its coefficient gets no
      gradient.
  """
  nearest = min(nearest, len(images))  # else copies that fill up a batch would be among them
  found: dict[str, list[dict[str, np.ndarray]]] = {}
  sums: dict[str, dict[str, np.ndarray]] = {}
  for number, activations in run.capture_batches(images):
    for block in activations.points:
      responses, log_kernels = activations.responses[block], activations.log_kernels[block]
      part = jax.device_get(_reduced(responses, log_kernels, number >= 0, nearest))
      total = sums.setdefault(block, dict.fromkeys(SUMS, np.zeros(())))
      sums[block] = {name: total[name] + part.pop(name) for name in SUMS}  # a list of the products [U, U] would grow
      found.setdefault(block, []).append(part | {'image': number[part['image']]})
  gradients = {} if labels is None or not found else coefficient_gradients(run, images, labels)
  return {block: _census(parts, sums[block], nearest, gradients.get(block)) for block, parts in found.items()}


def coefficient_gradients(run: TrainedRun, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
  """Return for each block the greatest |gradient| of the loss with respect to each center's coefficient, [U].

  The loss is the mean over a batch of images. The greatest value is taken over the coefficient's entries and over the
  batches.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
    labels: the true classes, int [n].
  """
  parts = [
    jax.device_get(_gradients(run.model, run.params, inputs, labels[number], number >= 0))
    for number, inputs in run.batches(images)
  ]
  return {block: np.max([part[block] for part in parts], axis=0) for block in parts[0]}


@functools.partial(jax.jit, static_argnums=0)
def _gradients(
  model: ImageClassifier, params: Any, inputs: jax.Array, labels: jax.Array, real: jax.Array
) -> dict[str, jax.Array]:
  """Compute `coefficient_gradients` for one batch. Images with `real` False are padding."""
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
  """Return what `_census` needs from one batch: sums over its tokens, and the nearest images of each center.

  Both `responses` and `log_kernels` are [B, N, U]. Images with `real` False are padding.
  """
  units = log_kernels.shape[-1]
  share = jax.nn.softmax(log_kernels, axis=-1)
  counted = real[:, None, None]
  flat = jnp.where(counted, responses, 0).reshape(-1, units)
  per_image = jnp.where(counted[:, 0], log_kernels.max(axis=1), -jnp.inf)
  best, image = jax.lax.top_k(per_image.T, min(nearest, len(log_kernels)))
  token = jnp.argmax(log_kernels, axis=1)  # the nearest token of each image
  return {
    'image': image,
    'token': jnp.take_along_axis(token.T, image, axis=1),
    'log_kernel': best,
    'response': jnp.take_along_axis(jnp.take_along_axis(responses, token[:, None], axis=1)[:, 0].T, image, axis=1),
    'count': jnp.sum(awake(log_kernels) & counted, axis=(0, 1)),
    'awake': jnp.sum(jnp.where(real[:, None], 1 / jnp.sum(share**2, axis=-1), 0)),
    'peak': jnp.abs(flat).max(axis=0),
    'sum': flat.sum(axis=0),
    'products': flat.T @ flat,
    'tokens': real.sum() * log_kernels.shape[1],
  }


def _census(
  parts: Sequence[Mapping[str, np.ndarray]], sums: Mapping[str, Any], nearest: int, gradient: np.ndarray | None
) -> Census:
  """Combine the results of `_reduced` for all batches into a census.

  Args:
    parts: the results, without the entries in `SUMS`.
    sums: the sums over the batches of the entries in `SUMS`, in float64.
    nearest: number of nearest images to find for each center.
    gradient: the result of `coefficient_gradients` for the block, [U]. None: it is unknown.
  """
  names = ('image', 'token', 'log_kernel', 'response')
  joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in names}
  order = np.argsort(-joined['log_kernel'], axis=1, kind='stable')[:, :nearest]
  image, token, log_kernel, response = (np.take_along_axis(z, order, axis=1) for z in joined.values())
  tokens, count, effective, total, products = (sums[name] for name in SUMS)
  mean: np.ndarray = total / tokens
  covariance = products / tokens - np.outer(mean, mean)
  deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
  scale = np.outer(deviation, deviation)
  correlation = np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)
  peak = np.max([part['peak'] for part in parts], axis=0)
  found = jax.device_get(health(peak, mean, deviation, gradient))
  share = count / tokens, mean, deviation, correlation, float(effective / tokens)
  return Census(found, image, token, log_kernel, response, *share)


def purity(labels: np.ndarray, found: Census) -> np.ndarray:
  """Return for each center the share of the most common class among its nearest images, [U]."""
  classes = labels[found.images]
  return np.array([np.bincount(row).max() / len(row) for row in classes])


def random_tokens(
  run: TrainedRun, images: np.ndarray, found: Mapping[str, Census], nearest: int = NEAREST
) -> dict[str, Census]:
  """Compute the census with random tokens of the images in place of the centers, as a control for `census`.

  For the census of a block, only the centers of this block are replaced. So the block has the same inputs as in
  `found`. The nearest images of a random token do not include the token's own image.

  Args:
    run: the run.
    images: the images of the census `found`.
    found: the census of every block with the run's own centers.
    nearest: number of nearest images to find for each random token.
  """
  random = np.random.default_rng(0)
  nulls = {}
  for block, block_census in found.items():
    rows, columns, _ = run.patches_of(block)
    own = random.integers(len(images), size=len(block_census.rate))
    token = random.integers(run.first_patch + rows * columns, size=len(own))
    params = move_centers(run, images, {block: (own, token)})
    null = census(run.with_params(params), images, nearest + 1)[block]
    kept = np.argsort(null.images == own[:, None], axis=1, kind='stable')[:, : min(nearest, len(images) - 1)]
    near: dict[str, Any] = {
      name: np.take_along_axis(getattr(null, name), kept, axis=1)
      for name in ('images', 'tokens', 'log_kernels', 'responses')
    }
    nulls[block] = dataclasses.replace(null, **near)
  return nulls


def overlap(one: Census, other: Census) -> np.ndarray:
  """Return the fraction of each center's nearest images in `one` that are also among its nearest in `other`, [U].

  For example, `other` is the census of the same images with noise.
  """
  shared = (one.images[:, :, None] == other.images[:, None]).any(axis=2)
  return shared.mean(axis=1)


def project_centers(run: TrainedRun, images: np.ndarray, found: Mapping[str, Census]) -> Any:
  """Move every center onto the token of the images that is nearest to it, as in ProtoPNet (Chen et al. 2019).

  Args:
    run: the run.
    images: the images of the census `found`.
    found: the census of every block.

  Returns:
    The parameters with the moved centers.
  """
  nearest = {block: (c.images[:, 0], c.tokens[:, 0]) for block, c in found.items()}
  return move_centers(run, images, nearest)


def move_centers(run: TrainedRun, images: np.ndarray, chosen: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Any:
  """Return the parameters with the centers of some blocks moved onto tokens of images.

  Args:
    run: the run.
    images: uint8 [n, height, width, channels].
    chosen: two arrays int [U] for each of these blocks. For each center, they have the index of an image and the
      index of a token in this image.
  """
  wanted = np.unique(np.concatenate([image for image, _ in chosen.values()]))
  tokens: dict[str, np.ndarray] = {}
  for number, activations in run.capture_batches(images[wanted]):
    for block, (image, token) in chosen.items():
      row = np.searchsorted(wanted, image) - number[0]  # in this batch
      own, points = (row >= 0) & (row < len(number)), np.asarray(activations.points[block])
      tokens.setdefault(block, np.zeros((len(image), points.shape[-1]), np.float32))[own] = points[
        row[own], token[own]
      ]
  params = dict(run.params)
  for block, found in tokens.items():
    unit = params[block]['stage2']
    heads, centers, dimensions = unit['centers'].shape
    per_head = found.reshape(heads, centers, heads, dimensions)  # a head sees its own dimensions
    places = jnp.asarray(per_head[np.arange(heads), :, np.arange(heads)])
    params[block] = params[block] | {'stage2': unit | {'centers': places}}
  return params


def class_scores(run: TrainedRun, block: str, found: Census) -> np.ndarray:
  """Apply the final LayerNorm and the head to what each center adds to a token. Return the scores [U, classes].

  A center with linear coefficients may respond less to the nearest tokens than to others, with a negative response.
  Then it subtracts its coefficients. The block's census `found` has both responses.

  Later blocks and all biases are left out. A LayerNorm does not divide by the standard deviation, because that
  differs between tokens. The scores of a center therefore rank the classes, but are not logits. Their mean over the
  classes is 0. If tokens are merged after the block, the scores are the means over the tokens that become one.
  """
  params: Any = run.params
  sign = np.where(found.responses.mean(axis=1) < found.mean, -1, 1)
  added = directions(params, block) * sign[:, None]
  for later in run.model.trunk.merge:
    if later > int(block.removeprefix('block')):
      # The layers are linear here. So the mean over four tokens is a quarter of what all four add together.
      four = np.tile(added, 4) / 4
      added = _through(four, params[f'norm_merge{later}'], params[f'merge{later}'])
  scores = _through(added, params['norm'], params['head'])
  return scores - scores.mean(axis=1, keepdims=True)


def _through(added: np.ndarray, norm: Any, dense: Any) -> np.ndarray:
  """Apply a LayerNorm without its divisor and a dense layer, both without biases, to vectors [U, D]."""
  centered = added - added.mean(axis=1, keepdims=True)
  return centered * np.asarray(norm['scale'], np.float64) @ np.asarray(dense['kernel'], np.float64)
