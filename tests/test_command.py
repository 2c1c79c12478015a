"""Tests of the command `hbf`: its help, the modules of its commands, and one line for an unknown command."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

import hbf
from hbf.__main__ import COMMANDS, main


def told(monkeypatch, *arguments):
  monkeypatch.setattr(sys, 'argv', ['hbf', *arguments])
  return main()


@pytest.mark.parametrize('arguments', [[], ['--help'], ['-h'], ['help']])
def test_help_lists_every_command_on_a_screen(arguments, monkeypatch, capsys):
  assert told(monkeypatch, *arguments) == 0
  said = capsys.readouterr().out
  assert said.count('\n') <= 24 and max(map(len, said.splitlines())) <= 100
  assert all(f'\n  {name} ' in said for name in COMMANDS)


def test_version(monkeypatch, capsys):
  assert told(monkeypatch, '--version') == 0
  assert capsys.readouterr().out == f'hbf {hbf.__version__}\n'


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['trian'], "unknown command 'trian': did you mean 'train'?"),
    (['--workdir=W', 'train'], 'stands before a command'),
  ],
)
def test_a_wrong_command_is_a_line(arguments, message, monkeypatch, capsys):
  assert told(monkeypatch, *arguments) == 1
  said = capsys.readouterr()
  assert said.out == '' and said.err.count('\n') == 1 and message in said.err


def test_every_command_has_a_module():
  assert all(importlib.util.find_spec(module) for module, _ in COMMANDS.values())


HEAVY = {'jax', 'flax', 'numpy', 'tensorflow_datasets', 'rich'}


@pytest.mark.parametrize('command', ['', *COMMANDS])
def test_help_succeeds_and_imports_nothing_heavy(command):
  heavy = HEAVY if command else HEAVY | {'absl', 'ml_collections'}
  script = f"""
import runpy, sys
sys.argv = ['hbf', *{command.split()}, '--help']
try:
  runpy.run_module('hbf.__main__', run_name='__main__', alter_sys=True)
except SystemExit as end:
  assert not end.code, end.code
found = {heavy} & set(sys.modules)
assert not found, found
"""
  done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command', ['train', 'eval', 'export'])
def test_help_of_a_command_has_its_flags(command):
  done = subprocess.run([sys.executable, '-m', 'hbf', command, '--help'], capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout.count('\n') <= 40 and '--workdir: Folder' in done.stdout and f'hbf {command}' in done.stdout
  assert ('--coordinator' in done.stdout) == (command != 'export')  # flags that commands share are listed too


def test_versions_agree():
  root = pathlib.Path(__file__).parents[1]
  assert f'\nversion: {hbf.__version__}\n' in (root / 'CITATION.cff').read_text()
  assert f'\n## [{hbf.__version__}]' in (root / 'CHANGELOG.md').read_text()
  (ruff,) = (line for line in (root / 'requirements.txt').read_text().splitlines() if line.startswith('ruff=='))
  assert f'rev: v{ruff.removeprefix("ruff==")} ' in (root / '.pre-commit-config.yaml').read_text()


@pytest.mark.parametrize('command', [['-m', 'hbf', 'train'], ['train.py']], ids=' '.join)
def test_a_reader_that_has_gone_ends_a_command_without_a_word(command):
  """`hbf train --help | head -1` closes the pipe early."""
  reading, writing = os.pipe()
  os.close(reading)
  command = [sys.executable, *command, '--help']
  ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
  os.close(writing)
  assert (ended.returncode, ended.stderr) == (141, '')
