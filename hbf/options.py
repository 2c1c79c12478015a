"""Options: the type and range of each option, and errors for other values."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hbf.errors import UserError, choose

DURATION_PATTERN = re.compile(r'(\d+(?:\.\d+)?) ?(steps?|epochs?|examples?|%)')


class OptionError(UserError):
  """An error because of a value of an option, alone or together with other options.

  Attributes:
    options: the wrong values by option.
  """

  def __init__(self, message: str, **options: Any):
    """Take the message, and the wrong values by option."""
    super().__init__(message)
    self.options = options


@dataclasses.dataclass(frozen=True)
class Values:
  """The valid values of an option.

  Attributes:
    kind: the type of the values.
    expected: the values in words, such as 'a number above 0'.
    holds: a function that returns True for a valid value of this type.
    names: all valid values, if they are names. The message for a wrong name has the nearest one.
  """

  kind: type | tuple[type, ...]
  expected: str
  holds: Callable[[Any], bool] = lambda _: True
  names: Collection[str] = ()

  def __contains__(self, value: Any) -> bool:
    """Return True if the value is valid."""
    # A bool is an int in Python, but it is no valid number here.
    typed = isinstance(value, self.kind) and isinstance(value, bool) == (self.kind is bool)
    return typed and self.holds(value)

  def check(self, option: str, value: Any, remedy: str = '') -> None:
    """Check a value of an option.

    Args:
      option: the name of the option.
      value: the value.
      remedy: the end of the message. '': the message ends with the expected values.

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


FLAG = Values(bool, 'True or False')
TEXT = Values(str, 'a text')
POSITIVE = Values(numbers.Real, 'a number above 0', lambda z: 0 < z < math.inf)
NOT_NEGATIVE = Values(numbers.Real, 'a number of 0 or more', lambda z: 0 <= z < math.inf)
RATE = Values(numbers.Real, 'a number from 0 to below 1', lambda z: 0 <= z < 1)
SHARE = Values(numbers.Real, 'a number from 0 to 1', lambda z: 0 <= z <= 1)
# Values for each channel of images. Only the data know the number of channels.
LEVELS = Values((tuple, list), 'a number from 0 to 1 for each channel, or ()', lambda z: all(x in SHARE for x in z))
SPREADS = Values((tuple, list), 'a number above 0 for each channel, or ()', lambda z: all(x in POSITIVE for x in z))
_EXAMPLES = 'such as 500steps, 1epoch, 10000examples or 5%, and at most 100%'
DURATION = Values(str, f'a duration {_EXAMPLES}', lambda z: _length(z) is not None)
PERIOD = Values(str, f'a duration above 0 {_EXAMPLES}', lambda z: bool(_length(z)))
# Names with numbers, such as (('shift', 4),). hbf.data.augment.entries checks names and numbers.
ENTRIES = Values((tuple, list), 'a tuple of tuples, each a name and numbers')


def whole(least: int, most: int | None = None, also: int | None = None) -> Values:
  """Return the whole numbers from `least` to `most`, without an end if it is None, and the number `also`."""
  expected = f'a whole number of {least} or more' if most is None else f'a whole number from {least} to {most}'

  def holds(z: int) -> bool:
    return z == also or (z >= least and (most is None or z <= most))

  return Values(numbers.Integral, expected if also is None else f'{expected}, or {also}', holds)


def odd(least: int) -> Values:
  """Return the odd numbers of `least` or more."""
  return Values(numbers.Integral, f'an odd number of {least} or more', lambda z: z >= least and z % 2 == 1)


def one_of(names: Collection[str]) -> Values:
  """Return the names as valid values."""
  return Values(str, f'one of {", ".join(names)}', lambda z: z in names, names)


def _length(duration: str) -> float | None:
  """Return the number in a duration. None if the text is no duration, or the duration is longer than the run."""
  match = DURATION_PATTERN.fullmatch(duration)
  return None if match is None or (match[2] == '%' and float(match[1]) > 100) else float(match[1])


def values_of(kind: Any) -> dict[str, Values]:
  """Return the valid values of each option of a dataclass. A field declares them as Annotated[type, Values]."""
  return declared({field.name: field for field in dataclasses.fields(kind)})


def declared(fields: Mapping[str, dataclasses.Field]) -> dict[str, Values]:
  """Return the valid values of fields. A field that declares none is left out."""
  found = {name: getattr(field.type, '__metadata__', ()) for name, field in fields.items()}
  return {name: notes[0] for name, notes in found.items() if notes and isinstance(notes[0], Values)}


def check_options(made: Any) -> None:
  """Check every option of an object of a dataclass.

  Raises:
    OptionError: the value of an option is not valid.
  """
  for name, values in values_of(made).items():
    try:
      values.check(name, getattr(made, name))
    except OptionError as error:
      raise OptionError(f'{type(made).__name__}: {error}', **error.options) from None
