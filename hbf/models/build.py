"""Construction of a network from the `model` part of a config, and the cost of the network."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError
from ml_collections import ConfigDict

from hbf.errors import choose
from hbf.models.classifier import ImageClassifier
from hbf.models.embedding import FROZEN, PatchEmbedding
from hbf.models.flops import count_flops
from hbf.models.language import LanguageModel
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


def build_model(config: ConfigDict, classes: int) -> ImageClassifier:
  """Return the classifier for the `model` part of a config. No parameters are made.

  Raises:
    UserError: the model, an option or the dtype is unknown. Errors that depend on shapes come from `abstract_params`.
  """
  embed = PatchEmbedding(
    width=config.width,
    patch=config.patch,
    pool=config.pool,
    positions=config.positions,
    stem=config.stem,
    whiten=config.whiten,
    **_shared(config),
  )
  return ImageClassifier(embed, _build_trunk(config), classes)


def build_language_model(config: ConfigDict, vocabulary: int, length: int, causal: bool) -> LanguageModel:
  """Return the language model for the `model` part of a config. No parameters are made.

  Args:
    config: the `model` part of a config, with sizes and stages.
    vocabulary: number of tokens in the vocabulary.
    length: largest number of tokens of a text.
    causal: True if a token attends only to itself and the tokens before it.

  Raises:
    UserError: as in `build_model`.
  """
  return LanguageModel(
    _build_trunk(config),
    vocabulary=vocabulary,
    length=length,
    width=config.width,
    positions=config.positions,
    causal=causal,
    tied=config.tied,
    **_shared(config),
  )


def _build_trunk(config: ConfigDict) -> Trunk:
  stage1, stage2 = make_stages(config.name, config.heads, config.stage1, config.stage2)
  return Trunk(
    depth=config.depth,
    stage1=stage1,
    stage2=stage2,
    norm_epsilon=config.norm_epsilon,
    scan_layers=config.scan_layers,
    remat=config.remat,
    parallel=config.parallel,
    layer_scale=config.layer_scale,
    drop_path=config.drop_path,
    merge=tuple(config.get('merge', ())),  # image models only
    window=config.get('window', 0),  # image models only
    **_shared(config),
  )


def _shared(config: ConfigDict) -> dict[str, Any]:
  """Return the options that both the trunk and the embedding take."""
  return {'dropout': config.dropout, 'dtype': choose('model.dtype', config.dtype, DTYPES)}


def unrolled(model: Any) -> Any:
  """Return the model without `scan_layers` and `remat`. Flax can then return arrays from inside the blocks."""
  return model.clone(trunk=model.trunk.clone(scan_layers=False, remat=False))


def abstract_params(model: nn.Module, shape: tuple[int, ...]) -> Any:
  """Return the shapes and types of the model's parameters, for examples of a given shape. Nothing is computed.

  Raises:
    UserError: the patch doesn't divide the image, the heads don't divide the width, or an option is unknown.
  """
  init = functools.partial(_traced_init if _is_hashable(model) else _init, model)
  return jax.eval_shape(init, _example(model, shape))['params']


def _init(model: nn.Module, x: jax.Array) -> Any:
  return model.init(jax.random.key(0), x, train=False)


_traced_init = jax.jit(_init, static_argnums=0)  # equal models are traced once, though a run calls this four times


def _is_hashable(model: nn.Module) -> bool:
  try:
    hash(model)
  except TypeError:  # an option is an array or the like
    return False
  return True


def count_parameters(model: nn.Module, shape: tuple[int, ...]) -> int:
  """Return the number of learned parameters of the model, without those in `hbf.models.embedding.FROZEN`."""
  leaves = jax.tree_util.tree_leaves_with_path(abstract_params(model, shape))
  return sum(leaf.size for path, leaf in leaves if path[-1].key not in FROZEN)


def flops_per_example(model: nn.Module, shape: tuple[int, ...]) -> int:
  """Count the floating-point operations of the forward pass of one example (`hbf.models.flops.count_flops`)."""
  return count_flops(
    lambda params, x: model.apply({'params': params}, x, train=False),
    abstract_params(model, shape),
    _example(model, shape),
  )


def draws_numbers(model: nn.Module, shape: tuple[int, ...]) -> bool:
  """Return True if a network draws random numbers in training, for examples of a given shape."""
  try:
    jax.eval_shape(
      lambda params, x: model.apply({'params': params}, x, train=True),
      abstract_params(model, shape),
      _example(model, shape),
    )
  except InvalidRngError:
    return True
  return False


def _example(model: nn.Module, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
  """Return the shape [1, *shape] and the type of a batch of one example."""
  return jax.ShapeDtypeStruct((1, *shape), model.input_dtype)
