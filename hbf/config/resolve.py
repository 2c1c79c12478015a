"""Resolution of a config: fill the keys that depend on other keys, and check all keys."""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from hbf.config.defaults import UNUSED, Key, keys, keys_of_task, stage_keys
from hbf.errors import UserError, choose
from hbf.nn.registry import stage_units
from hbf.options import OptionError

# Optimizers whose steps of weights and centers are relative to the size of the parameter.
RELATIVE = ('lamb', 'adafactor')


def resolve(config: ConfigDict) -> ConfigDict:
  """Return a config in which the empty keys are filled. Their values follow from other keys, so set those first.

  The stages' numbers of units follow from `model.expansion` and `model.width`. The key `model.expansion` is then
  removed. The factor `optimizer.center_rate` of the centers' learning rate follows from `model.width` and the
  optimizer. Keys that only one task has may be missing from a config of this task. They get their defaults.

  Args:
    config: the config of a run. It is not changed.

  Returns:
    The resolved config, as a run folder stores it. It equals `config` if `config` is already resolved.

  Raises:
    UserError: a key is missing, the task is unknown, or `model.width` or `model.expansion` is outside its range.
  """
  check_complete(config)
  resolved = config.copy_and_resolve_references()
  model, optimizer = resolved.model, resolved.optimizer
  _check({'model.width': model.width}, keys(config.task))
  with resolved.unlocked():
    for name, key in keys_of_task(config.task).items():
      section, _, last = name.partition('.')
      if last not in resolved[section]:
        resolved[section][last] = key.default
    if 'expansion' in model:
      _check({'model.expansion': model.expansion}, keys(config.task))
      units = stage_units(model.name, round(model.expansion * model.width))
      for stage, count in zip((model.stage1, model.stage2), units, strict=True):
        stage.update({option: count for option, value in stage.items() if value is None})
      del model.expansion
    if optimizer.center_rate is None:
      # Adam moves every number by about the learning rate. Centers start at size 1, the weights of an MLP at 1/√D.
      # So the same relative steps need √D times the rate, unless the optimizer takes relative steps itself.
      optimizer.center_rate = 1.0 if optimizer.name in RELATIVE else model.width**0.5
  return resolved


def check_complete(config: ConfigDict) -> None:
  """Check that a config has a known task and all keys of the task, whatever their values.

  `model.expansion` may be missing, and keys that only one task has. `resolve` fills or removes them.

  Raises:
    UserError: a key is missing, or the task is unknown.
  """
  values = flatten_dict(config.to_dict(), sep='.', keep_empty_nodes=True)
  task = values.get('task', '')
  if 'task' in values:
    _check({'task': task}, keys(task))
    optional = {'model.expansion', *keys_of_task(task)}
    missing = [name for name in keys(task) if name not in values and name not in optional]
    missing += [f'model.{stage}' for stage in ('stage1', 'stage2') if stage not in config.get('model', {})]
  else:
    missing = ['task']
  if missing:
    more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
    raise UserError(
      f'the config lacks {", ".join(missing[:3])}{more}: begin with a whole one, such as that of '
      "hbf.get_config('cifar10')"
    )


def check(config: ConfigDict) -> None:
  """Check the value of every key.

  Args:
    config: a resolved config.

  Raises:
    UserError: a key is unknown, or a value is outside its range. The message has the key, the value and the allowed
      values.
  """
  known = keys(config.task) | stage_keys(config.model.name)
  values = flatten_dict(config.to_dict(), sep='.')
  _check(values, known)
  for name, off in UNUSED.get(config.task, {}).items():
    if (found := values[name]) != off and not (found in ((), []) and off == ()):
      raise UserError(
        f'{name} is {found!r}, which task {config.task} has no use for: set it to {off!r}, or give '
        f'task={config.task} after the colon of --config, which sets it'
      )


def _check(values: dict[str, Any], known: dict[str, Key]) -> None:
  for name, value in values.items():
    # `make_stages` refuses options that a stage does not have, with a better message.
    if name in known or not name.startswith(('model.stage1.', 'model.stage2.')):
      key = choose('config key', name, known)
      example = '' if key.default is None or key.default not in key.values else f', such as {key.default!r}'
      key.values.check(name, value, f'; set it to one{example}')


@contextlib.contextmanager
def naming_keys(config: ConfigDict) -> Iterator[None]:
  """Open a context in which an OptionError becomes a UserError that names the config keys of the options.

  Raises:
    UserError: OptionError was raised in the context.
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
