"""Intermediate arrays of a network, captured between the images and the logits."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.analysis.unit_params import in_order
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.nn.block import Block
from hbf.nn.hyperbf import HyperBFCenters


class Activations(NamedTuple):
  """Intermediate arrays of a network for B images.

  Attributes:
    tokens: tokens before the first block and after each block, depth + 1 arrays float32 [B, N, D]. N and D differ
      between blocks of several resolutions.
    points: input of stage 2, float32 [B, N, D], for each block whose stage 2 is a HyperBF.
    responses: responses R of the centers of these blocks, float32 [B, N, heads · A]. Stage 2 computes Σ R c. A head
      has A centers, and the centers of all heads are concatenated.
    log_kernels: log K for the same centers, float32 [B, N, heads · A]. The greater the value, the nearer the token to
      the center. For ball kernels and the other kernels in `hbf.ops.kernels.DIRECT`, the depth b − s replaces log K.
    features: input of the classifier's head, float32 [B, D].
    logits: logits of the classifier, float32 [B, classes].
  """

  tokens: tuple[jax.Array, ...]
  points: dict[str, jax.Array]
  responses: dict[str, jax.Array]
  log_kernels: dict[str, jax.Array]
  features: jax.Array
  logits: jax.Array


def capture(model: ImageClassifier, params: Any, images: jax.Array) -> Activations:
  """Run the network once and return its intermediate arrays.

  Args:
    model: the network.
    params: its parameters.
    images: normalized images, [B, height, width, channels].
  """
  seen = _capture(model, params, images)
  by_block = {name: in_order(getattr(seen, name)) for name in ('points', 'responses', 'log_kernels')}
  return seen._replace(**by_block)


@functools.partial(jax.jit, static_argnums=0)
def _capture(model: ImageClassifier, params: Any, images: jax.Array) -> Activations:
  tokens: list[jax.Array] = []
  points: dict[str, jax.Array] = {}
  features: list[jax.Array] = []

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    out = call(*args, **kwargs)
    if context.method_name != '__call__':
      return out
    if isinstance(module, Block):
      tokens.extend([out] if tokens else [args[0], out])
    elif isinstance(module, HyperBFCenters):
      points[module.path[0]] = args[0].astype(jnp.float32)
    elif module.path == ('head',):
      features.append(args[0])
    return out

  with nn.intercept_methods(intercept):
    logits, sown = unrolled(model).apply({'params': params}, images, train=False, mutable=['responses'])
  units = {block: kept['stage2'] for block, kept in sown.get('responses', {}).items()}
  return Activations(
    tokens=tuple(z.astype(jnp.float32) for z in tokens),
    points=points,
    responses={block: by_token(unit['responses'][0], points[block].shape[:2]) for block, unit in units.items()},
    log_kernels={block: by_token(unit['log_kernels'][0], points[block].shape[:2]) for block, unit in units.items()},
    features=features[0],
    logits=logits,
  )


def by_token(responses: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Reshape responses of A centers in each head, [heads, B·N, A], to float32 [B, N, heads·A]. `shape` is (B, N)."""
  return responses.swapaxes(0, 1).reshape(*shape, -1).astype(jnp.float32)
