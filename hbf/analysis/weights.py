"""How much of each token's values every token takes: the weights of attention, whatever computes it."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.analysis.capture import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.language import LanguageModel
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.hyperbf import HyperBFAttention


@functools.partial(jax.jit, static_argnums=0)
def attention_weights(model: ImageClassifier | LanguageModel, params: Any, inputs: jax.Array) -> dict[str, jax.Array]:
  """The weights of every head, by block, of the blocks whose stage 1 is attention: of softmax, HyperBF or gated.

  No kernel gives them away; but what a head makes is linear in the values, so values that are 1 for one token and 0
  for all others come out as its weights. Those of a query add up to 1, less what learned keys beside the tokens get.

  Args:
    model: the network.
    params: of the network.
    inputs: as the network takes them, [B, …].

  Returns:
    float32 [B, heads, N, N] by block, how much token i (first N) takes of token j (second N).
  """
  found: dict[str, jax.Array] = {}

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != '_over_tokens' or not isinstance(context.module, SoftmaxAttention | HyperBFAttention):
      return call(*args, **kwargs)
    q, k, v, about = args
    probes = _probes(v)
    q, k = (jnp.tile(z, (len(probes) + 1, 1, 1, 1)) for z in (q, k))
    out, *seen = call(q, k, jnp.concatenate([v, *probes]), about).reshape(-1, *v.shape).astype(jnp.float32)
    weights = jnp.concatenate(
      [of_probe - seen[0] for of_probe in seen[1:]], axis=-1
    )  # what learned keys add is in all
    found[context.module.path[0]] = weights[..., : v.shape[1]].swapaxes(1, 2)
    return out.astype(v.dtype)

  with nn.intercept_methods(intercept):
    unrolled(model).apply({'params': params}, inputs, train=False)
  return found


def _probes(values: jax.Array) -> jax.Array:
  """In place of values [B, N, H, e]: zeros, then of e tokens at a time which each of them is, [P, B, N, H, e]."""
  batch, length, heads, width = values.shape
  count = -(-length // width)
  each = jnp.eye(length, count * width, dtype=values.dtype).reshape(length, count, width).swapaxes(0, 1)
  probes = jnp.concatenate([jnp.zeros_like(each[:1]), each])
  return jnp.broadcast_to(probes[:, None, :, None], (count + 1, batch, length, heads, width))
