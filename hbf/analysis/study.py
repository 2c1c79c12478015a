"""The command of a study: it measures, stores the numbers, and makes a table and a picture of the stored numbers."""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from hbf.arguments import Parser
from hbf.errors import UserError
from hbf.training.machine import commit, device_name, keep_compiled_programs, keep_freed_memory, versions
from hbf.training.workdir import load_config, other_data, read_data, read_json, write_json

Numbers = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Study:
  """A measurement that has a command of its own.

  Attributes:
    name: the name of the study. Its numbers are in NAME.json, and its picture is NAME.png.
    draw: a function that draws a picture of the numbers. Its second argument is the path of the PNG.
    table: a function that returns a Markdown table of the numbers.
    keys: keys that the stored numbers must have.
    folder: the default output folder. '': runs/NAME.
    verbosity: the least level of the messages that are printed.
  """

  name: str
  draw: Callable[[Numbers, pathlib.Path], None]
  table: Callable[[Numbers], str]
  keys: tuple[str, ...] = ('rows',)
  folder: str = ''
  verbosity: int = logging.INFO

  def parser(self, module: str, doc: str | None, runs: str = '') -> Parser:
    """Return a parser with the flags of every study: --out, --report, and --run if the study measures runs.

    Args:
      module: the name of the study's module.
      doc: the docstring of the module. The help shows its first line.
      runs: the help of --run. '': the study measures no runs, so it has no --run.
    """
    parser = Parser(module, (doc or '').split('\n')[0])
    parser.add_path('--out', default=self.folder or f'runs/{self.name}', help='output folder; default: %(default)s')
    parser.add_argument('--report', action='store_true', help='do not measure; draw the stored numbers')
    if runs:
      parser.add_path('--run', action='append', default=[], help=runs)
    return parser

  def run(self, flags: argparse.Namespace, measure: Callable[['Record'], None]) -> int:
    """Measure unless --report is given. In both cases, draw the stored numbers and print their table.

    Return the exit status.

    Args:
      flags: the parsed flags.
      measure: a function that measures, and saves its numbers in the record.

    Raises:
      UserError: a flag is missing, the output folder cannot be made, nothing is stored, or an error of `measure`.
    """
    path = flags.out / f'{self.name}.json'
    if not flags.report:
      if getattr(flags, 'run', None) == []:
        raise UserError('--run is missing: give the folders of runs')
      try:
        flags.out.mkdir(parents=True, exist_ok=True)
      except OSError as error:  # after the measurement, it would be lost
        said = f'{flags.out} cannot be used as a folder ({str(error.strerror).lower()})'
        raise UserError(f'{said}: choose another --out') from None
      keep_freed_memory()
      keep_compiled_programs()
      logging.set_verbosity(self.verbosity)
      measure(Record(path, read_json(path, 'move it away and measure again', *self.keys)))
    stored = read_json(path, 'move it away and measure again', *self.keys)
    if stored is None:
      raise UserError(f'{path} is missing: measure it without --report')
    self.draw(stored, flags.out / f'{self.name}.png')
    print(self.table(stored))
    return 0


def check_folder_names(folders: Sequence[pathlib.Path]) -> None:
  """Raise UserError if two run folders have the same name, for a study that stores numbers by this name."""
  known: dict[str, pathlib.Path] = {}
  for folder in folders:
    if (other := known.setdefault(folder.name, folder)) is not folder:
      raise UserError(f'{other} and {folder} have the same name, by which numbers are stored: rename one of them')


def data_of(folders: Sequence[pathlib.Path], record: 'Record | None' = None) -> Numbers:
  """Return the name and the fingerprint of the data that all runs of a study are on, to store with its numbers.

  Runs and stored numbers from older versions have no fingerprint. Then only the names are compared.

  Args:
    folders: the run folders.
    record: the stored numbers, if those of the runs are added to them.

  Returns:
    The entries `data`, the value of data.name, and `fingerprint`, if it is known.

  Raises:
    UserError: two runs are on different data, or the stored numbers are of runs on other data.
  """
  first, *others = folders
  name, identity = _data(first)
  for folder in others:
    other, found = _data(folder)
    if other != name:
      raise UserError(f'{first} is a run on {name}, and {folder} on {other}: give runs on one data set')
    if None not in (identity, found) and identity['fingerprint'] != found['fingerprint']:
      differ = other_data(identity, found)
      raise UserError(f'{first} and {folder} are runs on different data ({differ}): give runs on one data set')
  known = {'data': name} | ({'fingerprint': identity['fingerprint']} if identity else {})
  if record:
    stored = known | (record.stored or {})
    if stored['data'] != name:
      raise UserError(f'{record.path} has numbers of runs on {stored["data"]}, and not on {name}: give another --out')
    if 'fingerprint' in known and stored['fingerprint'] != known['fingerprint']:
      raise UserError(f'{record.path} has numbers of runs on other data than {first}: give another --out')
  return known


def _data(folder: pathlib.Path) -> tuple[str, Any]:
  """Return data.name of a run, and the identity of its data. None: the run is too old to have stored the latter."""
  return load_config(folder).data.name, read_data(folder, 'fingerprint')


@dataclasses.dataclass(frozen=True)
class Record:
  """The file of a study's numbers.

  Attributes:
    path: the path of the file.
    stored: the numbers that an earlier call of the command stored. None: there are none.
  """

  path: pathlib.Path
  stored: Numbers | None

  def save(self, numbers: Numbers) -> None:
    """Write the numbers, with the device, the commit of the code and the versions of packages."""
    write_json(self.path, {'device': device_name(), 'commit': commit(), 'versions': versions()} | numbers)
