"""Learned sigmas and metrics of a model's kernels, and the distances at which the kernels are evaluated."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hbf.analysis.trained_run import TrainedRun
from hbf.analysis.unit_params import in_order
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.parameters import learned_sigma
from hbf.nn.projections import of_norm_1
from hbf.ops.distances import squared_distances


@dataclasses.dataclass(frozen=True)
class SigmaSummary:
  """Sigmas and metric of stage 1 or stage 2 of a block.

  Attributes:
    kernel: name of the kernel in `hbf.ops.kernels`.
    sigma: all learned σ of the stage, [n]. n is 0 if σ is fixed, or if the kernel has no σ (`signed_gaussian`).
    sigma_init: mean σ at initialization. NaN if no σ is learned.
    distance: root mean square of the distance ‖W(x − t)‖. In stage 1, x is a query and t a key of the same image, or
      of the same window (`model.window`), even if a mask hides it. Rotary positions do not turn them yet, and the
      centers of `memory` are left out. In stage 2, x is a token and t a center.
    metric: difference of the metric from the identity, ‖WᵀW − 1‖/‖1‖ in Frobenius norms, as the mean over the heads.
      None if the metric is not learned.
  """

  kernel: str
  sigma: np.ndarray
  sigma_init: float
  distance: float
  metric: float | None

  @property
  def relative(self) -> float:
    """Mean σ divided by the distance. NaN if no σ is learned."""
    return float(self.sigma.mean()) / self.distance if len(self.sigma) else float('nan')


def summarize_sigmas(run: TrainedRun, images: np.ndarray) -> dict[str, dict[str, SigmaSummary]]:
  """Return a summary of each stage that has a kernel, as `result['block0']['stage2']` for stage 2 of block 0.

  Args:
    run: the run.
    images: images whose distances are measured, uint8 [n, height, width, channels]. A few images are enough.
  """
  found: dict[str, dict[str, SigmaSummary]] = {}
  model, batch = run.model, run.normalized(images)
  squares = jax.device_get(_mean_squares(model, run.params, batch))
  starts = jax.device_get(_initial_sigmas(model, batch[:1]))
  for (block, stage), square in squares.items():
    params = run.params[block][stage]
    options = run.restored.config.model[stage]
    sigma = _sigma(params)
    sigma_init = float(_sigma(starts[block][stage]).mean()) if len(sigma) else float('nan')
    metric = _distance_from_identity(options.metric, params.get('metric'))
    found.setdefault(block, {})[stage] = SigmaSummary(
      options.kernel, sigma, sigma_init, float(np.sqrt(square)), metric
    )
  return in_order(found)


def _sigma(params: Mapping[str, Any]) -> np.ndarray:
  sigma = learned_sigma(params)
  return np.zeros(0) if sigma is None else np.asarray(sigma, np.float64).ravel()


def _distance_from_identity(metric: str, weights: Any) -> float | None:
  """Return the mean of ‖WᵀW − 1‖/‖1‖ over the heads, or None if the metric has no learned weights.

  Args:
    metric: name of the metric.
    weights: the learned weights of each head. They are the diagonal of W for metric 'diagonal', WᵀW for 'bilinear',
      and W for all other metrics. None if nothing is learned.
  """
  if weights is None:
    return None
  w = np.asarray(weights, np.float64)
  heads = [np.diag(z**2) if metric == 'diagonal' else z if metric == 'bilinear' else z.T @ z for z in w]
  return float(np.mean([np.linalg.norm(z - np.eye(len(z))) / np.sqrt(len(z)) for z in heads]))


@functools.partial(jax.jit, static_argnums=0)
def _initial_sigmas(model: ImageClassifier, images: jax.Array) -> dict[str, Any]:
  """Return log σ at initialization by block and stage. It is the same for every random key."""
  params = model.init(jax.random.key(0), images, train=False)['params']
  return {
    block: {
      stage: {n: z for n, z in parts[stage].items() if n == 'log_sigma'}
      for stage in ('stage1', 'stage2')
      if stage in parts
    }
    for block, parts in params.items()
    if block.startswith('block')
  }


@functools.partial(jax.jit, static_argnums=0)
def _mean_squares(model: ImageClassifier, params: Any, images: jax.Array) -> dict[tuple[str, str], jax.Array]:
  """Return, by block and stage, the mean of ‖W(x − t)‖² over points x and centers t."""
  found: dict[tuple[str, str], jax.Array] = {}

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if isinstance(module, HyperBFAttention) and context.method_name == '_over_tokens':
      points, centers = (z.swapaxes(1, 2) for z in args[:2])  # [B, H, N, d]
      if not module.qk_norm:  # then they are divided by σ
        points, centers = args[3] * points, args[3] * centers
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
