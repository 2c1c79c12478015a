"""Errors and warnings for users. A message is one line that says what is wrong, what was expected and what to do."""

import difflib
import errno
import functools
import os
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

Value = TypeVar('Value')

# What to do if the system refuses a path. Such an error is never a mistake in the code.
_CURES = {
  errno.ENAMETOOLONG: 'give a shorter path',
  errno.ELOOP: 'its links form a circle; give another path',
  errno.EACCES: 'change its permissions, or give another path',
  errno.EPERM: 'change its permissions, or give another path',
  errno.EROFS: 'give a path that can be written',
  errno.ENOSPC: 'free some space, or give a path on another disk',
  errno.EDQUOT: 'free some space, or give a path on another disk',
}


class UserError(ValueError):
  """A mistake in a config, a path or a file. The commands print its message without a traceback."""


def first_line(error: BaseException, most: int = 150) -> str:
  """Return the first line of an error's message, of at most `most` characters. Without a message, return its type."""
  return (str(error).splitlines() or [''])[0][:most] or type(error).__name__


def fail(message: str) -> int:
  """Print a line 'error: …' on stderr; return the exit status 1."""
  print('error:', ' '.join(message.split()), file=sys.stderr)
  return 1


def mistake(path: str | os.PathLike[str], error: Exception, said: str = '') -> UserError:
  """Return an error that names the line of a user's Python file in which another error was raised.

  Args:
    path: the path of the file.
    error: the other error.
    said: what is wrong and what to do. '': the type and the message of the other error.
  """
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
  where = f'{path}, line {lines[-1]}' if lines else str(path)
  raised = ': '.join([type(error).__name__, *str(error).strip().splitlines()[-1:]])
  return UserError(f'{where}: {said or f"{raised}: correct the file"}')


class Notice(UserWarning):
  """A warning that a user should read. The commands print its message as a line 'warning: …'."""


def warn(message: str) -> None:
  """Warn the user. A process shows each message only once."""
  warnings.warn(Notice(message), stacklevel=2)


def in_one_line(main: Callable[..., int]) -> Callable[..., int]:
  """Wrap a command so that UserError, a path that the system refuses, and Ctrl-C print one line on stderr.

  There is no traceback then. Any other error keeps its traceback.

  If the reader of stdout is gone, as in `hbf --help | head`, the command ends without a message.

  Args:
    main: the command, a function that returns its exit status.

  Returns:
    A function that runs the command and returns its exit status: 1 after an error, 130 after Ctrl-C, and 141 if the
    reader of stdout is gone.
  """

  @functools.wraps(main)
  def guarded(*args: Any, **kwargs: Any) -> int:
    try:
      try:
        return main(*args, **kwargs)
      finally:
        if sys.stdout:  # None if the process was started with a closed output
          sys.stdout.flush()
    except BrokenPipeError:
      if not _reader_is_gone():
        raise
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it exits
      return 141  # as in shells: 128 plus the number of SIGPIPE
    except UserError as error:
      return fail(str(error))
    except OSError as error:
      if error.errno not in _CURES:
        raise
      return fail(f'{error.filename or "a file"}: {str(error.strerror).lower()}: {_CURES[error.errno]}')
    except KeyboardInterrupt:
      fail('interrupted')
      return 130  # as in shells: 128 plus the number of SIGINT

  return guarded


def _reader_is_gone() -> bool:
  """Return True if stdout is a pipe whose reading end is closed."""
  poll = select.poll()
  poll.register(sys.stdout.fileno(), select.POLLOUT)
  return any(event & select.POLLERR for _, event in poll.poll(0))


def choose(what: str, name: str, known: Mapping[str, Value]) -> Value:
  """Return `known[name]`, or raise an error that helps to find the right name.

  Args:
    what: word for the error message, such as 'recipe'.
    name: the name.
    known: the values by name.

  Raises:
    UserError: the name is unknown. The message lists all known names, and suggests a similar one if there is one.
  """
  if isinstance(name, Hashable) and name in known:  # a user of Python may give anything
    return known[name]
  near = difflib.get_close_matches(str(name), known, n=1)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  raise UserError(f'unknown {what} {name!r}: {hint}known: {", ".join(sorted(known))}')
