"""Stages by name. A new stage is one file and one line here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from hbf.errors import UserError, choose
from hbf.nn.attention import SoftmaxAttention
from hbf.nn.hyperbf import HyperBFAttention, HyperBFUnit
from hbf.nn.mlp import MLP

# A stage 2 says in its class attribute `size` which of its options counts its units.
STAGE1: dict[str, type[nn.Module]] = {'hyperbf': HyperBFAttention, 'softmax': SoftmaxAttention}
STAGE2: dict[str, type[nn.Module]] = {'hyperbf': HyperBFUnit, 'mlp': MLP}

# Named models: which stages their blocks have. Any other pair is named STAGE1+STAGE2, as in softmax+hyperbf.
MODELS = {'hyperbf': ('hyperbf', 'hyperbf'), 'vit': ('softmax', 'mlp')}

Stage = Callable[..., nn.Module]


def stage_names(model: str) -> tuple[str, str]:
  """The names of stage 1 and stage 2 of a model: a key of MODELS, or any pair as STAGE1+STAGE2.

  Raises:
    UserError: no such model or stage.
  """
  if '+' not in model:
    return choose('model', model, MODELS)
  first, second = model.split('+', 1)
  choose('stage 1', first, STAGE1)
  choose('stage 2', second, STAGE2)
  return first, second


def make_stages(model: str, stage1: Mapping[str, Any], stage2: Mapping[str, Any]) -> tuple[Stage, Stage]:
  """Constructors of a model's two stages with these options bound; they still take name and dtype.

  Raises:
    UserError: unknown model, or options that aren't exactly those of its stages.
  """
  first, second = stage_names(model)
  return (
    _bind(f'stage 1 {first!r}', STAGE1[first], stage1),
    _bind(f'stage 2 {second!r}', STAGE2[second], stage2),
  )


def size_option(model: str) -> str:
  """The option that says how many units stage 2 of a model has, such as 'centres' or 'hidden'."""
  return STAGE2[stage_names(model)[1]].size  # type: ignore[attr-defined]


def options_of(module: type[nn.Module]) -> tuple[str, ...]:
  """The names of the options a stage takes from a config."""
  internal = ('name', 'parent', 'dtype')
  return tuple(field.name for field in dataclasses.fields(module) if field.name not in internal)  # type: ignore[arg-type]


def _bind(what: str, module: type[nn.Module], options: Mapping[str, Any]) -> Stage:
  known = {name: name for name in options_of(module)}
  for option in options:
    choose(f'option of {what}', option, known)
  if missing := sorted(set(known) - set(options)):
    raise UserError(
      f'{what} needs the options {", ".join(missing)}: pick the model in the config argument, model=NAME'
    )
  return functools.partial(module, **options)
