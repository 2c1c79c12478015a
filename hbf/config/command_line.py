"""Configs from the arguments of a command: --config=DATA[:…] and --config.KEY=VALUE."""

import contextlib
import itertools
import pathlib
import re
import runpy
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from hbf.arguments import home_path
from hbf.errors import UserError, mistake

# A flag that `define_config` defines belongs to the module that calls it.
flags.disclaim_key_flags()

_FLAG = '--?[a-zA-Z]'  # the beginning of a flag, unlike that of a negative number
_KEYS = '`python -m hbf.config.reference` lists all keys'


def read_config(arguments: Sequence[str]) -> ConfigDict:
  """Return the config that `hbf train` uses with these arguments. The first argument is --config=DATA[:…].

  Raises:
    UserError: a file, key or value is wrong.
  """
  argv, values = ['', *config_arguments(arguments)], flags.FlagValues()
  define_config('', values, argv)
  parse_flags(argv, values)
  from hbf.config.resolve import resolve  # slow: it imports the networks, and help texts need no config

  return resolve(values.config)


def define_config(
  about: str, values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> flags.FlagHolder[ConfigDict]:
  """Define the flag --config=DATA[:arguments], and the overrides --config.KEY=VALUE.

  Args:
    about: the help of the flag.
    values: the flags to which these are added.
    argv: the command line, as `config_arguments` returns it. None: that of the process.
  """
  holder = config_flags.DEFINE_config_file('config', None, about, flag_values=values, sys_argv=argv)
  values['config'].parser = _Parser()  # that of ml_collections knows files only, and reports no errors in them
  return holder


class _Parser(flags.ArgumentParser):
  """The parser of --config=DATA[:arguments].

  DATA is the path of a config file. Or it is a data set: its NAME, or configs/NAME.py, even if there is no such file.
  """

  def parse(self, argument: str) -> ConfigDict:
    """Return the config of DATA. It is locked, so no key can be added."""
    data, colon, arguments = argument.partition(':')
    path, name = pathlib.Path(home_path(data)), re.fullmatch(r'(?:\./)?configs/(\w+)\.py|(\w+)', data)
    from hbf.config import datasets

    if path.is_file() and data not in datasets.DATASETS:
      config = _of_file(path, [arguments] if colon else [])
    else:
      if name is None or (name[1] and name[1] not in datasets.DATASETS):
        raise UserError(f'{data or argument} is not there: give a data set such as cifar10, or a config file')
      config = datasets.get_config(f'{name[1] or name[2]}:{arguments}')
    return config.lock()


def _of_file(path: pathlib.Path, arguments: Sequence[str]) -> ConfigDict:
  """Return the config of a user's file: the result of its function `get_config`, which gets `arguments`."""
  such = "a config, such as that of hbf.get_config('cifar10')"
  try:
    get_config: Any = runpy.run_path(str(path)).get('get_config')
    if get_config is None:
      raise UserError(f'{path} has no function get_config: write one that returns {such}')
    config = get_config(*arguments)
  except UserError:
    raise
  except Exception as error:
    raise mistake(path, error, _unknown_key(error)) from error
  if not isinstance(config, ConfigDict):
    raise UserError(f'get_config in {path} returns a {type(config).__name__}: expected {such}')
  from hbf.config.resolve import check_complete  # slow, see `read_config`

  check_complete(config)
  return config


def _unknown_key(error: Exception) -> str:
  """Return a message if ml_collections raised this error for an unknown key. Else return ''."""
  text = str(error)
  key = re.search(r'Key "(\w+)" does|mean "\w+" instead of "(\w+)"|to lookup: ([\w.]+)|^"\'(\w+)\'"$', text)
  near = re.search(r'mean "(\w+)"', text)
  hint = f'did you mean {near[1]!r}? ' if near else ''
  return f'unknown config key {key[key.lastindex or 0]!r}: {hint}{_KEYS}' if key else ''


def joined(arguments: Sequence[str]) -> list[str]:
  """Return the arguments of a command line with --config=VALUE for --config VALUE. --config.KEY is treated alike."""
  result: list[str] = []
  for argument in arguments:
    if result and re.fullmatch(r'--?config(\.[^=]+)?', result[-1]) and not re.match(_FLAG, argument):
      result[-1] += f'={argument}'
    else:
      result.append(argument)
  return result


def config_arguments(arguments: Sequence[str]) -> list[str]:
  """Return the arguments of the command line in a form that ml_collections understands.

  A value may follow its flag after a space. If a flag --config.KEY=VALUE is given several times, only the last one is
  kept, because ml_collections would join the values of a key that takes a tuple.

  Raises:
    UserError: --config has no value.
  """
  last: dict[str, str] = {}
  for number, argument in enumerate(joined(arguments)):
    if re.fullmatch('--?config=?', argument):
      raise UserError('--config needs a value: give a data set, such as --config=cifar10, or a config file')
    key = re.match(r'--?(config\.[^=]+)=', argument)
    name = key[1] if key else str(number)
    last.pop(name, None)
    last[name] = argument
  return list(last.values())


def parse_flags(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
  """Parse a command line, and return the arguments that are not flags.

  Args:
    argv: the name of the command, then its arguments. If --config is among the flags, see `config_arguments`.
    values: the flags, which get their values.

  Raises:
    UserError: a flag is wrong, or a flag --config.KEY that needs a value has none.
  """
  with plain_errors():
    try:
      return values(argv)
    finally:  # also if the next flag, taken for the value, is not a valid one
      for argument, following in itertools.pairwise(argv):
        if re.fullmatch(r'--?config\.[^=]+', argument) and re.match(_FLAG, following):
          key = argument.lstrip('-')
          if key in values and not values[key].boolean:  # defined once the config is read
            raise UserError(f'{argument} needs a value: write {argument}=VALUE')


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
  """Open a context in which errors of absl and ml_collections for wrong flags become UserErrors."""
  try:
    yield
  except UserError:
    raise
  except flags.Error as error:
    if isinstance(error.__context__, UserError):  # absl writes the flag and its value before our message
      raise error.__context__ from None
    if missing := re.search(r'Flag (--\w+) must have a value other than None', str(error)):
      raise UserError(f'{missing[1]} is missing: write {missing[1]}=VALUE; --help lists the flags') from error
    if missing := re.fullmatch(r'Missing value for flag (\S+)', str(error)):
      raise UserError(f'{missing[1]} needs a value: write {missing[1]}=VALUE') from error
    raise UserError(str(error)) from error
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise UserError(_unknown_key(error) or f'a flag --config.KEY is wrong: {error}: {_KEYS}') from error
