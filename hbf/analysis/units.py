"""Responses and gradients of the centers of stage 2."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from hbf.analysis.unit_params import block_names
from hbf.evaluation.unit_health import Health, unit_health
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier


@dataclasses.dataclass(frozen=True)
class Units:
  """Responses and gradients of the U centers of stage 2 in each of L blocks, for B labeled images of N tokens.

  U counts the centers of all heads.

  Attributes:
    responses: response R of every center to every token, float32 [L, B · N, U]. Stage 2 computes Σ R c.
    gradients: size of the loss's gradient with respect to each center, float32 [L, U]. The size is the root mean
      square over the center's coordinates.
    coefficient_gradients: size of the loss's gradient with respect to each center's coefficient c, float32 [L, U].
      The size is the greatest absolute value over the coordinates of c.
  """

  responses: np.ndarray
  gradients: np.ndarray
  coefficient_gradients: np.ndarray

  def health(self) -> Health:
    """Find the dead and the constant centers. Both arrays of the result are bool [L, U]."""
    return Health(*jax.device_get(unit_health(self.responses, self.coefficient_gradients)))

  def mean(self) -> np.ndarray:
    """Return the mean response [L] in each block, over all tokens and centers."""
    return self.responses.mean(axis=(1, 2), dtype=np.float64)

  def spread(self) -> np.ndarray:
    """Return a measure [L] of how much the responses in each block vary over the tokens.

    The measure is the root mean square, over the centers, of a response's standard deviation over the tokens.
    """
    return np.sqrt(self.responses.var(axis=1, dtype=np.float64).mean(axis=1))

  def learning(self) -> np.ndarray:
    """Return the size [L] of the loss's gradient with respect to the centers of each block.

    The size is the root mean square over all coordinates of all centers of the block. It is 0 if the centers cannot
    learn.
    """
    return np.sqrt(np.square(self.gradients, dtype=np.float64).mean(axis=1))


def observe(model: ImageClassifier, params: Any, images: jax.Array, labels: jax.Array) -> Units:
  """Compute the responses and gradients of a model whose stage 2 is `hbf.nn.hyperbf.HyperBFCenters`.

  Args:
    model: the network.
    params: its parameters.
    images: normalized images, [B, height, width, channels].
    labels: the true classes, int [B].
  """
  gradient, responses = _compute(model, params, images, labels)
  blocks = block_names(model)
  units = [gradient[block]['stage2'] for block in blocks]
  return Units(
    # [heads, tokens, A] to [tokens, heads · A], with A centers in each head
    responses=np.stack([_by_token(responses[block]['stage2']['responses'][0]) for block in blocks]),
    gradients=np.stack([np.sqrt(np.mean(np.square(u['centers']), axis=-1)).reshape(-1) for u in units]),
    coefficient_gradients=np.stack([np.abs(u['coefficients']).max(axis=-1).reshape(-1) for u in units]),
  )


@functools.partial(jax.jit, static_argnums=0)
def _compute(model: ImageClassifier, params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
  """Return the loss's gradient with respect to the parameters, and the responses of each block."""

  def loss(params: Any) -> tuple[jax.Array, Any]:
    logits, sown = unrolled(model).apply({'params': params}, images, train=False, mutable=['responses'])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), sown['responses']

  gradient, responses = jax.grad(loss, has_aux=True)(params)
  return gradient, responses


def _by_token(responses: jax.Array) -> np.ndarray:
  return np.asarray(responses.swapaxes(0, 1).reshape(responses.shape[1], -1))
