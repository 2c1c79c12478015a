"""Split CIFAR-10: training on five tasks of two classes, one after the other, and what the network forgets.

All ten classes are possible answers all the time (class-incremental). With replay, half of the images of a step come
from a memory of images of earlier tasks (experience replay, Chaudhry et al. 2019).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from hbf.config.datasets import get_config
from hbf.config.resolve import resolve
from hbf.data.augment.batches import normalize
from hbf.evaluation.batches import in_batches
from hbf.models.build import build_model
from hbf.models.classifier import ImageClassifier
from hbf.nn.hyperbf import HyperBFCenters
from hbf.ops.hyperbf import nearness

TASK = 2  # classes of a task
MEMORY = 500  # images in the memory of replay
BATCH = 128
RATES = (1e-3, 3e-3, 1e-2)
HELD_OUT, TESTED = 200, 500  # images of a class that judge the learning rates, and test images of a class
TRAINED, TRIED = 2_000, 300  # training images of a class, in the result and in a trial of a learning rate
TRIAL_SEED = 100

Pair = tuple[np.ndarray, np.ndarray]  # images and labels
Splits = Mapping[str, Pair]  # by the name of the split


class Arm(NamedTuple):
  """A kind of network in the comparison.

  Attributes:
    model: the name of the model in a config.
    top: number of centers that respond to a token, in each stage 2. 0: all.
  """

  model: str
  top: int = 0


ARMS = {
  'MLP': Arm('vit'),
  'HyperBF': Arm('softmax+hyperbf'),
  'HyperBF, top 8 of 256': Arm('softmax+hyperbf', 8),
}


def keep_top(count: int) -> Callable[..., Any]:
  """Return an interceptor for `nn.intercept_methods`: only the `count` nearest centers of a head respond to a token.

  The responses of all other centers are 0, and so are their gradients. Centers at equal distances count as a single
  center, so more than `count` centers may respond.
  """
  kept: list[jax.Array] = []

  def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = method(*args, **kwargs)
    if isinstance(context.module, HyperBFCenters) and context.method_name == '_basis':
      points, centers = args
      kept[:] = [_is_among(nearness(points, centers, out), count)]
    elif isinstance(context.module, HyperBFCenters) and context.method_name == '_factors':
      return kept.pop().astype(jnp.float32) * (1.0 if out is None else out)
    return out

  return intercept


def _is_among(values: jax.Array, count: int) -> jax.Array:
  values = jax.lax.stop_gradient(values)
  rest = values  # on a CPU, this loop is faster than a sort
  for _ in range(count - 1):
    rest = jnp.where(rest == rest.max(axis=-1, keepdims=True), -jnp.inf, rest)
  return values >= rest.max(axis=-1, keepdims=True)


@functools.cache
def make_model(name: str) -> ImageClassifier:
  """Return a small network for images of 32×32 pixels: 16 tokens, two blocks. `name` is the model in a config."""
  config = get_config(f'cifar10:model={name},recipe=laptop')
  config.model.update(width=64, depth=2, heads=4, patch=8, stem='patch', pool='mean')
  if name == 'vit':
    config.model.stage2.activation = 'gelu'
  return build_model(resolve(config).model, 10)


class Network:
  """A network, with compiled functions that compute its logits and take a step of training."""

  def __init__(self, arm: Arm, mean: Sequence[float], std: Sequence[float]) -> None:
    """Make the functions. JAX compiles them at their first call.

    Args:
      arm: the kind of network.
      mean: the mean of each channel of the training images, with white as 1.
      std: the standard deviation of each channel, in the same units.
    """
    model = make_model(arm.model)

    def logits(params: Any, images: jax.Array) -> jax.Array:
      with nn.intercept_methods(keep_top(arm.top) if arm.top else _unchanged):
        return jnp.asarray(model.apply({'params': params}, normalize(images, mean, std), train=False))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
      return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array, rate: Any) -> tuple[Any, Any]:
      updates, state = optax.scale_by_adam().update(jax.grad(loss)(params, images, labels), state)
      return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    self._init = jax.jit(lambda key, images: model.init(key, normalize(images, mean, std), train=False)['params'])
    self.logits, self.step = jax.jit(logits), step

  def start(self, images: np.ndarray, seed: int) -> tuple[Any, Any]:
    """Return initial parameters and the state of Adam. The centers of a HyperBF start at random tokens of the images.

    Args:
      images: uint8 [n, height, width, channels].
      seed: seed of the parameters.
    """
    params = self._init(jax.random.key(seed), images)
    return params, optax.scale_by_adam().init(params)


def _unchanged(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
  del context
  return method(*args, **kwargs)


class Images(NamedTuple):
  """Images, uint8 [n, height, width, channels], and their labels, int [n].

  Labels 0 and 1 are the classes of the first task, 2 and 3 of the second, and so on.
  """

  images: np.ndarray
  labels: np.ndarray

  def of_classes(self, first: int, last: int) -> 'Images':
    """Return the images of the classes from `first` to below `last`."""
    rows = (self.labels >= first) & (self.labels < last)
    return Images(self.images[rows], self.labels[rows])

  def of_each_class(self, start: int, stop: int) -> 'Images':
    """Return a slice of the images of each class: from index `start` to below `stop` within the class."""
    order = np.argsort(self.labels, kind='stable')
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) - np.searchsorted(self.labels[order], self.labels[order])
    rows = (place >= start) & (place < stop)
    return Images(self.images[rows], self.labels[rows])


def learn(network: Network, train: Images, test: Images, rate: float, replay: bool, seed: int) -> dict[str, Any]:
  """Train on the tasks one after the other, each for one epoch, and measure the accuracies after each task.

  Args:
    network: the network.
    train: the training images.
    test: the images to measure on.
    rate: the learning rate of Adam.
    replay: True to train also on a memory of images of earlier tasks.
    seed: the seed of the parameters and of the order of the images.

  Returns:
    A dict. 'sessions' has a list for each task: the accuracies in percent on all tasks so far, measured after the
    training on this task. 'told' has the same lists for an easier test: only the two classes of the image's task are
    possible answers.
  """
  random, memory = np.random.default_rng(seed), Images(train.images[:0], train.labels[:0])
  params, state = network.start(train.images[:BATCH], seed)
  sessions, told = [], []
  classes = int(train.labels.max()) + 1
  for first in range(0, classes, TASK):
    task = train.of_classes(first, first + TASK)
    for rows in np.array_split(random.permutation(len(task.labels)), len(task.labels) // BATCH):
      images, labels = task.images[rows[:BATCH]], task.labels[rows[:BATCH]]
      if replay:
        more = random.integers(len(memory.labels), size=BATCH) if first else rows[:BATCH]
        source = memory if first else task
        images, labels = (np.concatenate(z) for z in ((images, source.images[more]), (labels, source.labels[more])))
      params, state = network.step(params, state, images, labels, rate)
    memory = _remember(memory, task, random)
    found = [_accuracies(network, params, test.of_classes(c, c + TASK)) for c in range(0, first + TASK, TASK)]
    sessions.append([each[0] for each in found])
    told.append([each[1] for each in found])
  return {'sessions': sessions, 'told': told}


def _remember(memory: Images, task: Images, random: np.random.Generator) -> Images:
  """Return a new memory of at most `MEMORY` images, drawn from the old memory and from the images of a task.

  The new memory has equally many images of each class so far.
  """
  classes = len(np.unique(memory.labels)) + len(np.unique(task.labels))
  order = random.permutation(len(task.labels))
  task = Images(task.images[order], task.labels[order])
  kept = [part.of_each_class(0, MEMORY // classes) for part in (memory, task)]
  return Images(*(np.concatenate(pair) for pair in zip(*kept, strict=True)))


def _accuracies(network: Network, params: Any, test: Images) -> tuple[float, float]:
  """Return two accuracies in percent on the test images of one task.

  For the first accuracy, all classes are possible answers. For the second, only the task's classes are.
  """
  logits = in_batches(lambda batch: network.logits(params, batch), test.images, 500)
  first = int(test.labels.min())
  own = first + logits[:, first : first + TASK].argmax(axis=1)
  return tuple(100 * float((found == test.labels).mean()) for found in (logits.argmax(axis=1), own))  # type: ignore


def _networks(train: Images) -> dict[str, Network]:
  pixels = train.images.astype(np.float64) / 255
  mean, std = pixels.mean(axis=(0, 1, 2)).tolist(), pixels.std(axis=(0, 1, 2)).tolist()
  return {name: Network(arm, mean, std) for name, arm in ARMS.items()}


def renamed(images: Splits, seed: int) -> Splits:
  """Return the same images with new labels, so that the classes have a random order."""
  classes = int(images['train'][1].max()) + 1
  index = np.argsort(np.random.default_rng(seed).permutation(classes)).astype(np.int32)
  return {split: (x, index[labels]) for split, (x, labels) in images.items()}


def _with_order(images: Splits, seed: int) -> dict[str, Images]:
  return {split: Images(*pair) for split, pair in renamed(images, seed).items()}


def choose(images: Splits) -> list[dict[str, Any]]:
  """Choose a learning rate for each network, with and without replay, on held-out training images.

  Args:
    images: images and labels of CIFAR-10 by split.

  Returns:
    A row for each network with and without replay. It has the keys 'arm', 'replay', 'rate' (the chosen rate) and
    'accuracies': for each of the `RATES`, the mean accuracy over all tasks, measured after the last task.
  """
  train = _with_order(images, TRIAL_SEED)['train']
  tried, judged = train.of_each_class(0, TRIED), train.of_each_class(TRIED, TRIED + HELD_OUT)
  rows = []
  for name, network in _networks(tried).items():
    for replay in (False, True):
      ends = [learn(network, tried, judged, rate, replay, TRIAL_SEED)['sessions'][-1] for rate in RATES]
      accuracies = [float(np.mean(end)) for end in ends]
      rows.append(
        {'arm': name, 'replay': replay, 'rate': RATES[int(np.argmax(accuracies))], 'accuracies': accuracies}
      )
      logging.info('%s', rows[-1])
  return rows


def measure(images: Splits, options: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
  """Train all networks on the tasks. Return a row for each network, with and without replay.

  A row has the keys 'seed', 'arm' and 'replay', and the accuracies that `learn` returns.

  Args:
    images: images and labels of CIFAR-10 by split.
    options: the chosen learning rates: the rows that `choose` returns.
    seed: the seed of the order of the classes, of the parameters and of the order of the images.
  """
  splits = _with_order(images, seed)
  train, test = splits['train'].of_each_class(0, TRAINED), splits['test'].of_each_class(0, TESTED)
  networks, rows = _networks(train), []
  for chosen in options:
    network, rate, replay = networks[chosen['arm']], chosen['rate'], chosen['replay']
    found = learn(network, train, test, rate, replay, seed)
    rows.append({'seed': seed, 'arm': chosen['arm'], 'replay': replay, **found})
    logging.info('%s', rows[-1])
  return rows
