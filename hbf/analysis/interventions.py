"""Effects of interventions on the units of stage 2: changes of the loss, the accuracy and the answers.

`hbf.analysis.unit_params` makes the parameters after an intervention. To silence a unit is to set its coefficient
to 0.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import by_token
from hbf.analysis.centers import move_centers
from hbf.analysis.relevance import probabilities, random_orders, readout, removed_counts
from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.unit_params import Params, block_names, count_units, directions, last_block
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.nn.block import Block


class Mean(NamedTuple):
  """A mean over images, or over windows of a text, with its 95% confidence interval.

  Attributes:
    mean: the mean.
    half: half of the length of the interval, in the normal approximation.
  """

  mean: float
  half: float

  @classmethod
  def of(cls, values: np.ndarray) -> 'Mean':
    """Return the mean of values [n] with its 95% interval. For a single value, the interval is infinite."""
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.inf
    return cls(float(values.mean()), float(half))

  def text(self, digits: int) -> str:
    """Return the mean with its sign, then ± and `half`. Both numbers have `digits` digits after the point."""
    return f'{self.mean:+.{digits}f} ± {self.half:.{digits}f}'.replace('-', '−').replace('inf', '∞')


class Effect(NamedTuple):
  """The changes that an intervention causes on some images.

  Attributes:
    loss: cross-entropy after the intervention minus cross-entropy before it, in nats.
    accuracy: accuracy after the intervention minus accuracy before it, in percentage points.
    answers: share of the images whose answer changes, in percent.
  """

  loss: Mean
  accuracy: Mean
  answers: Mean

  def texts(self) -> tuple[str, str, str]:
    """Return the changes of loss, accuracy and answers as three texts, each with its interval."""
    return self.loss.text(3), self.accuracy.text(1), self.answers.text(1)


def effect(
  run: TrainedRun, params: Params, images: np.ndarray, labels: np.ndarray, model: nn.Module | None = None
) -> Effect:
  """Measure the effect of an intervention on some images.

  Args:
    run: the run before the intervention.
    params: the parameters after the intervention.
    images: uint8 [n, height, width, channels].
    labels: the true classes [n].
    model: the network after the intervention, if it has more units than before (`hbf.analysis.unit_params.add`).
  """
  return compare(run.logits(images), run.with_params(params, model).logits(images), labels)


def compare(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> Effect:
  """Return the changes of loss, accuracy and answers between the logits [n, C] before and after an intervention."""
  rows = np.arange(len(labels))
  losses = [-np.log(probabilities(z)[rows, labels]) for z in (before, after)]
  answers = [z.argmax(axis=1) for z in (before, after)]
  right = [100.0 * (answer == labels) for answer in answers]
  return Effect(
    Mean.of(losses[1] - losses[0]), Mean.of(right[1] - right[0]), Mean.of(100.0 * (answers[0] != answers[1]))
  )


class LastUnits(NamedTuple):
  """Tokens, responses and coefficients of the last block of a network, for n images.

  Attributes:
    tokens: tokens after the block, float32 [n, N, D].
    responses: responses R of the units in stage 2, as in the sum Σ R c, float32 [n, N, U].
    coefficients: vectors [U, D] that the units add to a token for a response of 1
      (`hbf.analysis.unit_params.directions`).
  """

  tokens: np.ndarray
  responses: np.ndarray
  coefficients: np.ndarray

  def without(self, gone: np.ndarray) -> np.ndarray:
    """Return the tokens without the contributions of some units, float32 [n, N, D].

    Args:
      gone: True for the silenced units of each image, bool [n, U].
    """
    written = (self.responses * gone[:, None]) @ self.coefficients
    return np.asarray(self.tokens - written, np.float32)


def last_units(run: TrainedRun, images: np.ndarray) -> LastUnits:
  """Return tokens, responses and coefficients of the last block for uint8 images [n, height, width, channels].

  Raises:
    UserError: stage 2 of the last block has no units.
  """
  block = run.last_block
  written = directions(run.params, block)
  parts = [
    [np.asarray(z, np.float32)[number >= 0] for z in _last(run.model, run.params, inputs)]
    for number, inputs in run.batches(images)
  ]
  tokens, responses = (np.concatenate(kind) for kind in zip(*parts, strict=True))
  return LastUnits(tokens, responses, np.asarray(written, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _last(model: ImageClassifier, params: Params, images: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return the tokens [B, N, D] after the last block, and the responses [B, N, U] of its units."""
  last = last_block(model)
  tokens, hidden = [], []

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if context.method_name == '__call__' and module.path[-3:] == (last, 'stage2', 'out'):
      hidden.append(args[0])
    out = call(*args, **kwargs)
    if context.method_name == '__call__' and isinstance(module, Block) and module.name == last:
      tokens.append(out)
    return out

  with nn.intercept_methods(intercept):
    _, sown = unrolled(model).apply({'params': params}, images, train=False, mutable=['responses'])
  count, length = tokens[0].shape[:2]
  if hidden:
    return tokens[0], hidden[0].reshape(count, length, -1)
  return tokens[0], by_token(sown['responses'][last]['stage2']['responses'][0], (count, length))


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_of_tokens(model: ImageClassifier, shape: tuple[int, ...], params: Params, tokens: jax.Array) -> jax.Array:
  """Compute the logits [B, classes] from the tokens after the last block, [B, N, D].

  Args:
    model: the network.
    shape: height, width and channels of its images.
    params: its parameters.
    tokens: tokens after the last block, [B, N, D].
  """
  last = last_block(model)

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == '__call__' and isinstance(context.module, Block):
      return tokens if context.module.name == last else args[0]  # so XLA drops the computation of all earlier layers
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    return jnp.asarray(unrolled(model).apply({'params': params}, jnp.zeros((len(tokens), *shape)), train=False))


def _logits(run: TrainedRun, tokens: np.ndarray) -> np.ndarray:
  """Return the logits of n images from their tokens [n, N, D] after the last block, in batches of up to 500."""
  parts = np.array_split(tokens, -(-len(tokens) // 500))
  return np.concatenate([logits_of_tokens(run.model, run.task.shape, run.params, jnp.asarray(z)) for z in parts])


def silenced_one_by_one(run: TrainedRun, units: LastUnits, labels: np.ndarray, which: Sequence[int]) -> list[Effect]:
  """Silence some units of the last block, one unit at a time, and return the effect of each.

  Args:
    run: the run.
    units: the result of `last_units` for n images.
    labels: the true classes [n].
    which: indices of the units to silence.
  """
  before = _logits(run, units.tokens)
  written = (units.responses[..., unit, None] * units.coefficients[unit] for unit in which)
  return [compare(before, _logits(run, units.tokens - added), labels) for added in written]


class Curve(NamedTuple):
  """The probability of each image's answer while more and more units of the last block are silenced.

  Attributes:
    gone: the fractions of silenced units at which the probability is measured, from 0 to 1, [S].
    probability: the probability of the class that the whole network answers, [n, S].
  """

  gone: np.ndarray
  probability: np.ndarray

  @property
  def areas(self) -> np.ndarray:
    """The area below the curve of each image, [n]. It is small if the units that are silenced first matter most."""
    return np.asarray(np.trapezoid(self.probability, self.gone, axis=1))


def importance(run: TrainedRun, units: LastUnits) -> dict[str, np.ndarray]:
  """Compute the importance of each unit of the last block for each image's answer, by two definitions.

  The excess logit of the answer is its logit minus the mean of all logits.

  Returns:
    'votes': the contribution of a unit to the excess logit (`hbf.analysis.relevance.votes`), [n, U]. 'gradient ×
    response': the derivative of the excess logit with respect to the response of a unit, times this response, summed
    over the tokens, [n, U].
  """
  answers = _logits(run, units.tokens).argmax(axis=1)
  frozen = readout(run, units.tokens.astype(np.float64), answers)
  gradient = _gradient(run.model, run.task.shape, run.params, jnp.asarray(units.tokens), jnp.asarray(answers))
  return {
    name: np.einsum('inu,ind,ud->iu', units.responses, through, units.coefficients, optimize=True)
    for name, through in (('votes', frozen), ('gradient × response', np.asarray(gradient)))
  }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gradient(
  model: ImageClassifier, shape: tuple[int, ...], params: Params, tokens: jax.Array, classes: jax.Array
) -> jax.Array:
  """Return the derivative [n, N, D] of each image's excess logit with respect to the tokens after the last block."""

  def excess(tokens: jax.Array) -> jax.Array:
    logits = logits_of_tokens(model, shape, params, tokens)
    return jnp.sum(jnp.take_along_axis(logits, classes[:, None], axis=1)[:, 0] - logits.mean(axis=1))

  return jax.grad(excess)(tokens)


def removal(run: TrainedRun, units: LastUnits, order: np.ndarray) -> Curve:
  """Silence the units of the last block in a given order, and return the curve of the answer's probability.

  Args:
    run: the run.
    units: what `last_units` returns for n images.
    order: indices of the units in an order for each image, int [n, U]. The unit in column 0 is silenced first.
  """
  count = order.shape[1]
  numbers = removed_counts(count)
  rank, rows = np.argsort(order, axis=1), np.arange(len(order))
  left = [probabilities(_logits(run, units.without(rank < number))) for number in numbers]
  answers = left[0].argmax(axis=1)
  return Curve(numbers / count, np.stack([p[rows, answers] for p in left], axis=1))


def removals(run: TrainedRun, units: LastUnits) -> dict[str, Curve]:
  """Return a curve for each definition of importance, and a curve for random orders as a control.

  For a definition, the most important unit is silenced first. The curve 'random' is the mean curve of three random
  orders.

  Args:
    run: the run.
    units: what `last_units` returns for n images.
  """
  found = {
    name: removal(run, units, np.argsort(-values, axis=1, kind='stable'))
    for name, values in importance(run, units).items()
  }
  orders = random_orders(len(units.tokens), len(units.coefficients))
  drawn = [removal(run, units, order) for order in orders]
  return found | {'random': Curve(drawn[0].gone, np.mean([curve.probability for curve in drawn], axis=0))}


def with_random_centers(run: TrainedRun, images: np.ndarray, seed: int) -> TrainedRun:
  """Return the run with every center moved to a random token, as a control. Coefficients do not change.

  Args:
    run: a run with HyperBF in stage 2.
    images: the images whose tokens are drawn, uint8 [n, height, width, channels].
    seed: the seed of the draws.
  """
  draws, chosen = np.random.default_rng(seed), {}
  for block in block_names(run.model):
    rows, columns, _ = run.patches_of(block)
    length = run.first_patch + rows * columns
    drawn = draws.choice(len(images) * length, count_units(run.params, block))
    chosen[block] = drawn // length, drawn % length
  return run.with_params(move_centers(run, images, chosen))
