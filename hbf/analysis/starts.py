"""Initial values of HyperBF centers from data ("starts"), and changes of the number of centers during a run.

The stage is z = Σ_a R_a(x) c_a + b with R_a(x) = g exp(−‖W(x − t_a)‖² / 2σ²). Points x and centers t_a are scaled to
norm 1, and g is a gain.

**Three phases** (Schwenker et al. 2001, "Three learning phases for radial-basis-function networks"). The first phase
sets the centers to k-means of the points, and σ to the mean distance from a center to its nearest other center (Moody
& Darken 1989). The second phase solves for the linear layers by least squares. The third phase is training by
gradients, for all parameters.

In a deep network, only the head has targets. So the second phase goes through the blocks in order. Let e be the
one-hot vector of an image's class, among K classes. In the first block, the target of every token of the image is e
minus the mean of e over all images. In each later block, it is what remains of this target after the fits of the
earlier blocks. Let r be the responses to a token, with a 1 at the end. A ridge regression of the target on r gives
B [A + 1, K]. The coefficients are B P, where P [K, D] has a random code of norm √D for each class. Finally, the head
is fitted to e by ridge regression.

**The AGOP metric** sets W of a diagonal metric to √diag(G), where G is the average gradient outer product
(`hbf.analysis.agop`), as in recursive feature machines (Radhakrishnan et al. 2024). W is scaled so that the mean of
‖W(x − t)‖² over tokens and centers does not change.

**Growth and replacement.** A new center has coefficients of 0. With normalization 'none' the responses of the other
centers do not depend on it. So the insertion of a center does not change the outputs of the network.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import capture
from hbf.analysis.refit import layer_inputs
from hbf.analysis.rows import of_norm_1, squared
from hbf.analysis.unit_params import block_names
from hbf.errors import UserError
from hbf.evaluation.batches import in_batches
from hbf.models.build import flops_per_example
from hbf.models.classifier import ImageClassifier
from hbf.models.flops import count_flops
from hbf.nn.hyperbf import CENTERS_INITS, HyperBFCenters
from hbf.training.experiment import Experiment
from hbf.training.state import TrainState, init_state

RIDGE = 1e-3  # λ of the ridge regressions, divided by the mean square of the inputs
BATCH = 100  # images
Params = dict[str, Any]


def initial_params(experiment: Experiment) -> Params:
  """Return the parameters with which a run of this experiment starts."""
  data = experiment.inputs['train']
  batch = next(iter(data.batches(experiment.first_order, 0, 1)))
  make = jax.jit(lambda *args: init_state(experiment.model, experiment.optimizer, experiment.objective, *args).params)
  return dict(make(data.resident, batch))


def centers_of(model: ImageClassifier) -> HyperBFCenters:
  """Return the Flax module that is stage 2 in the blocks of a network.

  Raises:
    UserError: stage 2 has no centers, or has options that `hbf.analysis.starts` does not support.
  """
  stage = model.trunk.stage2(dtype=jnp.float32) if model.trunk.stage2 else None
  wanted = {
    'heads': 1,
    'kernel': 'gaussian',
    'metric': 'diagonal',
    'sigma_per': 'layer',
    'normalize_inputs': True,
    'normalization': 'none',
    'coefficients': 'constant',
  }
  if not isinstance(stage, HyperBFCenters):
    raise UserError('the network has no centers in stage 2: give model hyperbf')
  for name, value in wanted.items():
    if getattr(stage, name) != value:
      raise UserError(f'model.stage2.{name} is {getattr(stage, name)}: expected {value}, as in recipe laptop')
  return stage


def least_squares(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """Return B [A, K] that minimizes mean ‖inputs B − targets‖² + λ ‖B‖², in float64.

  λ is `RIDGE` times the mean square of the inputs.

  Args:
    inputs: [n, A].
    targets: [n, K].
  """
  inputs, targets = np.asarray(inputs, np.float64), np.asarray(targets, np.float64)
  matrix = inputs.T @ inputs / len(inputs)
  ridge = RIDGE * np.trace(matrix) / len(matrix)
  return np.linalg.solve(matrix + ridge * np.eye(len(matrix)), inputs.T @ targets / len(inputs))


def nearest_distance(centers: np.ndarray) -> float:
  """Return the mean over `centers` [A, D] of the distance from a center to its nearest other center.

  `with_centers` sets σ to this mean. The distance between two equal centers is 0, and counts in the mean.
  """
  distances = squared(centers, centers)
  np.fill_diagonal(distances, np.inf)
  return float(np.sqrt(distances.min(axis=-1)).mean())


def three_phases(
  model: ImageClassifier, params: Params, images: np.ndarray, labels: np.ndarray, centers: str, seed: int
) -> Params:
  """Return parameters after the first two of three phases of training.

  Phase 1 sets the centers and σ from the data. Phase 2 solves for the coefficients and the head by least squares.
  Phase 3 is training by gradients, which is not done here.

  Args:
    model: the network.
    params: the parameters before the phases.
    images: normalized training images [n, height, width, channels].
    labels: the classes of the images, int [n].
    centers: 'kmeans', or 'tokens' for random tokens in place of k-means.
    seed: seed of the centers and of the `class_codes`.
  """
  stage, keys = centers_of(model), jax.random.split(jax.random.key(seed), model.trunk.depth)
  one_hot = np.eye(model.classes)[labels]
  codes = class_codes(model.classes, model.embed.width, seed)
  rest: Any = (one_hot - one_hot.mean(axis=0))[:, None]  # [n, 1, K], the same for all tokens of an image
  for block, key in zip(block_names(model), keys, strict=True):
    points = seen(model, params, images).points[block]
    unit = with_centers(stage, params[block]['stage2'], points, centers, key)
    rows = responses(stage, unit, points)
    rest = np.broadcast_to(rest, (*points.shape[:2], model.classes))
    fit = least_squares(rows, rest.reshape(len(rows), -1))
    rest = rest - (rows @ fit).reshape(rest.shape)
    weights = jnp.asarray(fit @ codes, jnp.float32)
    unit = {**unit, 'coefficients': weights[None, :-1], 'bias': weights[-1]}
    params = {**params, block: {**params[block], 'stage2': unit}}
  features = seen(model, params, images).features
  fit = least_squares(np.concatenate([features, np.ones((len(features), 1))], axis=1), one_hot)
  head = jnp.asarray(fit, jnp.float32)
  return {**params, 'head': {'kernel': head[:-1], 'bias': head[-1]}}


def phases_operations(
  model: ImageClassifier, params: Params, image: tuple[int, ...], images: int, centers: str
) -> float:
  """Return the number of floating-point operations of `three_phases`, except those that solve linear equations.

  Args:
    model: the network.
    params: its parameters.
    image: height, width and channels of an image.
    images: number of images.
    centers: 'kmeans' or 'tokens'.
  """
  stage, depth, classes = centers_of(model), model.trunk.depth, model.classes
  unit = params['block0']['stage2']
  tokens = jax.eval_shape(lambda z: capture(model, params, z), jax.ShapeDtypeStruct((1, *image), jnp.float32)).points
  one = next(iter(tokens.values()))  # [1, N, D]
  rows, columns = images * one.shape[1], stage.centers + 1
  all_rows = jax.ShapeDtypeStruct((1, rows, one.shape[-1]), jnp.float32)
  init = functools.partial(CENTERS_INITS[centers], jax.random.key(0), count=stage.centers)
  fits = 2 * rows * columns * (columns + 2 * classes)
  each = (
    count_flops(init, all_rows) + 2 * images * count_flops(functools.partial(layer_inputs, stage, unit), one) + fits
  )
  return float(depth * each + (depth + 1) * images * flops_per_example(model, image))


def with_centers(stage: HyperBFCenters, params: Params, points: np.ndarray, centers: str, key: jax.Array) -> Params:
  """Return the parameters of a stage 2 with new centers, a new σ and a new gain, which multiplies the responses.

  With the new gain, the mean response of the centers to `points` is 1.

  Args:
    stage: the stage 2.
    params: its parameters. W must be the identity, and does not change.
    points: its inputs for n images, [n, N, D].
    centers: the way to choose the centers, a key of `hbf.nn.hyperbf.CENTERS_INITS`.
    key: a random key.
  """
  dimensions = points.shape[-1]
  rows = jnp.asarray(of_norm_1(points).reshape(1, -1, dimensions))
  found = of_norm_1(np.asarray(_start(centers, key, rows, stage.centers), np.float64))
  changed = {
    **params,
    # A point has norm √D. With norm 1, the learning rates would be too large for the centers.
    'centers': jnp.asarray(np.sqrt(dimensions) * found, jnp.float32),
    'log_sigma': jnp.full_like(params['log_sigma'], np.log(nearest_distance(found[0]))),
  }
  return with_mean_response_1(stage, changed, points)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _start(centers: str, key: jax.Array, rows: jax.Array, count: int) -> jax.Array:
  return jnp.asarray(CENTERS_INITS[centers](key, rows, count))


def class_codes(classes: int, width: int, seed: int) -> np.ndarray:
  """Return random codes [K, D] of norm √D for K classes, where D is the width. They are orthogonal if K ≤ D.

  `three_phases` multiplies a least-squares fit B [A + 1, K] by them to get coefficients and bias [A + 1, D].
  """
  drawn = np.random.default_rng(seed).normal(size=(width, classes))
  codes = np.linalg.qr(drawn)[0].T if classes <= width else of_norm_1(drawn.T)
  return codes * np.sqrt(width)


class Seen(NamedTuple):
  """Arrays of a network for n images.

  Attributes:
    points: the inputs of stage 2 by block, [n, N, D].
    features: the inputs of the head, [n, D].
    logits: the outputs, [n, classes].
  """

  points: dict[str, np.ndarray]
  features: np.ndarray
  logits: np.ndarray


def seen(model: ImageClassifier, params: Params, images: np.ndarray) -> Seen:
  """Return the arrays that the network computes from normalized images [n, height, width, channels]."""

  def see(batch: Any) -> Any:
    found = capture(model, params, batch)
    return found.points, found.features, found.logits

  return Seen(*in_batches(see, images, BATCH))


_layer_inputs = jax.jit(layer_inputs, static_argnums=0)


def responses(stage: HyperBFCenters, params: Params, points: np.ndarray) -> np.ndarray:
  """Return a row [A + 1] for each of n·N points: the responses of the A centers, and a 1 for the bias.

  Args:
    stage: the stage 2.
    params: its parameters.
    points: its inputs, [n, N, D].
  """
  found = in_batches(lambda batch: _layer_inputs(stage, params, batch), points, BATCH)
  return np.asarray(found).reshape(-1, found.shape[-1])


def with_mean_response_1(stage: HyperBFCenters, params: Params, points: np.ndarray) -> Params:
  """Return the parameters of a stage 2 with a gain for which the mean response to the points [n, N, D] is 1."""
  mean = responses(stage, params, points)[:, :-1].mean(dtype=np.float64)
  return {**params, 'log_gain': params['log_gain'] - float(np.log(mean))}


def with_agop_metric(
  model: ImageClassifier, params: Params, outer: Mapping[str, np.ndarray], images: np.ndarray
) -> Params:
  """Return parameters in which the diagonal metric of each block comes from its AGOP.

  The gain of each stage 2, which multiplies its responses, is set so that their mean is 1.

  Args:
    model: the network.
    params: the parameters, whose metrics are replaced.
    outer: the AGOP of each block, [D, D].
    images: normalized images. Their tokens set the scale of each new metric.
  """
  stage = centers_of(model)
  for block in block_names(model):
    points = seen(model, params, images).points[block]
    before = params[block]['stage2']
    metric = agop_weights(
      np.diag(outer[block]), np.asarray(before['metric'][0], np.float64), points, before['centers']
    )
    changed = with_mean_response_1(stage, {**before, 'metric': jnp.asarray(metric[None], jnp.float32)}, points)
    params = {**params, block: {**params[block], 'stage2': changed}}
  return params


def agop_weights(diagonal: np.ndarray, before: np.ndarray, points: Any, centers: Any) -> np.ndarray:
  """Return the diagonal [D] of a metric W, with W² proportional to the AGOP's diagonal.

  The mean of ‖W(x − t)‖² over points x and centers t, all scaled to norm 1, is the same as for the old W.

  Args:
    diagonal: the diagonal of the AGOP, [D].
    before: the diagonal of the old W, [D].
    points: points of any norm, [..., D].
    centers: centers of any norm, [..., D].
  """
  x, t = (of_norm_1(np.asarray(z, np.float64).reshape(-1, len(before))) for z in (points, centers))
  squares = np.square(x).mean(axis=0) + np.square(t).mean(axis=0) - 2 * x.mean(axis=0) * t.mean(axis=0)
  scale = (before**2 @ squares) / (diagonal @ squares)
  return np.sqrt(scale * diagonal)


def usage(found: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
  """Return a measure [A] of how much each center contributes to the output of stage 2.

  The measure is the root mean square of the center's response, times the norm of its coefficient. It is 0 for a dead
  center.

  Args:
    found: responses of the A centers to n tokens, [n, A].
    coefficients: the coefficients, [A, D].
  """
  rms = np.sqrt(np.square(np.asarray(found, np.float64)).mean(axis=0))
  return rms * np.linalg.norm(np.asarray(coefficients, np.float64), axis=-1)


def most_used(model: ImageClassifier, params: Params, points: Mapping[str, np.ndarray], count: int) -> dict[str, Any]:
  """Return, by block, the indices of the `count` centers with the greatest `usage`, in increasing order.

  Args:
    model: the network.
    params: its parameters.
    points: the inputs of stage 2 by block, [n, N, D].
    count: number of centers.
  """
  stage, kept = centers_of(model), {}
  for block, rows in points.items():
    unit = params[block]['stage2']
    found = usage(responses(stage, unit, rows)[:, :-1], unit['coefficients'][0])
    order = np.argsort(-found, kind='stable')
    kept[block] = np.sort(order[:count])
  return kept


def draw_tokens(points: Mapping[str, np.ndarray], rows: np.ndarray, count: int, seed: int) -> dict[str, np.ndarray]:
  """Draw new centers for each block: `count` random inputs [count, D] of its stage 2, from some of the images.

  Args:
    points: the inputs of stage 2 by block, [n, N, D].
    rows: indices of the images to draw from.
    count: number of inputs to draw.
    seed: seed of the draw.
  """
  random, drawn = np.random.default_rng(seed), {}
  for block, tokens in points.items():
    choice = tokens[rows].reshape(-1, tokens.shape[-1])
    drawn[block] = choice[random.choice(len(choice), count, replace=count > len(choice))]
  return drawn


def with_new_centers(state: TrainState, kept: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> TrainState:
  """Return the state of a run with other centers: some of the old centers, followed by new centers.

  New centers have coefficients of 0. The optimizer's moving averages stay for the kept centers, and are 0 for new
  centers.

  Args:
    state: the state.
    kept: the indices of the centers that stay, by block.
    new: the new centers by block, [count, D].
  """

  def change(path: tuple[Any, ...], leaf: Any, added: bool = False) -> Any:
    names = tuple(getattr(key, 'key', None) for key in path[-3:])
    if len(names) < 3 or names[1] != 'stage2' or names[2] not in ('centers', 'coefficients'):
      return leaf
    block = str(names[0])
    zeros = jnp.zeros((1, len(new[block]), leaf.shape[-1]), leaf.dtype)
    rows = jnp.asarray(new[block], leaf.dtype)[None] if added and names[2] == 'centers' else zeros
    return jnp.concatenate([leaf[:, jnp.asarray(kept[block])], rows], axis=1)

  over = jax.tree_util.tree_map_with_path
  params = over(lambda path, leaf: change(path, leaf, added=True), state.params)
  return state.replace(params=params, opt_state=over(change, state.opt_state))
