"""Flags of commands that stand in modules which others import: absl's are one set for all that a process imports."""

import argparse
import pathlib
from typing import Any, NoReturn

from hbf.errors import UserError


class Parser(argparse.ArgumentParser):
  """Raises a UserError for a wrong flag, which `hbf.errors.in_one_line` makes a line; knows no abbreviations."""

  def __init__(self, command: str, about: str):
    super().__init__(prog=f'python -m {command}', description=about, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    """Raises the error."""
    raise UserError(f'{message}: `{self.prog} --help` has the flags')

  def add_path(self, name: str, **about: Any) -> None:
    """A flag for a path, in which ~ is the home folder."""
    self.add_argument(name, type=lambda text: pathlib.Path(text).expanduser(), **about)

  def add_run(self, about: str) -> None:
    """Which run, which of its checkpoints and where its data lie."""
    self.add_path('--workdir', required=True, help=about)
    self.add_argument('--checkpoint', default='latest', help='latest, best or a step')
    self.add_argument('--data_dir', default='', help='where prepared TFDS data lie, if not where the config says')
    self.add_argument('--data_root', default='', help='the image folder or text, if not where the config says')
