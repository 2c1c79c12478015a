"""The reference page of all config keys, generated from their declarations.

`python -m hbf.config.reference > docs/reference/config.md` writes the page again.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hbf.config.defaults import COMMON, IMAGES, REGRESSION, TEXTS, Key, stage_keys
from hbf.nn.registry import STAGE1, STAGE2

_INTRODUCTION = """# Config keys

Every key of a config, with its default, its allowed values and its meaning. Set a key with `--config.KEY=VALUE`, or
in Python with `config.KEY = VALUE`. A value outside its range is refused before anything is written.

The recipe sets some of the keys whose default is empty. The others follow from other keys after all overrides. A
recipe or data set may replace other defaults too ([options.md](options.md)).

`python -m hbf.config.reference` prints this page. Don't edit it by hand.
"""


def reference() -> str:
  """Return the reference page of all config keys, in Markdown."""
  parts = [_INTRODUCTION]
  sections = (('All tasks', COMMON), ('Images', IMAGES), ('Images, task regression', REGRESSION), ('Texts', TEXTS))
  for title, keys in sections:
    parts += [f'## {title}\n', _table(keys)]
  for stage, names, pair in (('stage 1', STAGE1, '{}+none'), ('stage 2', STAGE2, 'identity+{}')):
    parts.append(f'## Options of {stage}\n')
    for name, module in names.items():
      parts += [f'### {stage.capitalize()}: {name}\n', _stage_table(module, stage_keys(pair.format(name)))]
  return '\n'.join(parts)


def field_meanings(kind: type) -> dict[str, str]:
  """Return the meaning of each field of a class, from `Attributes:` in the docstring of the class or its bases."""
  found: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    _, _, entries = inspect.cleandoc(base.__dict__.get('__doc__') or '').partition('Attributes:\n')
    for name, text in re.findall(r'^  (\w+): (.*(?:\n    .*)*)', entries, re.MULTILINE):
      found[name] = ' '.join(text.split())
  return found


def _stage_table(module: type | None, keys: Mapping[str, Key]) -> str:
  """Return a table of a stage's options `keys`, with their meanings from the docstring of the stage's class `module`.

  For a stage without options, return a sentence that says so.
  """
  if module is None or not keys:
    return 'It has no options.\n'
  meanings = field_meanings(module)
  return _table({key: Key(each.default, each.values, meanings[key.rpartition('.')[2]]) for key, each in keys.items()})


def _table(keys: Mapping[str, Key]) -> str:
  """Return a table of config keys in Markdown. Its cells are not padded, because meanings are long."""
  rows: list[Iterable[Any]] = [('key', 'default', 'values', 'meaning'), ('---',) * 4]
  for name, key in keys.items():
    default = 'empty' if key.default is None else f'`{key.default!r}`'
    rows.append((f'`{name}`', default, key.values.expected, key.meaning))
  return ''.join(f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in row)} |\n' for row in rows)


if __name__ == '__main__':
  print(reference(), end='')
