"""What passes through a network on its way from images to logits."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.models.classifier import ImageClassifier
from hbf.nn.block import Block
from hbf.nn.hyperbf import HyperBFCenters


class Activations(NamedTuple):
  """Of B images.

  Attributes:
    tokens: what goes into the first block and comes out of each, float32 [depth + 1, B, N, D].
    points: what the HyperBF of stage 2 is given, by block that has one: float32 [B, N, D].
    responses: of its centers, as they go into its sum, head by head: float32 [B, N, heads · A].
    log_kernels: log K of its distances, likewise: how near a token is to a center.
    features: what the head is given, float32 [B, D].
    logits: float32 [B, classes].
  """

  tokens: jax.Array
  points: dict[str, jax.Array]
  responses: dict[str, jax.Array]
  log_kernels: dict[str, jax.Array]
  features: jax.Array
  logits: jax.Array


def unrolled(model: Any) -> Any:
  """The same network without a loop over its blocks, which hands out nothing of what passes there."""
  return model.clone(trunk=model.trunk.clone(scan_layers=False, remat=False))


@functools.partial(jax.jit, static_argnums=0)
def look(model: ImageClassifier, params: Any, images: jax.Array) -> Activations:
  """Runs the network once and keeps what passes.

  Args:
    model: the network.
    params: of the network.
    images: normalized, [B, height, width, channels].
  """
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
    tokens=jnp.stack(tokens).astype(jnp.float32),
    points=points,
    responses={block: _by_token(unit['responses'][0], points[block]) for block, unit in units.items()},
    log_kernels={block: _by_token(unit['log_kernels'][0], points[block]) for block, unit in units.items()},
    features=features[0],
    logits=logits,
  )


def _by_token(of_heads: jax.Array, points: jax.Array) -> jax.Array:
  """[heads, B N, A] to [B, N, heads · A]."""
  return of_heads.swapaxes(0, 1).reshape(*points.shape[:2], -1).astype(jnp.float32)
