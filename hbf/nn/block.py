"""The homogeneous block: any stage 1 with any stage 2, pre-norm and residual."""

import dataclasses
import functools
from typing import Annotated, Any

import flax.linen as nn
import jax

from hbf.errors import UserError
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.registry import Stage
from hbf.ops.layout import BATCH, constrain
from hbf.options import FLAG, NOT_NEGATIVE, POSITIVE, RATE


class Block(CheckedModule):
  """A homogeneous block: Y = X + stage1(LayerNorm(X)), Z = Y + stage2(LayerNorm(Y)) (memo eq. 1 and Figure 1).

  A stage is a module, such as `HyperBFAttention(heads=4)`, or a constructor of one that takes a name and a dtype. The
  block makes a module of its own from it, so blocks that are given the same stage share no parameters. The stage is
  called with tokens and a context (`hbf.nn.context.Context`).

  Attributes:
    stage1: mixes tokens, [B, N, D] to [B, N, D].
    stage2: works on every token, [B, N, D] to [B, N, D]; None: stage 1 does all.
    dropout: rate, on the output of each stage.
    dtype: of the products, in the stages too; parameters are float32. None: each stage keeps its own.
    norm_epsilon: added to the variance in each LayerNorm.
    parallel: Z = X + stage1(LayerNorm₁(X)) + stage2(LayerNorm₂(X)) instead (Wang & Komatsuzaki 2021).
    layer_scale: each stage's output is multiplied by a learned vector that starts here (LayerScale, Touvron et al.
      2021); 0: it isn't.
  """

  stage1: Stage | nn.Module
  stage2: Stage | nn.Module | None = None
  dropout: Annotated[float, RATE] = 0.0
  dtype: Any = None
  norm_epsilon: Annotated[float, POSITIVE] = 1e-6
  parallel: Annotated[bool, FLAG] = False
  layer_scale: Annotated[float, NOT_NEGATIVE] = 0.0

  def __post_init__(self) -> None:
    """Take modules for their constructors: Flax would name them after where they were made.

    Raises:
      ValueError: a stage is neither a module nor a constructor, or a field has a value that it can't have.
    """
    for field in ('stage1', 'stage2'):
      object.__setattr__(self, field, _constructor(field, getattr(self, field)))
    super().__post_init__()

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
      UserError: the context has a mask that stage 1 doesn't honor.
    """
    given = tokens
    for name, stage in (('stage1', self.stage1), ('stage2', self.stage2)):
      if stage is None:
        continue
      module = stage(name=name) if self.dtype is None else stage(name=name, dtype=self.dtype)
      affine = getattr(module, 'norm_affine', True)  # a stage may do without
      norm = nn.LayerNorm(self.norm_epsilon, self.dtype, use_scale=affine, use_bias=affine, name=f'norm_{name}')
      if name == 'stage1':  # stage 2 works on every token alone
        check_context(module, context)
      update = constrain(module(norm(given if self.parallel else tokens), context), BATCH, None, None)
      if self.layer_scale:
        start = nn.initializers.constant(self.layer_scale)
        update *= self.param(f'scale_{name}', start, tokens.shape[-1:]).astype(update.dtype)
      update = nn.Dropout(self.dropout, deterministic=not context.train)(update)
      if context.train and drop_path is not None:
        keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - drop_path, (len(tokens), 1, 1))
        update *= (keep / (1 - drop_path)).astype(update.dtype)
      tokens += update
    return tokens


def _constructor(field: str, stage: Any) -> Any:
  """Return what makes modules like a given one; a constructor is its own."""
  if isinstance(stage, nn.Module):
    fields = [option.name for option in dataclasses.fields(stage) if option.init]
    own = {name: getattr(stage, name) for name in fields if name not in ('parent', 'name')}
    return functools.partial(type(stage), **own)
  if stage is None and field == 'stage2':
    return None
  if not callable(stage):
    raise UserError(f'{field} is {stage!r}: expected a module, such as HyperBFAttention(heads=4), or a constructor')
  return stage
