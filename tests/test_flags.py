"""Tests of commands that use argparse: a wrong flag gives one line, and ~ is the home folder."""

import ast
import contextlib
import errno
import importlib
import os
import pathlib
import re

import pytest
from absl import flags

from hbf import cli
from hbf.arguments import Parser, expand, home_path
from hbf.comparison import pack
from hbf.errors import Notice, UserError, in_one_line, warn

COMMANDS = [
  'cli.convert',
  'cli.prepare',
  'analysis.token_order',
  'analysis.nested',
  'analysis.dead_units',
  'comparison.pack',
]


@pytest.mark.parametrize('command', COMMANDS)
def test_a_wrong_flag_ends_in_one_line(command, capsys):
  main = importlib.import_module(f'hbf.{command}').main
  required = {'cli.prepare': ['digits'], 'cli.convert': ['FILE', '--workdir=W'], 'analysis.dead_units': []}
  required['comparison.pack'] = ['RUNS', 'TARGET']
  assert main([*required.get(command, ['--workdir=W']), '--wrong=1']) == 1
  said = capsys.readouterr()
  shown = f'hbf {command[4:]}' if command.startswith('cli.') else f'python -m hbf.{command}'
  line = f'error: unrecognized arguments: --wrong=1: `{shown} --help` has the flags\n'
  assert (said.out, said.err) == ('', line)


def test_ctrl_c_ends_in_one_line(capsys):
  @in_one_line
  def interrupted():
    raise KeyboardInterrupt

  assert interrupted() == 130
  assert capsys.readouterr().err == 'error: interrupted\n'


def test_a_path_that_the_system_refuses_ends_in_one_line(tmp_path, capsys):
  path = tmp_path / ('a' * 300)
  assert pack.main([str(path), str(tmp_path / 'target')]) == 1
  error = capsys.readouterr().err
  assert error.startswith(f'error: {path}') and error.endswith(': file name too long: give a shorter path\n')


def test_only_an_error_of_the_system_ends_in_one_line(capsys):
  def main(error):
    raise error

  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  assert in_one_line(main)(full) == 1
  assert capsys.readouterr().err == (
    'error: a file: no space left on device: free some space, or give a path on another disk\n'
  )
  for mistake in (FileNotFoundError(errno.ENOENT, 'No such file', 'x'), OSError('no number')):
    with pytest.raises(type(mistake)):
      in_one_line(main)(mistake)


def test_paths_may_be_in_the_home_folder(monkeypatch):
  monkeypatch.setenv('HOME', '/home/her')
  parser = Parser('hbf.some', 'Does it.')
  parser.add_run('of a run')
  assert parser.parse_args(['--workdir=~/runs/text']).workdir == pathlib.Path('/home/her/runs/text')


def test_an_unknown_home_folder_is_named():
  parser = Parser('hbf.test', 'A test.')
  parser.add_path('--workdir')
  message = '~nobody-has-this/x begins with a home folder that does not exist: correct the name after ~'
  for call in (lambda: parser.parse_args(['--workdir=~nobody-has-this/x']), lambda: home_path('~nobody-has-this/x')):
    with pytest.raises(UserError, match=message):
      call()


def test_the_current_folder_has_its_name(monkeypatch, tmp_path):
  inside = tmp_path / 'mine'
  inside.mkdir()
  monkeypatch.chdir(inside)
  for path, name in (('.', 'mine'), ('./', 'mine'), ('..', tmp_path.name)):
    assert pathlib.Path(expand(path)).name == name
  assert [expand(path) for path in ('', '/', 'runs/x', '../x', 's3://b')] == ['', '/', 'runs/x', '../x', 's3://b']


def test_paths_of_absl_commands_may_be_in_the_home_folder(monkeypatch):
  monkeypatch.setenv('HOME', '/home/her')
  values = flags.FlagValues()
  holders = [cli.define_path(name, 'Folder.', flag_values=values) for name in ('text', 'bucket', 'empty')]
  values(['compile', '--text=~/programs', '--bucket=s3://b/~'])
  assert [holder.value for holder in holders] == ['/home/her/programs', 's3://b/~', '']


def test_every_flag_of_an_absl_command_for_a_path_knows_the_home_folder():
  for path in pathlib.Path(cli.__file__).parent.glob('*.py'):
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    defined = [call for call in calls if call.startswith('flags.DEFINE_string')]
    assert not [call for call in defined if re.search(r'\b(folder|file|\w+\.json)\b', call.lower())], path


def test_an_archive_may_be_in_the_home_folder(monkeypatch, tmp_path, capsys):
  monkeypatch.setenv('HOME', '/home/her')
  main = importlib.import_module('hbf.cli.prepare').main
  assert main(['cifar10', '--archive=~/c.tar.gz', f'--dir={tmp_path}']) == 1
  assert capsys.readouterr().err.startswith('error: /home/her/c.tar.gz does not exist; expected')


def test_flags_are_written_in_full():
  parser = Parser('hbf.some', 'Does it.')
  parser.add_run('of a run')
  with pytest.raises(UserError, match='--workdir'):
    parser.parse_args(['--work=runs'])


def test_a_notice_is_one_line():
  with pytest.warns(Notice) as caught:
    warn('images/val is\nnot used')
  (found,) = caught
  line = cli._format_warning(found.message, found.category, found.filename, found.lineno)
  assert line == 'warning: images/val is not used\n'
  assert 'a.py:3: UserWarning' in cli._format_warning(UserWarning('other'), UserWarning, 'a.py', 3)


@pytest.mark.parametrize(
  ('given', 'refused'),
  [
    ([], ''),
    (['--prune'], 'prune'),
    (['--noprune'], ''),
    (['--prune', '--tune=3'], ''),
    (['--space=a'], 'space'),
    (['--space=a', '--tune=0'], 'space'),
  ],
)
def test_a_flag_that_does_nothing_without_another_is_refused(given, refused):
  values = flags.FlagValues()
  tune = flags.DEFINE_integer('tune', 0, '', flag_values=values)
  prune = flags.DEFINE_boolean('prune', False, '', flag_values=values)
  space = flags.DEFINE_multi_string('space', [], '', flag_values=values)
  values(['compare', *given])
  with pytest.raises(UserError, match=f'--{refused} needs --tune') if refused else contextlib.nullcontext():
    cli.refuse_idle((prune, tune), (space, tune))


def test_a_command_may_have_no_output(monkeypatch):
  """Python sets sys.stdout to None if a process is started with a closed output."""
  monkeypatch.setattr('sys.stdout', None)
  assert in_one_line(lambda: 0)() == 0


def test_a_path_to_write_can_be_local_only():
  values = flags.FlagValues()
  holder = cli.define_path('text', 'Folder.', local=True, flag_values=values)
  with pytest.raises(flags.IllegalFlagValueError, match='s3://bucket/x is a URL, but a local path is needed here'):
    values(['compile', '--text=s3://bucket/x'])
  values(['compile', '--text=runs/x'])
  assert holder.value == 'runs/x'
