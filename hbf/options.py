"""Valid values of options: their types and ranges, and an error for any other value."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hbf.errors import UserError, choose

DURATION_PATTERN = re.compile(r'(\d+(?:\.\d+)?) ?(steps?|epochs?|examples?|%)')


class OptionError(UserError):
  """An error for the value of an option, or for values of several options that do not fit together.

  Attributes:
    options: the wrong values, by name of the option.
  """

  def __init__(self, message: str, **options: Any):
    super().__init__(message)
    self.options = options


@dataclasses.dataclass(frozen=True)
class Values:
  """The valid values of an option.

  Attributes:
    kind: the type of the values.
    expected: the values in words, such as 'a number above 0'.
    holds: a function that takes a value of type `kind` and returns True if the value is valid.
    names: the valid values, if the option takes one of several names. Then the message for a wrong name suggests a
      similar valid name. (): the option takes other values.
  """

  kind: type | tuple[type, ...]
  expected: str
  holds: Callable[[Any], bool] = lambda _: True
  names: Collection[str] = ()

  def __contains__(self, value: Any) -> bool:
    """Return True if the value is valid."""
    # A bool is an int in Python, but it is not a valid number here.
    typed = isinstance(value, self.kind) and isinstance(value, bool) == (self.kind is bool)
    return typed and self.holds(value)

  def __repr__(self) -> str:
    """Return the values in words, which `help` shows beside an option of a module."""
    return self.expected

  def check(self, option: str, value: Any, remedy: str = '') -> None:
    """Check a value of an option.

    Args:
      option: the name of the option.
      value: the value.
      remedy: advice at the end of the message, or ''. If the valid values are names and the value is another name,
        the message suggests the nearest valid name instead.

    Raises:
      OptionError: the value is not valid.
    """
    if value in self:
      return
    message = f'{option} is {value!r}: expected {self.expected}{remedy}'
    if self.names and isinstance(value, str):
      try:
        choose(option, value, dict.fromkeys(self.names))
      except UserError as error:
        message = str(error)
    raise OptionError(message, **{option: value})


def _is_float_type(value: Any) -> bool:
  import jax.numpy as jnp  # commands that need no JAX start faster without it

  try:
    return value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except TypeError:
    return False


FLAG = Values(bool, 'True or False')
TEXT = Values(str, 'a text')
POSITIVE = Values(numbers.Real, 'a number above 0', lambda z: 0 < z < math.inf)
NOT_NEGATIVE = Values(numbers.Real, 'a number of 0 or more', lambda z: 0 <= z < math.inf)
AT_LEAST_ONE = Values(numbers.Real, 'a number of 1 or more', lambda z: 1 <= z < math.inf)
RATE = Values(numbers.Real, 'a number from 0 to below 1', lambda z: 0 <= z < 1)
SHARE = Values(numbers.Real, 'a number from 0 to 1', lambda z: 0 <= z <= 1)
# A tuple with a number for each channel of the images. Its length is not checked here, because only the data set
# determines the number of channels.
LEVELS = Values((tuple, list), 'a number from 0 to 1 for each channel, or ()', lambda z: all(x in SHARE for x in z))
SPREADS = Values((tuple, list), 'a number above 0 for each channel, or ()', lambda z: all(x in POSITIVE for x in z))
FLOATS = Values(object, 'a type of floats such as jnp.bfloat16, or None', _is_float_type)
_EXAMPLES = 'such as 500steps, 1epoch, 10000examples or 5%, and at most 100%'
DURATION = Values(str, f'a duration {_EXAMPLES}', lambda z: _length(z) is not None)
PERIOD = Values(str, f'a duration above 0 {_EXAMPLES}', lambda z: bool(_length(z)))
NUMBERS = Values(
  (tuple, list), 'a number for each target, or ()', lambda z: all(isinstance(x, numbers.Real) for x in z)
)
_AT_LEAST_ONE = Values(numbers.Integral, '', lambda z: z >= 1)
BLOCKS = Values(
  (tuple, list),
  'a tuple of increasing numbers of blocks, each of 1 or more, or ()',
  lambda z: all(x in _AT_LEAST_ONE for x in z) and list(z) == sorted(set(z)),
)
# Names with numbers, such as (('shift', 4),). hbf.data.augment.entries checks names and numbers.
ENTRIES = Values((tuple, list), 'a tuple of tuples, each a name and numbers')


def whole(least: int, most: int | None = None, also: int | None = None) -> Values:
  """Return the valid values of an option that takes whole numbers.

  Args:
    least: smallest valid number.
    most: largest valid number. None: there is no largest number.
    also: one more valid number, outside this range. None: there is none.
  """
  expected = f'a whole number of {least} or more' if most is None else f'a whole number from {least} to {most}'

  def holds(z: int) -> bool:
    return z == also or (z >= least and (most is None or z <= most))

  return Values(numbers.Integral, expected if also is None else f'{expected}, or {also}', holds)


def odd(least: int) -> Values:
  """Return the valid values of an option that takes odd whole numbers of `least` or more."""
  return Values(numbers.Integral, f'an odd number of {least} or more', lambda z: z >= least and z % 2 == 1)


def one_of(names: Collection[str]) -> Values:
  """Return the valid values of an option that takes one of these names."""
  return Values(str, f'one of {", ".join(names)}', lambda z: z in names, names)


def _length(duration: str) -> float | None:
  """Return the number in a duration: 5.0 for '5epochs', 20.0 for '20%'. None for another text or more than 100%."""
  match = DURATION_PATTERN.fullmatch(duration)
  return None if match is None or (match[2] == '%' and float(match[1]) > 100) else float(match[1])


def values_of(kind: Any) -> dict[str, Values]:
  """Return the valid values of each option of a dataclass, by name of the option.

  An option is a field of the type Annotated[type, values], where `values` is an instance of `Values`. `kind` is the
  dataclass or an instance of it.
  """
  return declared({field.name: field for field in dataclasses.fields(kind)})


def declared(fields: Mapping[str, dataclasses.Field]) -> dict[str, Values]:
  """Return the valid values of dataclass fields, by name. A field that declares no valid values is left out."""
  found = {name: getattr(field.type, '__metadata__', ()) for name, field in fields.items()}
  return {name: notes[0] for name, notes in found.items() if notes and isinstance(notes[0], Values)}


def check_options(made: Any) -> None:
  """Check the value of every option of a dataclass instance.

  Raises:
    OptionError: the value of an option is not valid.
  """
  for name, values in values_of(made).items():
    try:
      values.check(name, getattr(made, name))
    except OptionError as error:
      raise OptionError(f'{type(made).__name__}: {error}', **error.options) from None
