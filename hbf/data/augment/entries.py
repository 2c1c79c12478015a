"""Entries in the value of a config key. An entry is a name with numbers, such as ('shift', 4)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hbf.errors import UserError, choose

Entry = tuple[Any, ...]  # a name and a number for each of its arguments


class Argument(NamedTuple):
  """A number that follows the name in an entry.

  Attributes:
    name: name of the argument.
    least: smallest allowed value.
    most: largest allowed value.
    whole: True if the value must be a whole number.
    default: value of the argument if an entry leaves it out. None: an entry must give the value.
  """

  name: str
  least: float = 0.0
  most: float = 1.0
  whole: bool = False
  default: float | None = None


def read_entries(key: str, value: Any, known: Mapping[str, Sequence[Argument]]) -> tuple[Entry, ...]:
  """Read and check the entries in the value of a config key.

  Args:
    key: key in the config, such as 'data.transforms'.
    value: value of the key: a tuple of tuples, or a list of lists from JSON.
    known: the arguments of every known name.

  Returns:
    The entries, each with the values of all its arguments.

  Raises:
    UserError: the value has another form, a name is unknown, or an entry has too many or too few arguments, or an
      argument outside its range.
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
