"""How wide the kernels of a model are, beside the distances that they are given, and what metrics were learned."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.capture import unrolled
from hbf.analysis.trained_run import TrainedRun
from hbf.models.classifier import ImageClassifier
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.parameters import learned_sigma
from hbf.nn.projections import of_norm_1
from hbf.ops.distances import squared_distances


@dataclasses.dataclass(frozen=True)
class Widths:
  """Of the kernels of a block's stage.

  Attributes:
    kernel: its name, see `hbf.ops.kernels`.
    width: σ, each that is learned, [n]; [] if it is fixed, or the kernel has none, as `SIGNED`.
    start: σ at init, of all; NaN where there is no learned σ.
    distance: root mean square of ‖W(x − t)‖ over the tokens and keys of an image, or tokens and centers.
    metric: ‖WᵀW − 1‖/‖1‖ (Frobenius), how far the metric is from the identity; None if it isn't learned.
  """

  kernel: str
  width: np.ndarray
  start: float
  distance: float
  metric: float | None

  @property
  def relative(self) -> float:
    """Return the mean width over the distances; NaN where there is no learned width."""
    return float(self.width.mean()) / self.distance if len(self.width) else float('nan')


def widths(subject: TrainedRun, images: np.ndarray) -> dict[str, dict[str, Widths]]:
  """The kernels of every block that has some, by block and stage.

  Args:
    subject: the run.
    images: uint8 [n, height, width, channels], of which distances are measured; a few do.
  """
  found: dict[str, dict[str, Widths]] = {}
  model, batch = subject.model, subject.normalized(images)
  squares = jax.device_get(_mean_squares(model, subject.params, batch))
  starts = jax.device_get(_starts(model, batch[:1]))
  for (block, stage), square in squares.items():
    params = subject.params[block][stage]
    options = subject.restored.config.model[stage]
    width = _width(params)
    start = float(_width(starts[block][stage]).mean()) if len(width) else float('nan')
    metric = _from_identity(options.metric, params.get('metric'))
    found.setdefault(block, {})[stage] = Widths(options.kernel, width, start, float(np.sqrt(square)), metric)
  return found


def _width(params: Mapping[str, Any]) -> np.ndarray:
  width = learned_sigma(params)
  return np.zeros(0) if width is None else np.asarray(width, np.float64).ravel()


def _from_identity(metric: str, weights: Any) -> float | None:
  if weights is None:
    return None
  w = np.asarray(weights, np.float64)
  heads = [np.diag(z**2) if metric == 'diagonal' else z if metric == 'bilinear' else z.T @ z for z in w]
  return float(np.mean([np.linalg.norm(z - np.eye(len(z))) / np.sqrt(len(z)) for z in heads]))


@functools.partial(jax.jit, static_argnums=0)
def _starts(model: ImageClassifier, images: jax.Array) -> dict[str, Any]:
  """The parameters of widths at init, which depend on nothing that is drawn."""
  params = model.init(jax.random.key(0), images, train=False)['params']
  return {
    block: {stage: {n: z for n, z in of_stage.items() if n == 'log_sigma'} for stage, of_stage in of_block.items()}
    for block, of_block in params.items()
    if block.startswith('block')
  }


@functools.partial(jax.jit, static_argnums=0)
def _mean_squares(model: ImageClassifier, params: Any, images: jax.Array) -> dict[tuple[str, str], jax.Array]:
  """Mean squared distances by block and stage."""
  found: dict[tuple[str, str], jax.Array] = {}

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if isinstance(module, HyperBFAttention) and context.method_name == '_over_tokens':
      points, centers = (z.swapaxes(1, 2) for z in args[:2])  # [B, H, N, d]
      found[module.path] = _mean_square(module, module.qk_norm, points, centers)
    if isinstance(module, HyperBFCenters) and context.method_name == '__call__':
      tokens, centers = args[0], module.variables['params']['centers']
      points = tokens.reshape(-1, module.heads, centers.shape[-1]).swapaxes(0, 1)
      found[module.path] = _mean_square(module, module.normalize_inputs, points, centers)
    return call(*args, **kwargs)

  with nn.intercept_methods(intercept):
    unrolled(model).apply({'params': params}, images, train=False)
  return found


def _mean_square(module: Any, norm: bool, points: jax.Array, centers: jax.Array) -> jax.Array:
  points, centers = (z.astype(jnp.float32) for z in (points, centers))
  if norm:
    points, centers = of_norm_1(points), of_norm_1(centers)
  weights = module.variables['params'].get('metric')
  return squared_distances(points, centers, module.metric, weights).mean()
