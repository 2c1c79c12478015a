"""Image classifier: an embedding, homogeneous blocks and a linear head."""

import math
from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.models.embedding import PatchEmbedding
from hbf.nn.checked import CheckedModule
from hbf.nn.context import Context
from hbf.nn.trunk import Trunk
from hbf.options import whole


class ImageClassifier(CheckedModule):
  """An embedding, a trunk of blocks, and a linear head on the pooled tokens.

  The head reads the class token or the mean of all tokens, see `pool` of `PatchEmbedding`. With pool 'sequence' the
  mean is weighted: a linear layer computes a score for each token, and the weights are the softmax of the scores
  (sequence pooling, Hassani et al. 2021).

  Attributes:
    embed: the embedding, which makes tokens from images.
    trunk: the blocks and the last LayerNorm.
    classes: number of logits.
    input_dtype: type of the inputs.
  """

  input_dtype: ClassVar[Any] = jnp.float32

  embed: PatchEmbedding
  trunk: Trunk
  classes: Annotated[int, whole(1)]

  def setup(self) -> None:
    """Name the parameters `embedding` and `block0`, not `embed/embedding` and `trunk/block0`."""
    for part in (self.embed, self.trunk):
      nn.share_scope(self, part)

  @nn.compact
  def __call__(self, images: Float[Array, 'B height width channels'], *, train: bool) -> Float[Array, 'B classes']:
    """Compute logits [B, classes] in float32 of normalized images [B, height, width, channels].

    Raises:
      UserError: the images have no four axes, the patch doesn't divide them, or an option's value is unknown.
    """
    tokens, positions = self.embed(images, train)
    grid = (images.shape[1] // self.embed.patch, images.shape[2] // self.embed.patch)
    patches_only = tokens.shape[1] == math.prod(grid)
    context = Context(train=train, positions=positions, grid=grid if patches_only else None)
    tokens = self.trunk(tokens, context, self.embed.read)
    return nn.Dense(self.classes, name='head')(self._pooled(tokens).astype(jnp.float32))

  def _pooled(self, tokens: jax.Array) -> jax.Array:
    """Pool tokens [B, M, D] to one vector for the head, [B, D]."""
    if self.embed.pool != 'sequence':
      return tokens.mean(axis=1)
    scores = nn.Dense(1, use_bias=False, dtype=tokens.dtype, name='pool')(tokens)  # a bias would cancel
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=1).astype(tokens.dtype)
    return jnp.sum(weights * tokens, axis=1)
