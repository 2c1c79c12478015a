"""The homogeneous block: any stage 1 with any stage 2, pre-norm and residual."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hbf.errors import UserError
from hbf.nn.checked import CheckedModule
from hbf.nn.context import EVALUATION, Context, check_context
from hbf.nn.dropout import Dropout
from hbf.nn.registry import Stage
from hbf.nn.traits import traits_of
from hbf.nn.windows import in_windows
from hbf.ops.layout import BATCH, constrain
from hbf.options import FLAG, FLOATS, NOT_NEGATIVE, POSITIVE, RATE, OptionError, whole


class Block(CheckedModule):
  """A homogeneous block: Y = X + stage1(LayerNorm(X)), then Z = Y + stage2(LayerNorm(Y)).

  X, Y and Z are tokens, as in eq. 1 and Figure 1 of CBMM Memo 143. A stage is a module, such as
  `HyperBFAttention(heads=4)`, or a constructor that takes a name and a dtype. The block makes its own module from the
  stage. So two blocks that are given the same stage share no parameters. The stage is called with tokens and a
  context (`hbf.nn.context.Context`).

  Attributes:
    stage1: the stage that mixes tokens, [B, N, D] to [B, N, D].
    stage2: the stage that works on every token alone, [B, N, D] to [B, N, D]. None if stage 1 does both jobs.
    dropout: dropout rate of the output of each stage.
    dtype: type of the matrix products, in the stages too. Parameters are float32. None: each stage keeps its own
      type.
    norm_epsilon: number added to the variance in each LayerNorm.
    parallel: True for Z = X + stage1(LayerNorm₁(X)) + stage2(LayerNorm₂(X)) (Wang & Komatsuzaki 2021).
    layer_scale: initial value of a learned vector that multiplies each stage's output (LayerScale, Touvron et al.
      2021). 0: there is no such vector.
    window: side of the squares of patches in which stage 1 mixes tokens (Liu et al. 2021). 0: it mixes all tokens.
    shifted: True to move these squares by half a side, see `hbf.nn.windows.in_windows`.
  """

  stage1: Stage | nn.Module
  stage2: Stage | nn.Module | None = None
  dropout: Annotated[float, RATE] = 0.0
  dtype: Annotated[Any, FLOATS] = None
  norm_epsilon: Annotated[float, POSITIVE] = 1e-6
  parallel: Annotated[bool, FLAG] = False
  layer_scale: Annotated[float, NOT_NEGATIVE] = 0.0
  window: Annotated[int, whole(0)] = 0
  shifted: Annotated[bool, FLAG] = False

  def __post_init__(self) -> None:
    """Replace each stage that is a module by its constructor. Flax then names the stages as parts of this block.

    Raises:
      ValueError: a stage is neither a module nor a constructor, or a field has a value outside its range.
    """
    make_constructors(self)
    super().__post_init__()

  @nn.compact
  def __call__(
    self, tokens: Float[Array, 'B N D'], context: Context = EVALUATION, drop_path: jax.Array | None = None
  ) -> Float[Array, 'B N D']:
    """Map tokens to tokens.

    Args:
      tokens: X, [B, N, D].
      context: the context of the call, for both stages.
      drop_path: probability that an example skips a stage in training (stochastic depth, Huang et al. 2016), or None.

    Returns:
      Z, [B, N, D].

    Raises:
      UserError: stage 1 does not support the context, the tokens do not have three axes, or the context's mask does
        not fit them. Or the tokens cannot be divided into windows.
    """
    y = tokens + self._update('stage1', tokens, context, drop_path)  # Y = X + stage1(LayerNorm(X))
    if self.stage2 is None:
      return y
    return y + self._update('stage2', tokens if self.parallel else y, context, drop_path)  # Z = Y + stage2(…)

  def _update(self, name: str, tokens: jax.Array, context: Context, drop_path: jax.Array | None) -> jax.Array:
    """Compute what a stage adds to the tokens [B, N, D]. Return an array of the same shape."""
    make: Any = getattr(self, name)
    stage = make(name=name) if self.dtype is None else make(name=name, dtype=self.dtype)
    affine = getattr(stage, 'norm_affine', True)
    norm = nn.LayerNorm(self.norm_epsilon, self.dtype, use_scale=affine, use_bias=affine, name=f'norm_{name}')
    mapped = self._mixing(stage) if name == 'stage1' else stage  # stage 2 works on every token alone
    update = constrain(mapped(norm(tokens), context), BATCH, None, None)
    if self.layer_scale:
      start = nn.initializers.constant(self.layer_scale)
      update *= self.param(f'scale_{name}', start, tokens.shape[-1:], jnp.float32).astype(update.dtype)
    update = Dropout(self.dropout, deterministic=not context.train)(update)
    if context.train and drop_path is not None:
      keep = jax.random.bernoulli(self.make_rng('dropout'), 1 - drop_path, (len(tokens), 1, 1))
      update *= (keep / (1 - drop_path)).astype(update.dtype)
    return update

  def _mixing(self, stage: Any) -> Callable[[jax.Array, Context], jax.Array]:
    """Return a function that applies stage 1 to all tokens, or in windows, and checks what the stage supports."""

    def checked(tokens: jax.Array, context: Context) -> jax.Array:
      if self.window and context.mask is not None and traits_of(stage).masks != 'any':
        raise OptionError(
          f'window={self.window} moves windows, and {type(stage).__name__} takes no mask that keeps their parts '
          'apart: use softmax, hyperbf or positional as stage 1, or set window to 0',
          window=self.window,
        )
      check_context(stage, context, tokens.shape)  # a stage of a user need not check it
      return stage(tokens, context)

    if not self.window:
      return checked
    return functools.partial(in_windows, checked, window=self.window, shifted=self.shifted)


def make_constructors(module: nn.Module) -> None:
  """Replace `stage1` and `stage2` of a module by their constructors, where they are modules.

  Raises:
    UserError: a stage is neither a module nor a constructor.
  """
  for field in ('stage1', 'stage2'):
    object.__setattr__(module, field, _constructor(field, getattr(module, field)))


def _constructor(field: str, stage: Any) -> Any:
  """Return a constructor of modules like `stage`, with its options. If `stage` is a constructor, return it unchanged.

  `field` is the name of the stage in the message of the error: 'stage1' or 'stage2'.
  """
  if isinstance(stage, nn.Module):
    fields = [option.name for option in dataclasses.fields(stage) if option.init]
    own = {name: getattr(stage, name) for name in fields if name not in ('parent', 'name')}
    return functools.partial(type(stage), **own)
  if stage is None and field == 'stage2':
    return None
  if not callable(stage):
    raise UserError(f'{field} is {stage!r}: expected a module, such as HyperBFAttention(heads=4), or a constructor')
  return stage
