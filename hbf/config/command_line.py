"""Configs from the arguments of a command: --config=DATA[:…] and --config.KEY=VALUE."""

import contextlib
import pathlib
import re
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from hbf.errors import UserError


def read_config(arguments: Sequence[str]) -> ConfigDict:
  """Return the config that `hbf train` uses with these arguments. The first argument is --config=DATA[:…].

  Raises:
    UserError: a file, key or value is wrong.
  """
  argv, values = ['', *config_arguments(arguments)], flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=values, sys_argv=argv)
  with plain_errors():
    values(argv)
    values.config.to_dict()
  from hbf.config.resolve import resolve  # slow: it imports the networks, and help texts need no config

  return resolve(values.config)


def joined(arguments: Sequence[str]) -> list[str]:
  """Return the arguments of a command line with --config=VALUE for --config VALUE. --config.KEY is treated alike."""
  result: list[str] = []
  for argument in arguments:
    if result and re.fullmatch(r'--?config(\.[^=]+)?', result[-1]) and not re.match(r'--?[a-zA-Z]', argument):
      result[-1] += f'={argument}'
    else:
      result.append(argument)
  return result


def config_arguments(arguments: Sequence[str]) -> list[str]:
  """Return the arguments of the command line in a form that ml_collections understands.

  The value of --config is replaced by the result of `_resolve_config`. A value may follow its flag after a space. If
  a flag --config.KEY=VALUE is given several times, only the last one is kept, because ml_collections would join the
  values of a key that takes a tuple.

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
  return [_resolve_argument(argument) for argument in last.values()]


def _resolve_argument(argument: str) -> str:
  """Return an argument. In --config=VALUE, replace the value by the result of `_resolve_config`."""
  flag, equals, config = argument.partition('=')
  return f'{flag}={_resolve_config(config)}' if equals and flag.strip('-') == 'config' else argument


def _resolve_config(config: str) -> str:
  """Return a value of --config that ml_collections understands, for the value that the user gave.

  The user gives DATA[:arguments]. If DATA is the path of a config file, the user's value is returned unchanged. DATA
  may also be a data set: its NAME, or configs/NAME.py, even if there is no such file. Then the result is
  FILE:NAME[:arguments], where FILE is the module with the configs of all data sets.
  """
  path, colon, arguments = config.partition(':')
  name = re.fullmatch(r'(?:\./)?configs/(\w+)\.py|(\w+)', path)
  if name is None or pathlib.Path(path).is_file():
    return config
  from hbf.config import datasets

  if name[1] and name[1] not in datasets.DATASETS:
    return config
  return f'{datasets.__file__}:{name[1] or name[2]}{colon}{arguments}'


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
  """Open a context in which errors of absl and ml_collections for wrong flags become UserErrors."""
  try:
    yield
  except (KeyError, AttributeError) as error:
    key, near = re.search(r'\w+', str(error)), re.search(r'mean "(\w+)"', str(error))
    hint = f'did you mean {near[1]!r}? ' if near else ''
    where = '`python -m hbf.config.reference` lists all keys'
    raise UserError(f'unknown config key {key and key[0]!r}: {hint}{where}') from error
  except (flags.Error, UserError, TypeError, OSError) as error:
    if missing := re.search(r"No such file or directory: '(.+?)'", str(error)):
      raise UserError(f'{missing[1]} is not there: give a data set such as cifar10, or a config file') from error
    if missing := re.search(r'Flag (--\w+) must have a value other than None', str(error)):
      raise UserError(f'{missing[1]} is missing: write {missing[1]}=VALUE; --help lists the flags') from error
    if missing := re.fullmatch(r'Missing value for flag (\S+)', str(error)):
      raise UserError(f'{missing[1]} needs a value: write {missing[1]}=VALUE') from error
    # A mistake inside a config file arrives as text that ends in its own message.
    raise UserError(str(error).rpartition('UserError: ')[2]) from error
