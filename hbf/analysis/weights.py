"""Attention weights of every kind of attention in stage 1."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.analysis.unit_params import in_order
from hbf.errors import UserError
from hbf.models.build import unrolled
from hbf.models.classifier import ImageClassifier
from hbf.models.language import LanguageModel
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.hyperbf import HyperBFAttention
from hbf.nn.positional import PositionalHyperBF

ATTENTION = (SoftmaxAttention, HyperBFAttention, PositionalHyperBF)  # stages 1 with weights, and their subclasses


def attention_weights(model: ImageClassifier | LanguageModel, params: Any, inputs: jax.Array) -> dict[str, jax.Array]:
  """Compute the attention weights of every head, for each block whose stage 1 is of a kind in `ATTENTION`.

  The output of a head is Σ_j w_j v_j. So with one-hot vectors in place of the values v_j, it shows the weights w_j.
  The weights of a query sum to 1. If stage 1 has a memory, the sum includes the weights of its centers, which are not
  returned.

  Args:
    model: the network.
    params: its parameters.
    inputs: the network's inputs, [B, …].

  Returns:
    float32 [B, heads, N, N] by block: the weight of token j (second N) for token i (first N).

  Raises:
    UserError: stage 1 mixes tokens in windows, so no head has weights for all tokens.
  """
  if window := model.trunk.window:
    raise UserError(
      f'stage 1 mixes tokens in windows (model.window={window}), whose attention weights are not computed: give a '
      'run with model.window=0'
    )
  return in_order(_attention_weights(model, params, inputs))


@functools.partial(jax.jit, static_argnums=0)
def _attention_weights(
  model: ImageClassifier | LanguageModel, params: Any, inputs: jax.Array
) -> dict[str, jax.Array]:
  found: dict[str, jax.Array] = {}

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != '_over_tokens' or not isinstance(context.module, ATTENTION):
      return call(*args, **kwargs)
    compared, (v, *about) = _split(context.module, args)
    probes = _probes(v)
    tiled = (jnp.tile(z, (len(probes) + 1, 1, 1, 1)) for z in compared)
    out, *outputs = call(*tiled, jnp.concatenate([v, *probes]), *about).reshape(-1, *v.shape).astype(jnp.float32)
    # The output for values of 0 is the contribution of the memory. All other outputs contain it too.
    weights = jnp.concatenate([output - outputs[0] for output in outputs[1:]], axis=-1)
    found[context.module.path[0]] = weights[..., : v.shape[1]].swapaxes(1, 2)
    return out.astype(v.dtype)

  with nn.intercept_methods(intercept):
    unrolled(model).apply({'params': params}, inputs, train=False)
  return found


def _split(stage: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Return the queries and keys of a stage, if it has some, and its other arguments. They begin with the values."""
  count = 0 if isinstance(stage, PositionalHyperBF) else 2
  return args[:count], args[count:]


def _probes(values: jax.Array) -> jax.Array:
  """Return P = 1 + ⌈N/e⌉ arrays, stacked as [P, B, N, H, e], to be used in place of the values [B, N, H, e].

  With one-hot values, the output of attention shows the weights. The first array is 0, so its output is the
  contribution of the memory. Each later array has one-hot vectors for e of the N tokens, and 0 for the others.
  """
  batch, length, heads, width = values.shape
  count = -(-length // width)
  each = jnp.eye(length, count * width, dtype=values.dtype).reshape(length, count, width).swapaxes(0, 1)
  probes = jnp.concatenate([jnp.zeros_like(each[:1]), each])
  return jnp.broadcast_to(probes[:, None, :, None], (count + 1, batch, length, heads, width))
