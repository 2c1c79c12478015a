"""From the `model` part of a config to a network, and what the network costs."""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hbf.errors import UserError, choose
from hbf.models.classifier import ImageClassifier
from hbf.nn.registry import make_stages

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


def build_model(config: ConfigDict, classes: int) -> ImageClassifier:
  """The classifier that `config` (the `model` part) describes; no parameters are made.

  Raises:
    UserError: unknown model, option or value, or a width that isn't divisible by the heads.
  """
  if config.width % config.heads:
    raise UserError(f'model.width {config.width} is not divisible by model.heads {config.heads}')
  stage1, stage2 = make_stages(config.name, {'heads': config.heads, **config.stage1}, config.stage2)
  return ImageClassifier(
    classes=classes,
    width=config.width,
    depth=config.depth,
    patch=config.patch,
    pool=config.pool,
    positions=config.positions,
    dropout=config.dropout,
    stage1=stage1,
    stage2=stage2,
    dtype=choose('model.dtype', config.dtype, DTYPES),
    norm_epsilon=config.norm_epsilon,
  )


def count_parameters(model: ImageClassifier, image_shape: tuple[int, int, int]) -> int:
  """Learned numbers of the model for images [height, width, channels]; nothing is computed."""
  images = jnp.zeros((1, *image_shape))
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes['params']))


def flops_per_image(model: ImageClassifier, image_shape: tuple[int, int, int]) -> int:
  """Floating-point operations of one image's forward pass as XLA counts them (a multiply-add is two)."""
  image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(image.shape), train=False))
  lowered = jax.jit(lambda v, x: model.apply(v, x, train=False)).lower(variables, image)
  return int((lowered.cost_analysis() or {})['flops'])
