"""From the `model` part of a config to a network, and what the network costs."""

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hbf.errors import choose
from hbf.models.classifier import ImageClassifier
from hbf.models.embedding import PatchEmbedding
from hbf.models.flops import count_flops
from hbf.nn.registry import make_stages
from hbf.nn.trunk import Trunk

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


def build_model(config: ConfigDict, classes: int) -> ImageClassifier:
  """The classifier that `config` (the `model` part) describes; no parameters are made.

  Raises:
    UserError: unknown model, option or dtype. What only shapes tell is found by `abstract_params`.
  """
  stage1, stage2 = make_stages(config.name, config.heads, config.stage1, config.stage2)
  shared: dict[str, Any] = {'dropout': config.dropout, 'dtype': choose('model.dtype', config.dtype, DTYPES)}
  trunk = Trunk(
    depth=config.depth,
    stage1=stage1,
    stage2=stage2,
    norm_epsilon=config.norm_epsilon,
    scan_layers=config.scan_layers,
    remat=config.remat,
    parallel=config.parallel,
    layer_scale=config.layer_scale,
    drop_path=config.drop_path,
    **shared,
  )
  embed = PatchEmbedding(
    width=config.width,
    patch=config.patch,
    pool=config.pool,
    positions=config.positions,
    stem=config.stem,
    **shared,
  )
  return ImageClassifier(embed, trunk, classes)


def abstract_params(model: ImageClassifier, image_shape: tuple[int, int, int]) -> Any:
  """Shapes and types of the model's parameters for images [height, width, channels]; nothing is computed.

  Raises:
    UserError: the patch doesn't divide the image, the heads don't divide the width, or an option isn't known.
  """
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)['params']


def count_parameters(model: ImageClassifier, image_shape: tuple[int, int, int]) -> int:
  """Learned numbers of the model."""
  return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(model, image_shape)))


def flops_per_image(model: ImageClassifier, image_shape: tuple[int, int, int]) -> int:
  """Floating-point operations of one image's forward pass, see `hbf.models.flops.count_flops`."""
  image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  return count_flops(
    lambda params, x: model.apply({'params': params}, x, train=False), abstract_params(model, image_shape), image
  )
