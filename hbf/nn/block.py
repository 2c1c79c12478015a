"""The homogeneous block: any stage 1 with any stage 2, pre-norm and residual."""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.registry import Stage
from hbf.ops.layout import BATCH, laid
from hbf.options import FLAG, NOT_NEGATIVE, POSITIVE, RATE


class Block(CheckedModule):
  """Y = X + stage1(LayerNorm(X)), Z = Y + stage2(LayerNorm(Y)) (memo eq. 1 and Figure 1).

  Attributes:
    stage1: makes the module that mixes tokens, [B, N, D] to [B, N, D].
    stage2: makes the module that works on every token, [B, N, D] to [B, N, D]; None: stage 1 does all.
    dropout: rate, on the output of each stage.
    dtype: of the products; parameters are float32.
    norm_epsilon: added to the variance in each LayerNorm.
    parallel: Z = X + stage1(LayerNorm₁(X)) + stage2(LayerNorm₂(X)) instead (Wang & Komatsuzaki 2021).
    layer_scale: each stage's output is multiplied by a learned vector that starts here (LayerScale, Touvron et al.
      2021); 0: it isn't.
  """

  stage1: Stage
  stage2: Stage | None
  dropout: Annotated[float, RATE]
  dtype: Any = jnp.float32
  norm_epsilon: Annotated[float, POSITIVE] = 1e-6
  parallel: Annotated[bool, FLAG] = False
  layer_scale: Annotated[float, NOT_NEGATIVE] = 0.0

  @nn.compact
  def __call__(
    self, tokens: jax.Array, context: Context = EVALUATION, drop_path: jax.Array | None = None
  ) -> jax.Array:
    """Maps tokens [B, N, D] to [B, N, D].

    Args:
      tokens: X.
      context: of the call; both stages get it.
      drop_path: rate at which an image goes past a stage in training (stochastic depth, Huang et al. 2016), or None.

    Raises:
      UserError: the context has a mask that stage 1 doesn't honour.
    """
    given = tokens
    for name, stage in (('stage1', self.stage1), ('stage2', self.stage2)):
      if stage is None:
        continue
      module = stage(dtype=self.dtype, name=name)
      affine = getattr(module, 'norm_affine', True)  # a stage may do without
      norm = nn.LayerNorm(self.norm_epsilon, self.dtype, use_scale=affine, use_bias=affine, name=f'norm_{name}')
      if name == 'stage1':  # stage 2 works on every token alone
        check_context(module, context)
      update = laid(module(norm(given if self.parallel else tokens), context), BATCH, None, None)
      if self.layer_scale:
        start = nn.initializers.constant(self.layer_scale)
        update *= self.param(f'scale_{name}', start, tokens.shape[-1:]).astype(update.dtype)
      update = nn.Dropout(self.dropout, deterministic=not context.train)(update)
      if context.train and drop_path is not None:
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - drop_path, (len(tokens), 1, 1))
        update *= (keep / (1 - drop_path)).astype(update.dtype)
      tokens += update
    return tokens
