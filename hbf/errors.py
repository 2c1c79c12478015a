"""Errors for users: one line that says what is wrong, what was expected and what to do."""

import difflib
import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Value = TypeVar('Value')


class UserError(ValueError):
  """A mistake in a config, a path or a file. The commands print its message without a traceback."""


def fail(message: str) -> int:
  """Print a line 'error: …' on stderr; return the exit status 1."""
  print('error:', ' '.join(message.split()), file=sys.stderr)
  return 1


class Notice(UserWarning):
  """A warning that a user should read. The commands print its message as a line 'warning: …'."""


def warn(message: str) -> None:
  """Warn the user, once in a process for each message."""
  warnings.warn(Notice(message), stacklevel=2)


def in_one_line(main: Callable[..., int]) -> Callable[..., int]:
  """Wrap a command that returns its exit status. UserError and Ctrl-C become one line and a status other than 0."""

  @functools.wraps(main)
  def guarded(*args: Any, **kwargs: Any) -> int:
    try:
      return main(*args, **kwargs)
    except UserError as error:
      return fail(str(error))
    except KeyboardInterrupt:
      fail('interrupted')
      return 130  # as in shells: 128 plus the number of SIGINT

  return guarded


def choose(what: str, name: str, known: Mapping[str, Value]) -> Value:
  """Return `known[name]`.

  Raises:
    UserError: the name is unknown. The message has the nearest known name and all known names.
  """
  if name in known:
    return known[name]
  near = difflib.get_close_matches(str(name), known, n=1)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  raise UserError(f'unknown {what} {name!r}: {hint}known: {", ".join(sorted(known))}')
