"""What a user did wrong, in one line that says what was expected and what to do."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar('Value')


class UserError(ValueError):
  """A mistake in a config, a path or a file; the scripts print its message without a traceback."""


def choose(what: str, name: str, known: Mapping[str, Value]) -> Value:
  """Returns `known[name]`.

  Raises:
    UserError: `name` isn't known; the message names the nearest known name and all of them.
  """
  if name in known:
    return known[name]
  near = difflib.get_close_matches(str(name), known, n=1)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  raise UserError(f'unknown {what} {name!r}: {hint}known: {", ".join(sorted(known))}')
