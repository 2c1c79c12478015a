"""Command-line flags of commands that use argparse.

Other commands use absl, which has one set of flags for all imported modules. So absl does not suit a module that
other modules import.
"""

import argparse
import os
import pathlib
import re
from typing import Any, NoReturn

from hbf.errors import UserError


def expand(path: str) -> str:
  """Return a path with the home folder in place of `~`. A path without a name, such as `.`, becomes absolute.

  Pages and stored numbers call a run by the name of its folder.

  Raises:
    UserError: the home folder is unknown.
  """
  path = home_path(path)
  return os.path.abspath(path) if path and pathlib.PurePath(path).name in ('', '..') else path


def is_url(path: str) -> bool:
  """Return True for an address such as s3://bucket/folder. As a `pathlib` path, it has only one of the slashes."""
  return re.match(r'[A-Za-z][\w+.-]+:/', path) is not None


def cache_folder(path: str) -> pathlib.Path:
  """Return the folder that `data.cache` names, with the home folder in place of `~`.

  Raises:
    UserError: it is the address of a bucket, or the home folder is unknown.
  """
  if is_url(path):
    raise UserError(f'data.cache is {path}; expected a folder of this machine: set it to one, or to an empty text')
  return pathlib.Path(home_path(path))


def home_path(path: str | os.PathLike[str]) -> str:
  """Return a path with the home folder in place of `~` or `~user`.

  Raises:
    UserError: the home folder is unknown.
  """
  expanded = os.path.expanduser(os.fspath(path))
  if expanded.startswith('~'):
    raise UserError(
      f'{path} begins with a home folder that does not exist: correct the name after ~, or write ./{path}'
    )
  return expanded


def _path(text: str) -> pathlib.Path:
  try:
    return pathlib.Path(expand(text))
  except UserError as error:
    raise argparse.ArgumentTypeError(str(error)) from None  # argparse shows the message of this error only


class Parser(argparse.ArgumentParser):
  """A parser of command-line flags that raises UserError for a wrong flag. It does not accept abbreviated flags.

  The argument `command` is the name for help texts and messages: a command such as 'hbf prepare', or a module such as
  'hbf.analysis.nested'. The argument `about` describes the command in its help.
  """

  def __init__(self, command: str, about: str):
    prog = command if command.startswith('hbf ') else f'python -m {command}'
    super().__init__(prog=prog, description=about, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    """Raise UserError with the message that argparse gives for a wrong flag."""
    raise UserError(f'{message}: `{self.prog} --help` has the flags')

  def add_path(self, name: str, **options: Any) -> None:
    """Add an argument whose value is a path, with options of `add_argument`. See `expand`."""
    self.add_argument(name, type=_path, **options)

  def add_count(self, name: str, least: int, default: int, about: str) -> None:
    """Add a flag whose value is a whole number, at least `least`. `about` is its help text, without the default."""

    def count(text: str) -> int:
      try:
        value = int(text)
      except ValueError:
        value = least - 1
      if value < least:
        raise argparse.ArgumentTypeError(f'{text!r}; expected a whole number, at least {least}')
      return value

    self.add_argument(name, type=count, default=default, metavar='N', help=f'{about}; default: %(default)s')

  def add_run(self, about: str) -> None:
    """Add the flags for a run's folder, checkpoint and data. `about` is the help text of the folder's flag."""
    self.add_path('--workdir', required=True, help=about)
    self.add_argument('--checkpoint', default='latest', help='latest, best or a step')
    self.add_argument(
      '--data_dir', default='', help='folder of prepared TFDS data, if it is not the one in the config'
    )
    self.add_argument('--data_root', default='', help='image folder or text, if it is not the one in the config')
