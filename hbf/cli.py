"""What the scripts share: a mistake of the user ends in one line on stderr, not in a traceback."""

import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from hbf.errors import UserError


def define_config(default: str) -> flags.FlagHolder[ConfigDict]:
  """The flag --config=FILE[:arguments], overridden by --config.KEY=VALUE."""
  # A default given to the flag itself would be parsed, with the overrides, while it is defined: before `run` can
  # turn a mistake into a line.
  if not any(re.match(r'--?config(=|$)', argument) for argument in sys.argv):
    sys.argv.insert(1, f'--config={default}')
  return config_flags.DEFINE_config_file('config', None, f'FILE[:model=…,recipe=…,size=…]; {default} if not given.')


def run(main: Callable[[Sequence[str]], int]) -> None:
  """Parses the flags and runs `main`; exit status 1 and a line 'error: …' for a UserError or a wrong flag."""

  def guarded(argv: Sequence[str]) -> int:
    logging.set_verbosity(logging.ERROR)  # Orbax warns of what is meant
    try:
      if len(argv) > 1:
        raise UserError(f'unexpected argument {argv[1]!r}: flags are written --name=value')
      return main(argv)
    except UserError as error:
      return _fail(str(error))

  app.run(guarded, flags_parser=_parse)


def _parse(argv: Sequence[str]) -> list[str]:
  if any(re.fullmatch(r'--?h(elp.*)?', argument) for argument in argv):
    return app.parse_flags_with_usage(list(argv))
  try:
    rest = flags.FLAGS(argv)
    if 'config' in flags.FLAGS:
      flags.FLAGS.config.to_dict()  # raises if the file could not be read
    return rest
  except (KeyError, AttributeError) as error:
    key, near = re.search(r'\w+', str(error)), re.search(r'mean "(\w+)"', str(error))
    hint = f'did you mean {near[1]!r}? ' if near else ''
    sys.exit(_fail(f'unknown config key {key and key[0]!r}: {hint}configs/common.py has all keys'))
  except (flags.Error, UserError, TypeError, OSError) as error:
    # A mistake inside a config file arrives as text that ends in its own message.
    sys.exit(_fail(str(error).rpartition('UserError: ')[2]))


def _fail(message: str) -> int:
  print('error:', ' '.join(message.split()), file=sys.stderr)
  return 1
