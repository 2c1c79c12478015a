"""The stages by name. To add a stage, write a file with its class and add a line here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from hbf.errors import UserError, choose
from hbf.nn.baselines.convolution import SeparableConvolution
from hbf.nn.baselines.gmlp import GatedMLP
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.mlp import MLP
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.baselines.token_mixing import AveragePooling, Identity, TokenMLP
from hbf.nn.gated import GatedHyperBF, GatedSoftmax
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.nn.positional import PositionalHyperBF
from hbf.nn.traits import traits_of
from hbf.options import Values, declared

# The fields of a stage are its options, with their defaults. Its class variable `traits` says everything else.
STAGE1: dict[str, type[nn.Module]] = {
  'hyperbf': HyperBFAttention,
  'positional': PositionalHyperBF,
  'gated_hyperbf': GatedHyperBF,
  'gated_softmax': GatedSoftmax,
  'softmax': SoftmaxAttention,
  'linear': LinearAttention,
  'gmlp': GatedMLP,
  'token_mlp': TokenMLP,
  'convolution': SeparableConvolution,
  'pooling': AveragePooling,
  'identity': Identity,
}
# Stage 2 'none' is None: stage 1 does the work of both stages.
STAGE2: dict[str, type[nn.Module] | None] = {'hyperbf': HyperBFCenters, 'mlp': MLP, 'none': None}

# The stages of named models. Any other pair is named STAGE1+STAGE2, such as softmax+hyperbf.
MODELS = {
  'hyperbf': ('hyperbf', 'hyperbf'),
  'positional': ('positional', 'hyperbf'),
  'unified': ('hyperbf', 'none'),
  'gated': ('gated_hyperbf', 'none'),
  'vit': ('softmax', 'mlp'),
  'gmlp': ('gmlp', 'none'),
  'amlp': ('gmlp', 'none'),
  'mixer': ('token_mlp', 'mlp'),
  'linear': ('linear', 'mlp'),
  'pooling': ('pooling', 'mlp'),
  'identity': ('identity', 'mlp'),
}

Stage = Callable[..., nn.Module]


class Bound(functools.partial):
  """A stage's class with its options.

  Two such objects are equal if their classes and options are equal. So models of equal configs are equal.
  """

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Bound) and (self.func, self.keywords) == (other.func, other.keywords)

  def __hash__(self) -> int:
    return hash((self.func, frozenset(self.keywords.items())))


def stage_names(model: str) -> tuple[str, str]:
  """Return the names of stage 1 and stage 2. `model` is a key of MODELS, or a pair of stages as STAGE1+STAGE2.

  Raises:
    UserError: the model or a stage is unknown.
  """
  if '+' not in model:
    return choose('model', model, MODELS)
  first, second = model.split('+', 1)
  choose('stage 1', first, STAGE1)
  choose('stage 2', second, STAGE2)
  return first, second


def make_stages(
  model: str, heads: int, stage1: Mapping[str, Any], stage2: Mapping[str, Any]
) -> tuple[Stage, Stage | None]:
  """Return constructors of a model's two stages with their options. They still need the arguments name and dtype.

  Args:
    model: a name as in `stage_names`.
    heads: number of heads of stage 1, if it has heads.
    stage1: other options of stage 1.
    stage2: options of stage 2.

  Returns:
    Stage 1 and stage 2. Stage 2 is None if the model has none.

  Raises:
    UserError: the model is unknown, a stage does not have a given option, or an option without a default is missing.
  """
  first, second = stage_names(model)
  return (
    _bind(f'stage 1 {first!r}', STAGE1[first], _shared(STAGE1[first], heads) | dict(stage1)),
    _bind(f'stage 2 {second!r}', STAGE2[second], stage2),
  )


def stage_options(model: str, units: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return all options of a model's two stages with their defaults. These are the defaults of the classes' fields.

  Args:
    model: a name as in `stage_names`.
    units: `model.expansion` × `model.width`. An option such as `hidden` has no default in its class. Its value is
      `units` times the stage's `unit_share`, or None if `units` is None.
  """
  first, second = _own_fields(model)
  counts = (None, None) if units is None else stage_units(model, units)
  return _defaults(first, counts[0]), _defaults(second, counts[1])


def stage_units(model: str, units: int) -> tuple[int, int]:
  """Return the number of units of each of a model's two stages: `units` times the stage's `unit_share`."""
  first, second = stage_names(model)
  one, two = (int(units * traits_of(module).unit_share) for module in (STAGE1[first], STAGE2[second]))
  return one, two


def stage_values(model: str) -> tuple[dict[str, Values], dict[str, Values]]:
  """Return the values that each option of a model's two stages may have."""
  first, second = map(declared, _own_fields(model))
  return first, second


def size_option(model: str) -> tuple[str, str] | None:
  """Return the option that sets the number of a model's units, such as ('stage2', 'centers').

  The option belongs to stage 1 if there is no stage 2. None: the model has no units.
  """
  first, second = stage_names(model)
  stage, module = ('stage2', STAGE2[second]) if STAGE2[second] else ('stage1', STAGE1[first])
  units = traits_of(module).units
  return (stage, units) if units else None


def with_units(stage: Stage | None, factor: int = 1, more: int = 0) -> Any:
  """Return a copy of the constructor `stage` that has `factor` · n + `more` units, where `stage` has n units.

  Constructors are as `make_stages` returns them, or other partial classes. A stage without units is returned
  unchanged, and so is a constructor of another kind, whose units are not known.
  """
  units = traits_of(stage.func).units if isinstance(stage, functools.partial) else None
  if units is None:
    return stage
  assert isinstance(stage, functools.partial)
  kind: Any = stage.func
  names = [field.name for field in dataclasses.fields(kind) if field.init and not field.kw_only]
  options = dict(zip(names, stage.args, strict=False)) | stage.keywords
  if units not in options:
    return stage
  return Bound(stage.func, **options | {units: factor * options[units] + more})


def takes_heads(model: str) -> bool:
  """Return True if a model's stage 1 has heads."""
  return bool(_shared(STAGE1[stage_names(model)[0]], 0))


def _shared(module: type[nn.Module], heads: int) -> dict[str, int]:
  """Return {'heads': heads} if a stage 1 has heads, else {}."""
  return {'heads': heads} if 'heads' in _fields(module) else {}


def _fields(module: type[nn.Module] | None) -> dict[str, dataclasses.Field]:
  """Return the fields of a stage that are options."""
  internal = ('name', 'parent', 'dtype')
  fields = dataclasses.fields(module) if module else ()  # type: ignore[arg-type]
  return {field.name: field for field in fields if field.name not in internal}


def _own_fields(model: str) -> tuple[dict[str, dataclasses.Field], dict[str, dataclasses.Field]]:
  """Return the fields of a model's two stages, without the field `heads` of stage 1."""
  first, second = stage_names(model)
  shared = _shared(STAGE1[first], 0)
  own = {name: field for name, field in _fields(STAGE1[first]).items() if name not in shared}
  return own, _fields(STAGE2[second])


def _defaults(fields: Mapping[str, dataclasses.Field], units: int | None) -> dict[str, Any]:
  return {name: units if field.default is dataclasses.MISSING else field.default for name, field in fields.items()}


def _bind(what: str, module: Any, options: Mapping[str, Any]) -> Any:
  fields = _fields(module)
  try:
    for option in options:
      choose(f'option of {what}', option, fields)
  except UserError as error:
    raise UserError(f'{error}. Options belong to a model: if you change the model, change its options') from None
  needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
  if missing := sorted(set(needed) - set(options)):
    raise UserError(f'{what} needs the options {", ".join(missing)}: add them')
  return Bound(module, **options) if module else None
