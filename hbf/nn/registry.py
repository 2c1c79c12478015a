"""Stages by name. A new stage is one file and one line here."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from hbf.errors import UserError, choose
from hbf.nn.baselines.gmlp import GatedMLP
from hbf.nn.baselines.linear_attention import LinearAttention
from hbf.nn.baselines.mlp import MLP
from hbf.nn.baselines.softmax import SoftmaxAttention
from hbf.nn.baselines.token_mixing import AveragePooling, Identity, TokenMLP
from hbf.nn.gated import GatedHyperBF, GatedSoftmax
from hbf.nn.hyperbf import HyperBFAttention, HyperBFCenters
from hbf.options import Values, declared

# A stage's fields are its options, with their defaults. One that can have more or fewer units says in its class
# attribute `size` which option counts them; what it honors of a context stands in `masked` and `causal`.
STAGE1: dict[str, type[nn.Module]] = {
  'hyperbf': HyperBFAttention,
  'gated_hyperbf': GatedHyperBF,
  'gated_softmax': GatedSoftmax,
  'softmax': SoftmaxAttention,
  'linear': LinearAttention,
  'gmlp': GatedMLP,
  'token_mlp': TokenMLP,
  'pooling': AveragePooling,
  'identity': Identity,
}
# After a stage 1 that does both stages' work there is none.
STAGE2: dict[str, type[nn.Module] | None] = {'hyperbf': HyperBFCenters, 'mlp': MLP, 'none': None}

# Named models: which stages their blocks have. Any other pair is named STAGE1+STAGE2, as in softmax+hyperbf.
# What else a named model sets stands in configs/common.py.
MODELS = {
  'hyperbf': ('hyperbf', 'hyperbf'),
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


def make_stages(
  model: str, heads: int, stage1: Mapping[str, Any], stage2: Mapping[str, Any]
) -> tuple[Stage, Stage | None]:
  """Constructors of a model's two stages with these options bound; they still take name and dtype.

  Args:
    model: a name as in `stage_names`.
    heads: of stage 1, if it has heads.
    stage1: its other options.
    stage2: its options.

  Returns:
    Stage 1 and stage 2, which is None if the model has none.

  Raises:
    UserError: unknown model, an option that its stages don't have, or none for what has no default.
  """
  first, second = stage_names(model)
  return (
    _bind(f'stage 1 {first!r}', STAGE1[first], _shared(STAGE1[first], heads) | dict(stage1)),
    _bind(f'stage 2 {second!r}', STAGE2[second], stage2),
  )


def stage_options(model: str, units: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return all options of a model's two stages with their defaults, which stand on the fields of their classes.

  Args:
    model: a name as in `stage_names`.
    units: of a block. Its number of units is the one option of a stage that has no default: it is a `share` of
      these. None leaves it None.
  """
  first, second = _own_fields(model)
  counts = (None, None) if units is None else stage_units(model, units)
  return _defaults(first, counts[0]), _defaults(second, counts[1])


def stage_units(model: str, units: int) -> tuple[int, int]:
  """Return how many units each of a model's two stages has if its block has so many."""
  first, second = stage_names(model)
  one, two = (int(units * getattr(module, 'share', 1)) for module in (STAGE1[first], STAGE2[second]))
  return one, two


def stage_values(model: str) -> tuple[dict[str, Values], dict[str, Values]]:
  """Return the values that each option of a model's two stages may have."""
  first, second = map(declared, _own_fields(model))
  return first, second


def size_option(model: str) -> tuple[str, str] | None:
  """The option that counts a model's units, such as ('stage2', 'centers'); of stage 1 if there is no stage 2."""
  first, second = stage_names(model)
  stage, module = ('stage2', STAGE2[second]) if STAGE2[second] else ('stage1', STAGE1[first])
  size: str | None = getattr(module, 'size', None)
  return (stage, size) if size else None


def with_units(stage: Stage | None, factor: int) -> Any:
  """Return a stage of `make_stages` with so many times the units, if it has units."""
  if not isinstance(stage, functools.partial):
    return stage
  sizes = {option: stage.keywords[option] for option in _size(stage.func) if option in stage.keywords}
  return functools.partial(stage, **{option: factor * size for option, size in sizes.items()})


def _size(module: Any) -> list[str]:
  """Return the option that counts a stage's units, if it has units."""
  return [module.size] if hasattr(module, 'size') else []


def takes_heads(model: str) -> bool:
  """Whether a model's stage 1 has heads."""
  return bool(_shared(STAGE1[stage_names(model)[0]], 0))


def _shared(module: type[nn.Module], heads: int) -> dict[str, int]:
  """What a stage 1 takes from the model's own options."""
  return {'heads': heads} if 'heads' in _fields(module) else {}


def _fields(module: type[nn.Module] | None) -> dict[str, dataclasses.Field]:
  """The fields of a stage that a config can set."""
  internal = ('name', 'parent', 'dtype')
  fields = dataclasses.fields(module) if module else ()  # type: ignore[arg-type]
  return {field.name: field for field in fields if field.name not in internal}


def _own_fields(model: str) -> tuple[dict[str, dataclasses.Field], dict[str, dataclasses.Field]]:
  """Return the fields of a model's two stages that are options of theirs alone."""
  first, second = stage_names(model)
  shared = _shared(STAGE1[first], 0)
  own = {name: field for name, field in _fields(STAGE1[first]).items() if name not in shared}
  return own, _fields(STAGE2[second])


def _defaults(fields: Mapping[str, dataclasses.Field], units: int | None) -> dict[str, Any]:
  return {name: units if field.default is dataclasses.MISSING else field.default for name, field in fields.items()}


def _bind(what: str, module: Any, options: Mapping[str, Any]) -> Any:
  fields = _fields(module)
  # A config's options belong to the model that its argument names.
  remedy = 'pick the model in the config argument, model=NAME'
  try:
    for option in options:
      choose(f'option of {what}', option, fields)
  except UserError as error:
    raise UserError(f'{error}; if the options are those of another model, {remedy}') from None
  needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
  if missing := sorted(set(needed) - set(options)):
    raise UserError(f'{what} needs the options {", ".join(missing)}: {remedy}')
  return functools.partial(module, **options) if module else None
