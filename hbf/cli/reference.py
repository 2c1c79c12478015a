"""The reference page of all commands, made from their `--help` texts.

`python -m hbf.cli.reference > docs/reference/commands.md` writes the page again.
"""

import os
import subprocess
import sys

from hbf.__main__ import COMMANDS

_INTRODUCTION = """# Commands

Every command, with the text that `--help` prints. In a clone of the repository, `train.py` is `hbf train`, and
`eval.py` is `hbf eval`.

[config.md](config.md) lists the keys of `--config.KEY=VALUE`. `python -m hbf.cli.reference` prints this page. Don't
edit it by hand.
"""


def reference() -> str:
  """Return the reference page of all commands, in Markdown."""
  # The commands share names of flags, so each needs a process of its own. All processes run at the same time.
  environment = {**os.environ, 'COLUMNS': '80', 'NO_COLOR': '1', 'PYTHONUTF8': '1'}
  started = {
    name: subprocess.Popen(
      [sys.executable, '-m', 'hbf', name, '--help'], stdout=subprocess.PIPE, encoding='utf-8', env=environment
    )
    for name in COMMANDS
  }
  parts = [_INTRODUCTION]
  for name, process in started.items():
    text, _ = process.communicate()
    if process.returncode:
      raise RuntimeError(f'`hbf {name} --help` ended with status {process.returncode}: expected 0')
    lines = '\n'.join(line.rstrip() for line in text.strip().splitlines())
    parts.append(f'## {name}\n\n{COMMANDS[name][1]}\n\n```text\n{lines}\n```\n')
  return '\n'.join(parts)


if __name__ == '__main__':
  print(reference(), end='')
