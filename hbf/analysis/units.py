"""What the units of stage 2 do: how they respond to the tokens, and whether they learn."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax

from hbf.analysis.capture import unrolled
from hbf.evaluation.unit_health import Health, unit_health
from hbf.models.classifier import ImageClassifier


@dataclasses.dataclass(frozen=True)
class Units:
  """Of the stage 2 of each block, on some labeled images.

  Attributes:
    responses: float32 [depth, B · N, heads · A], of every center to every token, as they go into the output.
    gradients: float32 [depth, heads · A], root mean square of the loss's gradient by a center's coordinates.
    of_coefficients: float32 [depth, heads · A], greatest |gradient| of the loss by a center's coefficients.
  """

  responses: np.ndarray
  gradients: np.ndarray
  of_coefficients: np.ndarray

  def health(self) -> Health:
    """Tell which centers are dead and which constant, bool [depth, heads · A]."""
    return Health(*jax.device_get(unit_health(self.responses, self.of_coefficients)))

  def mean(self) -> np.ndarray:
    """Mean response of each block, [depth]."""
    return self.responses.mean(axis=(1, 2), dtype=np.float64)

  def spread(self) -> np.ndarray:
    """How a center's response differs from token to token: root mean variance, [depth]; 0 if units are constant."""
    return np.sqrt(self.responses.var(axis=1, dtype=np.float64).mean(axis=1))

  def learning(self) -> np.ndarray:
    """Root mean square of the gradient of each block's centers, [depth]; 0 if they can't learn."""
    return np.sqrt(np.square(self.gradients, dtype=np.float64).mean(axis=1))


def observe(model: ImageClassifier, params: Any, images: jax.Array, labels: jax.Array) -> Units:
  """Responses and gradients of a model whose stage 2 is `hbf.nn.hyperbf.HyperBFCenters`.

  Args:
    model: the network.
    params: of the network.
    images: [B, height, width, channels], normalized.
    labels: int [B].
  """

  @jax.jit
  def compute(params: Any) -> tuple[Any, Any]:
    def loss(params: Any) -> tuple[jax.Array, Any]:
      logits, sown = unrolled(model).apply({'params': params}, images, train=False, mutable=['responses'])
      return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), sown['responses']

    gradient, responses = jax.grad(loss, has_aux=True)(params)
    return gradient, responses

  gradient, responses = compute(params)
  blocks = [f'block{i}' for i in range(model.trunk.depth)]
  units = [gradient[block]['stage2'] for block in blocks]
  return Units(
    # [heads, tokens, A] to [tokens, heads · A]
    responses=np.stack([_by_token(responses[block]['stage2']['responses'][0]) for block in blocks]),
    gradients=np.stack([np.sqrt(np.mean(np.square(u['centers']), axis=-1)).reshape(-1) for u in units]),
    of_coefficients=np.stack([np.abs(u['coefficients']).max(axis=-1).reshape(-1) for u in units]),
  )


def _by_token(responses: jax.Array) -> np.ndarray:
  return np.asarray(responses.swapaxes(0, 1).reshape(responses.shape[1], -1))
