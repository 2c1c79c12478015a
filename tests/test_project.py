"""Tests of the whole project: its layers, and no TensorFlow or network at run time."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from results import table

ROOT = pathlib.Path(__file__).parents[1]
# What a package may import of the others, beside itself, hbf.errors, hbf.files, hbf.options, hbf.markdown and
# hbf.arguments.
LAYERS = {
  'ops': set(),
  'nn': {'ops'},
  'models': {'nn', 'ops'},
  'config': {'data', 'models', 'nn'},
  'data': set(),
  'evaluation': set(),
  'interop': {'models', 'nn'},
  'tasks': {'evaluation', 'models', 'nn', 'ops', 'data'},
  'training': {'config', 'tasks', 'interop', 'evaluation', 'models', 'nn', 'ops', 'data'},
  'editing': {'training', 'tasks', 'evaluation', 'models', 'data'},
  'analysis': {'comparison', 'editing', 'config', 'training', 'tasks', 'evaluation', 'models', 'nn', 'ops', 'data'},
  'serving': {'analysis', 'training'},
  'hardware': {'training', 'tasks', 'evaluation', 'models', 'data'},
  'comparison': {'training', 'tasks', 'evaluation', 'models', 'nn', 'config'},
}
# Modules beside the packages; every other one is a command, which may use all and which nothing imports.
# The other modules of cli are commands.
SHARED = {
  'errors.py': set(),
  'files.py': set(),
  'markdown.py': set(),
  'arguments.py': {'errors'},
  'options.py': {'errors'},
  'cli/__init__.py': {'arguments', 'errors', 'config'},
}


def imported(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


@pytest.mark.parametrize('package', LAYERS)
def test_imports_run_one_way(package):
  allowed = {package, 'errors', 'options', 'markdown', 'arguments', 'files'} | LAYERS[package]
  for path in (ROOT / 'hbf' / package).rglob('*.py'):
    parts = [name.split('.') for name in imported(path) if name.startswith('hbf.')]
    assert {part[1] for part in parts} <= allowed, path


@pytest.mark.parametrize('module', SHARED)
def test_what_all_share_knows_of_no_package(module):
  parts = [name.split('.') for name in imported(ROOT / 'hbf' / module) if name.startswith('hbf.')]
  assert {part[1] for part in parts} <= SHARED[module]


def test_no_module_of_the_tests_is_called_like_a_folder_that_runs_leave():
  """If such a folder existed, the style checker would take imports of the module for imports of the folder."""
  ignored = {line.strip('/') for line in (ROOT / '.gitignore').read_text().splitlines()}
  assert not {path.stem for path in (ROOT / 'tests').rglob('*.py')} & ignored


def test_commands_are_thin():
  shared = {ROOT / 'hbf' / module for module in ('__init__.py', 'api.py', *SHARED)}
  for path in {*(ROOT / 'hbf').glob('*.py'), *(ROOT / 'hbf' / 'cli').glob('*.py')} - shared:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert sum(node.end_lineno - node.lineno for node in functions) < 60, f'{path}: the work belongs into a package'


def test_ops_and_nn_know_nothing_of_configs_and_files():
  for package in ('ops', 'nn'):
    for path in (ROOT / 'hbf' / package).rglob('*.py'):
      assert not {name.split('.')[0] for name in imported(path)} & {'ml_collections', 'pathlib', 'os', 'json'}, path


def test_training_and_evaluation_need_no_tensorflow_and_no_network(tmp_path, digits_dir):
  # Stands for an installed TensorFlow: whoever imports it is found.
  (tmp_path / 'tensorflow').mkdir()
  (tmp_path / 'tensorflow' / '__init__.py').write_text("raise AssertionError('TensorFlow was imported')")
  script = f"""
import os, runpy, socket, sys

def refuse(*args, **kwargs):
  raise AssertionError('the network was asked for')

socket.socket.connect = socket.getaddrinfo = refuse
small = ['--config.model.width=16', '--config.model.depth=1', '--config.model.stage2.centers=8']
small += ['--deterministic']
train = ['train.py', '--workdir={tmp_path}/run', '--config.data.dir={digits_dir}', '--config.train.epochs=1', *small]
evaluate = ['eval.py', '--workdir={tmp_path}/run', '--json', '--output=/proc/x']
for code, sys.argv in ((0, train), (1, evaluate)):
  try:
    runpy.run_path(sys.argv[0], run_name='__main__')
  except SystemExit as end:
    assert end.code == code, end.code
  from absl import flags
  for name in list(flags.FLAGS):
    if name.split('.')[0] in ('config', 'workdir', 'coordinator', 'processes', 'process'):
      delattr(flags.FLAGS, name)
assert '--xla_gpu_deterministic_ops=true' in os.environ['XLA_FLAGS']
"""
  one_device = os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=1')
  environment = os.environ | {'PYTHONPATH': str(tmp_path), 'XLA_FLAGS': one_device}
  done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().splitlines()[-1].startswith('{"dataset": "digits"')
  assert '/proc/x/eval-test-21.json could not be written' in done.stderr  # and the figures were printed all the same


def test_the_pages_show_the_results_that_the_logs_hold(capsys):
  table.main()
  parts = capsys.readouterr().out.strip().split('\n\n')
  assert sum(part.startswith('| ') for part in parts) >= 5
  pages = '\n'.join(path.read_text() for path in (ROOT / 'README.md', *(ROOT / 'docs').rglob('*.md')))
  assert [part for part in parts if part not in pages] == []


@pytest.mark.parametrize('path', sorted((ROOT / 'results' / 'benchmarks').iterdir()), ids=lambda path: path.stem)
def test_a_benchmark_says_a_command_that_anyone_can_run(path):
  python, option, module, *flags = json.loads(path.read_text())['command'].split()
  assert (python, option) == ('python', '-m') and importlib.util.find_spec(module)
  assert not [flag for flag in flags if re.search('(^|=)/', flag)]


def test_arrays_have_the_shapes_that_annotations_state():
  files = ['tests/nn/test_costs.py', 'tests/nn/test_normalized_mlp.py']
  command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *files]
  environment = os.environ | {'CHECK_SHAPES': '1'}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout
