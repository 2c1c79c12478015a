"""Shared parts of the commands. A mistake of the user ends in one line on stderr, not in a traceback."""

import dataclasses
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags.config_flags import is_config_flag

from hbf.arguments import expand, is_url
from hbf.config import command_line
from hbf.errors import Notice, UserError, fail, in_one_line

# A flag that is defined here belongs to the command that asks for it, and stands in that command's help.
flags.disclaim_key_flags()


def define_config(default: str) -> flags.FlagHolder[ConfigDict]:
  """Define the flag --config=DATA[:arguments] with this default, and the overrides --config.KEY=VALUE."""
  # A default given to the flag itself would be parsed, with the overrides, while it is defined: before `run` can
  # turn a mistake into a line.
  if not any(re.match(r'--?config(=|$)', argument) for argument in sys.argv):
    sys.argv.insert(1, f'--config={default}')
  about = f'DATA[:model=…,recipe=…,size=…,task=…]: the name of a data set, or a file. Default: {default}.'
  return command_line.define_config(about)


def define_workdir(required: bool = True) -> flags.FlagHolder[str]:
  """Define the flag --workdir of a command that reads a run."""
  return define_path('workdir', 'Folder of the run, or its address on a bucket.', required=required)


class _PathParser(flags.ArgumentParser):
  """The parser of a path (`hbf.arguments.expand`). If `local` is True, it refuses an address on a bucket."""

  def __init__(self, local: bool = False):
    super().__init__()
    self._local = local

  def parse(self, argument: str) -> str:
    if self._local and is_url(argument):
      raise UserError(f'{argument} is a URL, but a local path is needed here')
    return expand(argument)


def define_path(
  name: str, about: str, required: bool = False, local: bool = False, **options: Any
) -> flags.FlagHolder[str]:
  """Define a flag whose value is a path, or an address on a bucket. `~` stands for the home folder.

  Args:
    name: the name of the flag.
    about: its help.
    required: True if the flag must be given. If it is not given, its value is ''.
    local: True to refuse an address on a bucket.
    **options: other arguments of `absl.flags.DEFINE`.
  """
  default = None if required else ''
  serializer: flags.ArgumentSerializer[str] = flags.ArgumentSerializer()
  return flags.DEFINE(_PathParser(local), name, default, about, serializer=serializer, required=required, **options)


def define_checkpoint(verb: str) -> tuple[flags.FlagHolder[str], flags.FlagHolder[bool]]:
  """Define the flags --checkpoint and --average.

  Args:
    verb: what the command does with the parameters, such as 'Export'. The help of --average begins with it.
  """
  about = 'latest, best (on the held-out part of train) or a step.'
  return (
    flags.DEFINE_string('checkpoint', 'latest', about),
    flags.DEFINE_boolean('average', False, f'{verb} the moving average of the parameters (train.average).'),
  )


@dataclasses.dataclass(frozen=True)
class Moved:
  """The flags --data_dir and --data_root."""

  folder: flags.FlagHolder[str]
  root: flags.FlagHolder[str]

  def __call__(self) -> dict[str, str]:
    """Return the values of both flags. '' for a flag that is not given."""
    return {'dir': self.folder.value, 'root': self.root.value}


def define_moved(need: str = '') -> Moved:
  """Define the flags --data_dir and --data_root, for data that have moved since training.

  Args:
    need: beginning of the help if the data are not always needed, such as 'For --page: '.
  """
  about = f'{need}folder of the prepared TFDS data, if they have moved since training.'
  folder = define_path('data_dir', about[0].upper() + about[1:])
  about = f'{need}the image folder or text, if it has moved since training.'
  root = define_path('data_root', about[0].upper() + about[1:])
  return Moved(folder, root)


def define_processes() -> Callable[[], dict[str, Any]]:
  """Define the flags of a run on several processes. Return a function that returns their values by name."""
  holders = {
    'coordinator': flags.DEFINE_string(
      'coordinator', '', 'HOST:PORT of process 0, to which the processes of a run connect.'
    ),
    'processes': flags.DEFINE_integer('processes', None, 'Number of processes of the run. 1: only this one.'),
    'process': flags.DEFINE_integer('process', None, 'Number of this process, from 0.'),
  }
  return lambda: {name: holder.value for name, holder in holders.items()}


def run(main: Callable[[Sequence[str]], int], arguments: bool = False) -> None:
  """Parse the flags and run `main`. For a UserError or a wrong flag, print a line 'error: …' and exit with status 1.

  --help prints the docstring of `main`'s module and its flags, and exits with status 0.

  Args:
    main: a function that gets the script's name and the arguments that are not flags. It returns the exit status.
    arguments: True if the command takes arguments that are not flags.
  """

  def guarded(argv: Sequence[str]) -> int:
    logging.set_verbosity(logging.FATAL)  # Orbax warns of intended behavior, and prints errors that it raises
    sys.unraisablehook = _report_unraisable
    warnings.formatwarning = _format_warning
    if len(argv) > 1 and not arguments:
      raise UserError(f'unexpected argument {argv[1]!r}: flags are written --name=value')
    return main(argv)

  def parse(argv: Sequence[str]) -> list[str]:
    if any(re.fullmatch(r'--?h(elp.*)?', argument) for argument in argv):
      print(_help(main))
      sys.exit(0)
    return _parse(argv)

  @in_one_line
  def parse_and_run() -> int:
    app.run(guarded, flags_parser=parse)
    return 0

  sys.exit(parse_and_run())


def _help(main: Callable[..., int]) -> str:
  """Return the help of a command: its description and its flags."""
  module = main.__globals__
  name = sys.argv[0] if module['__name__'] == '__main__' else module['__name__']
  own_flags = flags.FLAGS.module_help(name).strip().partition('\n')[2]
  # absl also writes a default where there is none.
  own_flags = re.sub(r"\n *\(default: '(None|\[\])?'\)", '', own_flags)
  return f'{module["__doc__"]}\nflags:\n{own_flags}'


_FORMAT_WARNING = warnings.formatwarning


def _format_warning(
  message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
  """Format a `hbf.errors.Notice` as one line, and any other warning as Python does."""
  if issubclass(category, Notice):
    return f'warning: {" ".join(str(message).split())}\n'
  return _FORMAT_WARNING(message, category, filename, lineno, line)


def _report_unraisable(unraisable: Any) -> None:
  """Print an exception that cannot be raised, such as one in a destructor, as Python does.

  Print nothing for the exception 'Event loop is closed', which TensorStore raises after an error with a checkpoint.
  """
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


def _parse(argv: Sequence[str]) -> list[str]:
  has_config = 'config' in flags.FLAGS and is_config_flag(flags.FLAGS['config'])
  try:
    return command_line.parse_flags(command_line.config_arguments(argv) if has_config else argv)
  except UserError as error:
    sys.exit(fail(str(error)))


def take_overrides() -> list[str]:
  """Remove the flags --config.KEY=VALUE from the command line and return them, for a command that starts runs.

  They are returned with two dashes, even if they were given with one.
  """
  sys.argv[:] = command_line.joined(sys.argv)
  overrides = [argument for argument in sys.argv if re.match(r'--?(no)?config\.', argument)]
  if wrong := [override for override in overrides if '=' not in override and '-noconfig.' not in override]:
    sys.exit(fail(f'{wrong[0]} needs a value: write {wrong[0]}=VALUE'))
  sys.argv[:] = [argument for argument in sys.argv if argument not in overrides]
  return ['--' + override.lstrip('-') for override in overrides]


def refuse_idle(*pairs: tuple[flags.FlagHolder[Any], flags.FlagHolder[Any]]) -> None:
  """Refuse flags that do nothing without another flag.

  Args:
    *pairs: a flag and the other one that it needs.

  Raises:
    UserError: a flag is given, but not as --noFLAG, and the other flag is not given.
  """
  for flag, other in pairs:
    if _given(flag) and not other.value:
      raise UserError(f'--{flag.name} needs --{other.name}: add it, or leave --{flag.name} out')


def check_source(
  workdir: flags.FlagHolder[str], model: flags.FlagHolder[str], *of_runs: flags.FlagHolder[Any]
) -> None:
  """Check that a command gets either a run or an exported model.

  Args:
    workdir: the flag with the folder of the run.
    model: the flag with the folder of the exported model.
    *of_runs: flags that an exported model does not take.

  Raises:
    UserError: both or neither are given, or a flag is given that an exported model does not take.
  """
  if bool(workdir.value) == bool(model.value):
    raise UserError('give either the --workdir of a run or the --model of an exported folder')
  if model.value and (wrong := [f'--{flag.name}' for flag in of_runs if _given(flag)]):
    raise UserError(f'not with --model: {", ".join(wrong)}. Give the --workdir of the run instead, or leave them out')


def _given(flag: flags.FlagHolder[Any]) -> bool:
  """Return True if a flag is on the command line, but not as --noFLAG."""
  return bool(flag.present) and flag.value is not False
