"""Config entries of a name and numbers, such as ('shift', 4): reading and checks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hbf.errors import UserError, choose

Entry = tuple[Any, ...]  # a name and a number for each of its arguments


class Argument(NamedTuple):
  """A number that follows a name.

  Attributes:
    name: name of the argument.
    least: smallest allowed value.
    most: largest allowed value.
    whole: True if the value must be a whole number.
    default: value if none is given. None if a value is required.
  """

  name: str
  least: float = 0.0
  most: float = 1.0
  whole: bool = False
  default: float | None = None


def read_entries(key: str, value: Any, known: Mapping[str, Sequence[Argument]]) -> tuple[Entry, ...]:
  """Read a list of names with numbers.

  Args:
    key: key in the config, such as 'data.transforms'.
    value: value of the key: tuples, or lists from JSON.
    known: the arguments of every name.

  Returns:
    The entries with all their arguments.

  Raises:
    UserError: the value is no such list, or a name, a number of arguments or an argument is wrong.
  """
  if not _is_list(value) or not all(_is_list(entry) and entry and isinstance(entry[0], str) for entry in value):
    example = f'(({next(iter(known))!r},),)'
    raise UserError(f'{key} must be a tuple of tuples, each a name and numbers, as {example}: it is {value!r}')
  return tuple(_read_entry(key, entry, choose(f'name in {key}', entry[0], known)) for entry in value)


def _is_list(value: Any) -> bool:
  return isinstance(value, (tuple, list))


def _read_entry(key: str, entry: Sequence[Any], arguments: Sequence[Argument]) -> Entry:
  name, *values = entry
  needed = sum(argument.default is None for argument in arguments)
  if not needed <= len(values) <= len(arguments):
    names = ', '.join(a.name + ('' if a.default is None else f' (or {a.default:g})') for a in arguments)
    raise UserError(f'{key}: {name} takes {names or "no arguments"}; expected that many numbers: it has {values}')
  defaults = [argument.default for argument in arguments[len(values) :]]
  for argument, value in zip(arguments, values, strict=False):
    kind = int if argument.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not argument.least <= value <= argument.most:
      most = 'up' if math.isinf(argument.most) else f'to {argument.most:g}'
      what = f'a {"whole " * argument.whole}number from {argument.least:g} {most}'
      raise UserError(f'{key}: {argument.name} of {name} must be {what}: it is {value!r}')
  return (name, *values, *defaults)
