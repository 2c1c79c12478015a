"""Refit of a linear output layer of a trained classifier in closed form: damped Gauss–Newton steps.

A refit changes the weights of one linear layer to lower the loss. All other parameters of the network do not change.

The last operation of stage 2 is linear in its coefficients. Let r be the responses of the centers to a token, with a
1 for the bias at the end. For linear coefficients, a response is already multiplied by u_a·x + w_a. In an MLP, r are
the hidden units. The last block then returns the tokens

    z_n = y_n + Wᵀ r_n,        W [A + 1, D]: the coefficients and the bias,

where y_n is the token without the output of stage 2. Let f be the part of the network after the last block: the final
LayerNorm, pooling and head. It maps the N tokens of an image to logits f(z), and is not linear. So the loss is
expanded around the present W. Let J_n = ∂f/∂z_n. The change Δ of W moves the logits by u(Δ) = Σ_n J_n Δᵀ r_n in first
order. Let g and H be the gradient and the Hessian of the loss ℓ with respect to the logits. The Gauss–Newton model of
the mean loss, with a damping λ, is

    q(Δ) = mean over images of [g·u(Δ) + u(Δ)ᵀ H u(Δ) / 2] + λ ‖Δ‖² / 2.

It is a ridge regression in Δ, and it has one minimum. For the cross-entropy H = diag(p) − ppᵀ. For a squared distance
to class codes H = I, and q is exact apart from the linearization of f.

The head can be refitted too. Then the layer computes the logits themselves: they are its only "token" z, and f is the
identity. So q is exact for the squared loss, and a step is a Newton step for the cross-entropy.

The r_n and y_n do not depend on W. So one pass of the training images through the network is enough for all steps.

The matrix of q has (A + 1) D rows, which is too many to store. A Lanczos iteration needs only products of this matrix
with vectors. The same products give the minima for all λ in a Krylov space. K-FAC (Martens & Grosse 2015)
approximates the matrix by a Kronecker product, E[r rᵀ] ⊗ E[Jᵀ H J]. The iteration works in coordinates in which this
product is the identity, and ‖Δ‖ in the last term of q is the norm in these coordinates. After one iteration, the step
is K-FAC's with the best length. After (A + 1) D iterations it is exact.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hbf.analysis import unit_params
from hbf.analysis.capture import by_token
from hbf.errors import UserError
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.flops import count_flops
from hbf.nn.block import Block

BATCH = 500  # images
FACTORED = 5_000  # most images for the factors of K-FAC
RIDGE = 1e-4  # added to the diagonals of K-FAC's factors, divided by their mean diagonal entry
DAMPINGS = tuple(float(z) for z in np.logspace(-3, 1, 9))  # λ, divided by the greatest eigenvalue of q's matrix


class Rest(ImageClassifier):
  """The part of a classifier after the last block: final LayerNorm, pooling and head."""

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:  # type: ignore[override]  # a part takes tokens, not images
    """Compute logits [B, classes] of the last block's tokens [B, N, D]."""
    tokens = nn.LayerNorm(self.trunk.norm_epsilon, name='norm')(tokens[:, self.embed.read])
    return nn.Dense(self.classes, name='head')(self._pooled(tokens))


class Seen(NamedTuple):
  """Inputs of the two linear layers that can be refitted, for B images.

  The layers are the output layer of the last stage 2, and the head.

  Attributes:
    inputs: a list of arrays [B, N, A + 1]: the inputs of stage 2's output layer, with a 1 at the end. The first array
      is for the network's own stage 2. Each further array is for the same stage with other parameters.
    tokens: the output of the last block, [B, N, D].
    features: the inputs of the head with a 1 at the end, [B, 1, F + 1].
  """

  inputs: list[Any]
  tokens: Any
  features: Any


def see(model: ImageClassifier, params: Any, images: jax.Array, stages: Sequence[Any] = ()) -> Seen:
  """Return the inputs of the linear layers that can be refitted.

  Args:
    model: the network.
    params: its parameters.
    images: normalized images, [B, height, width, channels].
    stages: a list of other parameters for the last stage 2. For each, the list `Seen.inputs` gets one more array.
  """
  last = last_block(model)
  found: dict[str, Any] = {}

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    out = call(*args, **kwargs)
    if context.method_name != '__call__':
      return out
    if context.module.path == (last, 'stage2'):
      unit = context.module.clone(parent=None, name=None)
      found['inputs'] = [layer_inputs(unit, stage, args[0]) for stage in (params[last]['stage2'], *stages)]
    elif isinstance(context.module, Block) and context.module.path:
      found['tokens'] = out
    elif context.module.path == ('head',):
      found['features'] = args[0][:, None]
    return out

  with nn.intercept_methods(intercept):
    unrolled(model).apply({'params': params}, images, train=False)
  return Seen(found['inputs'], found['tokens'], _with_one(found['features']))


def layer_inputs(stage: nn.Module, params: Any, points: jax.Array) -> jax.Array:
  """Return the inputs [B, N, A + 1] of a stage 2's linear output layer, with a 1 at the end.

  Args:
    stage: the stage 2, which is `hbf.nn.hyperbf.HyperBFCenters` or an MLP.
    params: the stage's parameters.
    points: the stage's inputs, [B, N, D].
  """
  hidden: list[jax.Array] = []

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == '__call__' and context.module.path == ('out',):
      hidden.append(args[0])
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    _, sown = stage.apply({'params': params}, points, mutable=['responses'])
  if hidden:
    return _with_one(hidden[0].reshape(*points.shape[:2], -1))
  return _with_one(by_token(sown['responses']['responses'][0], points.shape[:2]))


def _with_one(inputs: Any) -> Any:
  return jnp.concatenate([inputs, jnp.ones_like(inputs[..., :1])], axis=-1)


def last_block(model: ImageClassifier) -> str:
  """Return the name of the last block.

  Raises:
    UserError: the network has no stage 2, or multiplies the output of stage 2 by a layer scale.
  """
  if model.trunk.stage2 is None or model.trunk.layer_scale:
    raise UserError('the network has no stage 2 or has model.layer_scale: give a run with a stage 2 and without it')
  return unit_params.last_block(model)


def coefficients(model: ImageClassifier, params: Any) -> np.ndarray:
  """Return W [A + 1, D] of the last stage 2: the coefficients of the centers of all heads, and the bias as last row.

  Raises:
    UserError: stage 2 has no linear output layer.
  """
  block = last_block(model)
  rows = unit_params.coefficients(params, block)
  return np.concatenate([np.asarray(rows), np.asarray(_layer_with_bias(params[block]['stage2'])['bias'])[None]])


def with_coefficients(model: ImageClassifier, params: Any, weights: np.ndarray) -> Any:
  """Return the parameters with `weights` [A + 1, D] as coefficients and bias of the last stage 2."""
  block = last_block(model)
  stage = unit_params.with_coefficients(params, block, jnp.asarray(weights[:-1], jnp.float32))[block]['stage2']
  layer = {**_layer_with_bias(stage), 'bias': jnp.asarray(weights[-1], jnp.float32)}
  stage = {**stage, 'out': layer} if 'out' in stage else layer
  return {**params, block: {**params[block], 'stage2': stage}}


def _layer_with_bias(stage: Any) -> Any:
  return stage.get('out', stage)  # an MLP has its bias in the layer 'out', centers have theirs in the stage itself


Tail = Callable[[jax.Array], jax.Array]  # from tokens [B, N, D] to logits [B, classes]
Loss = Callable[[jax.Array, jax.Array], jax.Array]  # from logits [B, classes] and targets [B, classes] to losses [B]


def tail_of(model: ImageClassifier, params: Any) -> Tail:
  """Return the function from the last block's tokens to the logits: final LayerNorm, pooling and head."""
  rest = Rest(model.embed, model.trunk, model.classes)
  kept = {name: params[name] for name in ('norm', 'pool', 'head') if name in params}
  return lambda tokens: jnp.asarray(rest.apply({'params': kept}, tokens))


def no_tail(tokens: jax.Array) -> jax.Array:
  """Return the only token [B, D] of tokens [B, 1, D]. This function is `Problem.tail` in a refit of the head."""
  return tokens[:, 0]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Return the cross-entropy [B] of the logits against the class probabilities `targets`."""
  return optax.softmax_cross_entropy(logits, targets)


def squared(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Return half the squared distance [B] of the logits to the class codes `targets`."""
  return jnp.sum(jnp.square(logits - targets), axis=-1) / 2


# Problems with the same tail and loss share the compiled programs of these functions.
_jit = functools.partial(jax.jit, static_argnums=(0, 1))


@_jit
def _logits(tail: Tail, loss: Loss, weights: Any, inputs: Any, rest: Any, targets: Any) -> jax.Array:
  del loss, targets
  return tail(rest + inputs @ weights)


@_jit
def _gradient(tail: Tail, loss: Loss, weights: Any, inputs: Any, rest: Any, targets: Any) -> jax.Array:
  return jax.grad(lambda weights: loss(tail(rest + inputs @ weights), targets).sum())(weights)


@_jit
def _product(tail: Tail, loss: Loss, weights: Any, direction: Any, inputs: Any, rest: Any, targets: Any) -> jax.Array:
  tokens = rest + inputs @ weights
  logits, moved = jax.jvp(tail, (tokens,), (inputs @ direction,))  # u(Δ)
  _, pulled = jax.jvp(jax.grad(lambda z: loss(z, targets).sum()), (logits,), (moved,))  # H u
  (cotangent,) = jax.vjp(tail, tokens)[1](pulled)
  return jnp.einsum('bna,bnd->ad', inputs, cotangent)


@_jit
def _factor(tail: Tail, loss: Loss, weights: Any, inputs: Any, rest: Any, targets: Any) -> jax.Array:
  def of_image(tokens: Any, target: Any) -> jax.Array:
    jacobian = jax.jacrev(lambda z: tail(z[None])[0])(tokens)  # [classes, N, D]
    hessian = jax.hessian(lambda z: loss(z[None], target[None])[0])(tail(tokens[None])[0])
    return jnp.einsum('knd,kl,lne->de', jacobian, hessian, jacobian) / len(tokens)

  return jax.vmap(of_image)(rest + inputs @ weights, targets).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Problem:
  """The loss on a set of images as a function of the weights W [A + 1, D] of a linear layer.

  Attributes:
    tail: f, the part of the network after the layer.
    loss: ℓ, the loss of each image.
    inputs: r, the A inputs of the layer and a 1 for its bias, [n, N, A + 1].
    rest: y, the part of f's input that the layer's output is added to, [n, N, D]. So f gets the tokens y + r W.
    targets: the targets of the loss, [n, classes].
  """

  tail: Tail
  loss: Loss
  inputs: np.ndarray
  rest: np.ndarray
  targets: np.ndarray

  def logits(self, weights: np.ndarray) -> np.ndarray:
    """Return the logits of all images, [n, classes]."""
    return np.concatenate([np.asarray(part) for part in self._apply(_logits, weights)])

  def value(self, weights: np.ndarray) -> float:
    """Return the mean loss."""
    return float(np.mean(self.loss(jnp.asarray(self.logits(weights)), jnp.asarray(self.targets))))

  def gradient(self, weights: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean loss, float64 [A + 1, D]."""
    return self._mean(_gradient, weights)

  def product(self, weights: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return the product [A + 1, D] of the undamped Gauss–Newton matrix with a direction [A + 1, D], in float64."""
    return self._mean(_product, weights, direction)

  def factors(self, weights: np.ndarray, most: int = FACTORED) -> tuple[np.ndarray, np.ndarray]:
    """Return K-FAC's factors E[r rᵀ] [A + 1, A + 1] and E[Jᵀ H J] [D, D].

    Both are means over the tokens of at most `most` images. For a token, r is the input of the layer, and J is the
    derivative of the logits with respect to the layer's output. H is the Hessian of the loss as a function of the
    logits.
    """
    part = self.every(-(-len(self.inputs) // most))
    rows = part.inputs.reshape(-1, part.inputs.shape[-1])
    return (rows.T @ rows / len(rows)).astype(np.float64), part._mean(_factor, weights)

  def every(self, step: int) -> 'Problem':
    """Return the same problem with every `step`-th image only."""
    rows = slice(None, None, step)
    return dataclasses.replace(self, inputs=self.inputs[rows], rest=self.rest[rows], targets=self.targets[rows])

  def operations(self, iterations: int) -> float:
    """Return the number of operations of `solve` with this number of iterations.

    The inverse square roots of K-FAC's factors are not counted.
    """
    rows, columns = self.inputs.shape[1:]
    factors = 2 * rows * columns**2 + self._count(_factor, 1)
    products = iterations * len(self.inputs) * self._count(_product, 2)
    return self.gradient_operations() + products + min(len(self.inputs), FACTORED) * factors

  def gradient_operations(self) -> float:
    """Return the number of operations of a gradient on all images."""
    return len(self.inputs) * self._count(_gradient, 1)

  def _count(self, function: Any, directions: int) -> float:
    """Return the number of operations of `function` for one image and `directions` matrices (`_apply`)."""
    example = [jax.ShapeDtypeStruct((1, *z.shape[1:]), z.dtype) for z in (self.inputs, self.rest, self.targets)]
    weights = jax.ShapeDtypeStruct((self.inputs.shape[-1], self.rest.shape[-1]), self.rest.dtype)
    return float(count_flops(functools.partial(function, self.tail, self.loss), *[weights] * directions, *example))

  def _apply(self, function: Any, *directions: np.ndarray) -> Iterator[jax.Array]:
    """Yield the result of a function for each batch of images.

    The function is `_logits`, `_gradient`, `_product` or `_factor`. Besides the arrays of the batch, it gets
    `directions`: one or two matrices [A + 1, D].
    """
    given = [jnp.asarray(z, self.rest.dtype) for z in directions]
    for start in range(0, len(self.inputs), BATCH):
      part = slice(start, start + BATCH)
      yield function(self.tail, self.loss, *given, self.inputs[part], self.rest[part], self.targets[part])

  def _mean(self, function: Any, *directions: np.ndarray) -> np.ndarray:
    """Return the mean of a quantity over all images, in float64.

    `function` computes the sum of the quantity over a batch (`_apply`).
    """
    sums = [np.asarray(part, np.float64) for part in self._apply(function, *directions)]
    return np.sum(sums, axis=0) / len(self.inputs)


class Path(NamedTuple):
  """Precomputed parts of q, the quadratic model of the loss, from which `step` gets q's minimum for any damping λ.

  The minimum is taken in a Krylov space of m dimensions. The space is in K-FAC's coordinates: a matrix X [A + 1, D]
  stands for the change Δ = L X R of W.

  Attributes:
    basis: an orthonormal basis of the space, m matrices X, [m, A + 1, D]. The first is along the negative gradient.
    matrix: q's matrix in this basis, without λ, [m, m].
    slope: the norm of the gradient in K-FAC's coordinates.
    roots: L [A + 1, A + 1] and R [D, D], the inverse square roots of K-FAC's factors (`Problem.factors`).
  """

  basis: np.ndarray
  matrix: np.ndarray
  slope: float
  roots: tuple[np.ndarray, np.ndarray]

  def step(self, damping: float) -> np.ndarray:
    """Return the change [A + 1, D] of the layer's weights that minimizes q, the damped quadratic model of the loss.

    The damping λ of q is `damping` times the greatest eigenvalue of `matrix`.
    """
    ridge = damping * np.linalg.eigvalsh(self.matrix)[-1]
    start = self.slope * np.eye(len(self.matrix))[0]
    return self._back(np.linalg.solve(self.matrix + ridge * np.eye(len(self.matrix)), start))

  def random(self, step: np.ndarray, seed: int) -> np.ndarray:
    """Return a random change of the weights, as a control for the change `step`.

    In K-FAC's coordinates, both changes have the same norm.
    """
    left, right = self.roots
    norm = np.linalg.norm(np.linalg.solve(left, step) @ np.linalg.inv(right))
    direction = np.random.default_rng(seed).normal(size=step.shape)
    return left @ (norm / np.linalg.norm(direction) * direction) @ right

  def _back(self, solution: np.ndarray) -> np.ndarray:
    left, right = self.roots
    return left @ np.tensordot(solution, self.basis, axes=1) @ right


def solve(problem: Problem, weights: np.ndarray, iterations: int) -> Path:
  """Run a Lanczos iteration on q, the quadratic model of the loss at `weights`, to find its minimum for any damping.

  Args:
    problem: the loss.
    weights: the present W, [A + 1, D].
    iterations: number of products with the matrix of q.
  """
  left, right = (_inverse_root(factor) for factor in problem.factors(weights))
  residual = -left @ problem.gradient(weights) @ right
  slope = float(np.linalg.norm(residual))
  basis, products = [residual / slope], []
  while True:
    products.append(left @ problem.product(weights, left @ basis[-1] @ right) @ right)
    if len(products) == iterations:
      break
    rest = products[-1]
    for _ in range(2):  # twice, so that rounding leaves the basis orthogonal
      for vector in basis:
        rest = rest - np.vdot(vector, rest) * vector
    if np.linalg.norm(rest) < 1e-7 * np.linalg.norm(products[-1]):
      break  # the space holds the exact solution
    basis.append(rest / np.linalg.norm(rest))
  matrix = np.tensordot(np.stack(basis), np.stack(products), axes=([1, 2], [1, 2]))
  return Path(np.stack(basis), (matrix + matrix.T) / 2, slope, (left, right))


def _inverse_root(factor: np.ndarray) -> np.ndarray:
  values, vectors = np.linalg.eigh(factor + RIDGE * np.trace(factor) / len(factor) * np.eye(len(factor)))
  return (vectors / np.sqrt(values)) @ vectors.T


class Round(NamedTuple):
  """A step of `refit`, or a failed attempt at a step.

  An attempt fails if no damping lowers the held-out loss. Then the weights stay as they are, and `refit` ends.

  Attributes:
    damping: the chosen damping. None if the attempt failed.
    train: mean training loss after the step or the failed attempt.
    held_out: mean held-out loss after the step or the failed attempt.
  """

  damping: float | None
  train: float
  held_out: float


class Refit(NamedTuple):
  """The result of `refit`.

  Attributes:
    weights: the weights [A + 1, D] before the first step and after each step.
    rounds: the damping and the losses of each step, and of the failed attempt if there is one.
    paths: for each of these rounds, a `Path`: the quadratic model's minimum for every damping.
  """

  weights: list[np.ndarray]
  rounds: list[Round]
  paths: list[Path]


def refit(
  problem: Problem,
  held_out: Problem,
  weights: np.ndarray,
  rounds: int,
  iterations: int,
  dampings: Sequence[float] = DAMPINGS,
) -> Refit:
  """Take Gauss–Newton steps, each with the damping that gives the least held-out loss. Stop if none lowers this loss.

  Args:
    problem: the loss on training images.
    held_out: the loss on held-out images.
    weights: the weights at the start, [A + 1, D].
    rounds: greatest number of steps.
    iterations: number of products with the Gauss–Newton matrix in a step.
    dampings: the dampings to choose from, as for `Path.step`.
  """
  done = Refit([np.asarray(weights, np.float64)], [], [])
  best = held_out.value(weights)
  for _ in range(rounds):
    path = solve(problem, done.weights[-1], iterations)
    done.paths.append(path)
    losses = [held_out.value(done.weights[-1] + path.step(damping)) for damping in dampings]
    if not min(losses) < best:
      done.rounds.append(Round(None, problem.value(done.weights[-1]), best))
      break
    best, damping = min(zip(losses, dampings, strict=True))
    done.weights.append(done.weights[-1] + path.step(damping))
    done.rounds.append(Round(damping, problem.value(done.weights[-1]), best))
  return done


def descend(problem: Problem, weights: np.ndarray, rate: float, epochs: int, seed: int) -> np.ndarray:
  """Minimize the loss by Adam on shuffled batches of at most `BATCH` images. Return the weights, [A + 1, D].

  Refits are compared with this ordinary training.

  Args:
    problem: the loss on training images.
    weights: the weights at the start.
    rate: learning rate of the first step. It falls to 0 along a cosine.
    epochs: number of passes over the images.
    seed: seed of the order of the images.
  """
  random, count = np.random.default_rng(seed), len(problem.inputs)
  size = min(BATCH, count)
  w = jnp.asarray(weights, problem.rest.dtype)
  state = _ADAM.init(w)
  starts = [(epoch, start) for epoch in range(epochs) for start in range(0, count - size + 1, size)]
  rates = optax.cosine_decay_schedule(rate, len(starts))
  for step, (_, start) in enumerate(starts):
    if not start:
      order = random.permutation(count)
    rows = np.sort(order[start : start + size])
    arrays = (problem.inputs[rows], problem.rest[rows], problem.targets[rows])
    w, state = _descent(problem.tail, problem.loss, w, state, rates(step), *arrays)
  return np.asarray(w, np.float64)


_ADAM = optax.scale_by_adam()


@_jit
def _descent(tail: Tail, loss: Loss, weights: Any, state: Any, rate: Any, *arrays: Any) -> tuple[jax.Array, Any]:
  updates, state = _ADAM.update(_gradient(tail, loss, weights, *arrays) / len(arrays[0]), state)
  return weights - rate * updates, state
