"""Resolution of a config after its overrides: derived keys are filled in, and all keys are checked."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from hbf.config.defaults import Key, keys, stage_keys
from hbf.errors import UserError, choose
from hbf.nn.registry import stage_units
from hbf.options import OptionError


def resolve(config: ConfigDict) -> ConfigDict:
  """Fill in the keys that are empty because they depend on others, after all overrides.

  The units of a stage follow from `model.expansion`, which is then left out: it says no more than they do.
  The rate of the centers follows from `model.width`.

  Args:
    config: of a run; it isn't changed. One that is resolved comes back as it is.

  Returns:
    The config that a run folder stores.

  Raises:
    UserError: a key that others depend on has a value that it can't have.
  """
  resolved = config.copy_and_resolve_references()
  model, optimizer = resolved.model, resolved.optimizer
  _check({'model.width': model.width}, keys(config.task))
  with resolved.unlocked():
    if 'expansion' in model:
      _check({'model.expansion': model.expansion}, keys(config.task))
      units = stage_units(model.name, round(model.expansion * model.width))
      for stage, count in zip((model.stage1, model.stage2), units, strict=True):
        stage.update({option: count for option, value in stage.items() if value is None})
      del model.expansion
    if optimizer.center_rate is None:
      # Adam moves every number by about the learning rate. Centers start at size 1, the weights of an MLP at 1/√D:
      # the same relative steps need √D times the rate.
      optimizer.center_rate = model.width**0.5
  return resolved


def check(config: ConfigDict) -> None:
  """Check the value of every key.

  Args:
    config: resolved.

  Raises:
    UserError: naming the key, its value, what was expected and what to do.
  """
  known = keys(config.task) | stage_keys(config.model.name)
  _check(flatten_dict(config.to_dict(), sep='.'), known)


def _check(values: dict[str, Any], known: dict[str, Key]) -> None:
  for name, value in values.items():
    # `make_stages` refuses an option that a stage doesn't have, and says where it may come from.
    if name in known or not name.startswith(('model.stage1.', 'model.stage2.')):
      key = choose('config key', name, known)
      example = '' if key.default is None or key.default not in key.values else f', such as {key.default!r}'
      key.values.check(name, value, f'; set it to one{example}')


@contextlib.contextmanager
def naming_keys(config: ConfigDict) -> Iterator[None]:
  """Add the config's keys to what a module says of its own options.

  Raises:
    UserError: a module has raised OptionError.
  """
  try:
    yield
  except OptionError as error:
    model = flatten_dict({'model': config.model.to_dict()}, sep='.')
    wrong = [
      key
      for option, value in error.options.items()
      for key in model
      if key.endswith(f'.{option}') and model[key] == value
    ]
    raise UserError(f'{error} ({", ".join(wrong)})' if wrong else str(error)) from None
