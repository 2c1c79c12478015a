"""Measurement of associative memories: the completion of damaged images, and the capacity for random patterns.

python -m hbf.analysis.memory_study                # CIFAR-10 and random patterns: less than an hour on a CPU
python -m hbf.analysis.memory_study --report       # draws the table and the picture again, from stored numbers

A memory is a function that completes damaged patterns. Its arguments are the damaged patterns [N, D], the stored
patterns [A, D], the mask of known coordinates [D] (1: known, 0: hidden) and sigma. An image is a pattern of D values.

docs/research/memory.md explains the results.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.analysis.memory import retrieve
from hbf.analysis.report.memory_report import draw, table
from hbf.analysis.study import Record, Study
from hbf.data.datasets import load
from hbf.data.pipeline.host import read_many
from hbf.errors import in_one_line
from hbf.ops.basis import RadialBasis

SEEDS = (0, 1, 2)
STORED = (100, 1_000, 10_000, 50_000)
QUERIES = 200  # images to damage for the result. As many other images are damaged for the choice of sigma
NOISE = 1.0  # standard deviation of the noise, in standard deviations of a pixel
SIGMAS = 2.0 ** np.arange(-3, 4.5, 0.5)  # the unit is √D/16 times the root mean square of a pixel
HIDDEN, STEPS, BATCH, RATE = 512, 1_500, 128, 1e-3  # the autoencoder's units and training
DIMENSIONS = (2, 4, 6, 8, 10, 12, 14, 16)
MOST = 2**17  # greatest number of patterns that is tried
PERTURBATION = 0.3  # norm of the noise on a random pattern of norm 1
RETRIEVED = 0.99  # fraction of the patterns that a memory must retrieve at its capacity


class Damage(NamedTuple):
  """A kind of damage to images.

  Attributes:
    known: 1 for a known pixel, 0 for a hidden pixel, [D].
    noise: standard deviation of the noise that is added to all pixels, divided by the standard deviation of a pixel.
  """

  known: np.ndarray
  noise: float


def damages(shape: tuple[int, ...], seed: int) -> dict[str, Damage]:
  """Return the kinds of damage by name, for images of a shape [height, width, channels].

  `seed` determines the pixels that the damage '90% of pixels hidden' hides.
  """
  height, size = shape[0], int(np.prod(shape))
  rows = np.broadcast_to((np.arange(height) < height // 2)[:, None, None], shape)
  pixels = np.broadcast_to(np.random.default_rng(seed).random(shape[:2] + (1,)) < 0.1, shape)
  return {
    'lower half hidden': Damage(rows.reshape(-1).astype(np.float32), 0.0),
    '90% of pixels hidden': Damage(pixels.reshape(-1).astype(np.float32), 0.0),
    'noise': Damage(np.ones(size, np.float32), NOISE),
  }


# The result is the completed patterns [N, D].
Memory = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


@jax.jit
def hyperbf_of_known(damaged: jax.Array, stored: jax.Array, known: jax.Array, sigma: Any) -> jax.Array:
  """Apply one step of HyperBF retrieval, with distances over the known pixels only."""
  return retrieve(damaged, stored, RadialBasis('gaussian', sigma, metric='diagonal', weights=known))


@jax.jit
def hyperbf_of_all(damaged: jax.Array, stored: jax.Array, known: jax.Array, sigma: Any) -> jax.Array:
  """Apply one step of HyperBF retrieval, with distances over all pixels.

  A hidden pixel has the value 0, which is the mean over the training images. `known` is not used.
  """
  del known
  return retrieve(damaged, stored, RadialBasis('gaussian', sigma))


@jax.jit
def hopfield(damaged: jax.Array, stored: jax.Array, known: jax.Array, sigma: Any) -> jax.Array:
  """Apply one step of a modern Hopfield network (Ramsauer et al. 2021).

  The weight of a stored pattern x_i is softmax_i(x · x_i / σ²) for a damaged pattern x. `known` is not used.
  """
  del known  # a hidden pixel is 0, so it adds nothing to a product
  return jax.nn.softmax(damaged @ stored.T / sigma**2, axis=-1) @ stored


@jax.jit
def hopfield_of_norm_1(damaged: jax.Array, stored: jax.Array, known: jax.Array, sigma: Any) -> jax.Array:
  """Apply one step of a modern Hopfield network, with patterns that are scaled to norm 1 for their dot products.

  The weight of a stored pattern x_i is softmax_i(D cos(x, x_i) / σ²) for a damaged pattern x of D values. `known` is
  not used.
  """
  del known
  directions, keys = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (damaged, stored))
  return jax.nn.softmax(stored.shape[-1] * directions @ keys.T / sigma**2, axis=-1) @ stored


@jax.jit
def nearest(damaged: jax.Array, stored: jax.Array, known: jax.Array, sigma: Any) -> jax.Array:
  """Return for each damaged pattern the stored pattern that is nearest in the known pixels. `sigma` is not used."""
  del sigma
  return stored[_nearest(damaged * known, stored * known)]


MEMORIES: dict[str, Memory] = {
  'HyperBF, metric of the known pixels': hyperbf_of_known,
  'HyperBF, identity metric': hyperbf_of_all,
  'modern Hopfield network': hopfield,
  'modern Hopfield network, norm 1': hopfield_of_norm_1,
  'nearest neighbor in the known pixels': nearest,
}
SCALED = [*MEMORIES][:4]  # the memories that have a sigma
AUTOENCODER = 'MLP autoencoder'


def _nearest(points: jax.Array, stored: jax.Array) -> jax.Array:
  return jnp.argmax(points @ stored.T - jnp.sum(stored**2, axis=-1) / 2, axis=-1)


def images_of(data_dir: str) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
  """Return the images of CIFAR-10 by split, float32 [n, D], and the shape of an image.

  The mean training image is subtracted. The values are then divided by the standard deviation of the training pixels.
  """
  dataset = load(name='cifar10', dir=data_dir, root='', image_size=32, download=False)
  rows = {}
  for split in ('train', 'test'):
    source = dataset.splits[split]
    found, _ = read_many(source, np.arange(len(source)), dataset.image_shape)
    rows[split] = found.reshape(len(found), -1).astype(np.float32) / 255
  mean, deviation = rows['train'].mean(axis=0), rows['train'].std()
  return {split: (z - mean) / deviation for split, z in rows.items()}, dataset.image_shape


class Autoencoder(nn.Module):
  """An MLP that maps a damaged image and the mask of its known pixels to the undamaged image."""

  @nn.compact
  def __call__(self, damaged: jax.Array, known: jax.Array) -> jax.Array:
    """Map damaged images [N, D] to completed images [N, D]. `known` [N, D] is 1 for a known pixel, else 0."""
    hidden = nn.relu(nn.Dense(HIDDEN)(jnp.concatenate([damaged, known], axis=-1)))
    return nn.Dense(damaged.shape[-1])(hidden)


def train_autoencoder(stored: jax.Array, kinds: Sequence[Damage], seed: int) -> Memory:
  """Train an autoencoder on damaged copies of the stored images. Return it as a memory.

  Each copy has a random kind of damage from `kinds`. The memory ignores its arguments `stored` and `sigma`.
  """
  model, optimizer = Autoencoder(), optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
  params = model.init(jax.random.key(seed), stored[:1], stored[:1])
  known, noise = jnp.stack([kind.known for kind in kinds]), jnp.asarray([kind.noise for kind in kinds])

  @jax.jit
  def step(params: Any, state: Any, number: jax.Array) -> tuple[Any, Any]:
    chosen, kind, noisy = jax.random.split(jax.random.fold_in(jax.random.key(seed + 1), number), 3)
    images = stored[jax.random.randint(chosen, (BATCH,), 0, len(stored))]
    kinds_of = jax.random.randint(kind, (BATCH,), 0, len(known))
    mask = known[kinds_of]
    damaged = (images + noise[kinds_of][:, None] * jax.random.normal(noisy, images.shape)) * mask
    gradient = jax.grad(lambda params: jnp.mean((jnp.asarray(model.apply(params, damaged, mask)) - images) ** 2))(
      params
    )
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for number in range(STEPS):
    params, state = step(params, state, jnp.asarray(number))
  return jax.jit(lambda damaged, _, known, __: model.apply(params, damaged, jnp.broadcast_to(known, damaged.shape)))


def complete(images: dict[str, np.ndarray], shape: tuple[int, ...], count: int, seed: int) -> list[dict[str, Any]]:
  """Measure how well memories with `count` stored images complete damaged images.

  `images` and `shape` are the results of `images_of`.

  Returns:
    A row for each memory and kind of damage. 'retrieved' is the percentage of stored images that are retrieved: the
    completed image is nearer to its original than to any other stored image. 'error' and 'error_unseen' are root mean
    square errors for stored images and for images that are not stored.
  """
  random = np.random.default_rng(seed)
  stored = jnp.asarray(images['train'][random.permutation(len(images['train']))[:count]])
  tested = random.permutation(count)
  half = min(QUERIES, count // 2)
  others = random.permutation(len(images['test']))[: 2 * QUERIES]
  # Each pair has images for the choice of sigma, and images for the result. The images of the first pair are stored.
  parts = [
    (stored[tested[:half]], stored[tested[half:][:QUERIES]]),
    tuple(jnp.asarray(images['test'][rows]) for rows in np.split(others, 2)),
  ]
  kinds = damages(shape, seed)
  memories = MEMORIES | {AUTOENCODER: train_autoencoder(stored, [*kinds.values()], seed)}
  rows = []
  for name, damage in kinds.items():
    for label, memory in memories.items():
      apply = functools.partial(_apply, memory, stored, damage, seed)
      sigmas = SIGMAS * np.sqrt(stored.shape[1]) / 16 if label in SCALED else [1.0]
      best = [
        min(sigmas, key=lambda sigma, choice=choice: _error(apply(choice, sigma), choice)) for choice, _ in parts
      ]
      completed, of_unseen = (apply(result, sigma) for (_, result), sigma in zip(parts, best, strict=True))
      right = np.asarray(_nearest(completed, stored)) == tested[half:][:QUERIES]
      rows.append(
        {
          'stored': count,
          'seed': seed,
          'damage': name,
          'memory': label,
          'sigma': float(best[0]),
          'sigma_unseen': float(best[1]),
          'retrieved': 100 * float(np.mean(right)),
          'error': _error(completed, parts[0][1]),
          'error_unseen': _error(of_unseen, parts[1][1]),
        }
      )
  return rows


def _apply(
  memory: Memory, stored: jax.Array, damage: Damage, seed: int, patterns: jax.Array, sigma: float
) -> jax.Array:
  """Damage `patterns` [N, D], let the memory complete them, and return the completed patterns [N, D]."""
  known = jnp.asarray(damage.known)
  noise = damage.noise * jax.random.normal(jax.random.key(seed), patterns.shape)
  return memory((patterns + noise) * known, stored, known, sigma)


def _error(completed: jax.Array, patterns: jax.Array) -> float:
  return float(jnp.sqrt(jnp.mean((completed - patterns) ** 2)))


PATTERNS = ('norm 1', 'normal')


def capacity(dimensions: int, patterns: str, memory: Memory, seed: int) -> int:
  """Return the greatest number of random patterns of which a memory retrieves 99%.

  Powers of 2 up to `MOST` are tried. Noise is added to a pattern. The pattern counts as retrieved if the memory's
  output is nearer to it than to any other stored pattern.

  Args:
    dimensions: D, the number of dimensions of a pattern.
    patterns: 'norm 1' for patterns on the unit sphere, 'normal' for normal coordinates of variance 1/D.
    memory: the memory. For each number of patterns, its sigma is the best of several values.
    seed: the seed of the patterns and the noise.
  """
  most = 0
  for number in 2 ** np.arange(1, int(np.log2(MOST)) + 1):
    if not _retrieves(int(number), dimensions, patterns, memory, seed):
      break
    most = int(number)
  return most


def _retrieves(number: int, dimensions: int, patterns: str, memory: Memory, seed: int) -> bool:
  random = np.random.default_rng((seed, number, dimensions))
  stored = random.normal(size=(number, dimensions)) / np.sqrt(dimensions)
  if patterns == 'norm 1':
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
  chosen = random.permutation(number)[:1_000]
  noise = random.normal(size=(len(chosen), dimensions))
  noise *= PERTURBATION / np.linalg.norm(noise, axis=1, keepdims=True)
  store, points = jnp.asarray(stored, jnp.float32), jnp.asarray(stored[chosen] + noise, jnp.float32)
  known = jnp.ones(dimensions)
  for sigma in 2.0 ** np.arange(-5, 1, 0.5):
    # The points are split into parts, so that the weights of a part fit into the computer's memory.
    outputs = [memory(part, store, known, sigma) for part in jnp.array_split(points, max(1, number // 2**14))]
    if np.mean(np.asarray(_nearest(jnp.concatenate(outputs), store)) == chosen) >= RETRIEVED:
      return True
  return False


def _measure_all(data_dir: str, record: Record) -> None:
  images, shape = images_of(data_dir)
  completions = [row for count in STORED for seed in SEEDS for row in complete(images, shape, count, seed)]
  memories = {'HyperBF': hyperbf_of_all, 'modern Hopfield network': hopfield}
  capacities = [
    {'dimensions': d, 'patterns': p, 'memory': label, 'seed': seed, 'capacity': capacity(d, p, memory, seed)}
    for d in DIMENSIONS
    for p in PATTERNS
    for label, memory in memories.items()
    for seed in SEEDS
  ]
  record.save({'data': 'cifar10', 'completions': completions, 'capacities': capacities})


@in_one_line
def main(arguments: Sequence[str] | None = None) -> int:
  """Run the command and return its exit status."""
  study = Study('memory', draw, table, keys=('completions', 'capacities'))
  parser = study.parser('hbf.analysis.memory_study', __doc__)
  parser.add_argument('--data_dir', default='~/tensorflow_datasets', help='TFDS folder with CIFAR-10')
  flags = parser.parse_args(arguments)
  return study.run(flags, functools.partial(_measure_all, flags.data_dir))


if __name__ == '__main__':
  sys.exit(main())
