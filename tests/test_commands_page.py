"""Tests of the reference page of the commands."""

import pathlib

from hbf.__main__ import COMMANDS
from hbf.cli.reference import reference

PAGE = pathlib.Path(__file__).parents[1] / 'docs' / 'reference' / 'commands.md'


def test_the_committed_page_equals_the_generated_one():
  assert PAGE.read_text() == reference(), 'run: python -m hbf.cli.reference > docs/reference/commands.md'


def test_the_page_has_every_command_and_its_flags():
  page = PAGE.read_text()
  assert all(f'\n## {name}\n' in page for name in COMMANDS)
  assert '--workdir' in page and '--topology' in page
  assert [none for none in ('None', '[]', '') if f"(default: '{none}')" in page] == []
  assert "(default: 'latest')" in page
  assert 'usage: hbf prepare' in page and 'usage: python' not in page
