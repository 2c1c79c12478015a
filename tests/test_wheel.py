"""Tests of the wheel by itself: built, installed outside a checkout, and used in an empty folder."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

import hbf

pytest.importorskip('setuptools', minversion='77', reason='the build needs it; requirements.txt has it')
ROOT = pathlib.Path(__file__).parents[1]
SMALL = ('--config.model.width=16', '--config.model.depth=1', '--config.train.epochs=1.0')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """Return the path of a wheel. It is built from a copy of the source, because a build leaves folders there."""
  source, folder = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('wheel')
  shutil.copytree(ROOT / 'hbf', source / 'hbf', ignore=shutil.ignore_patterns('__pycache__'))
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(ROOT / name, source)
  build = f'from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})'
  subprocess.run([sys.executable, '-c', build], cwd=source, check=True, capture_output=True)
  (path,) = folder.iterdir()
  return path


@pytest.fixture(scope='module')
def installed(wheel, tmp_path_factory):
  """Return a function that runs the installed command, or Python, in an empty folder: `installed('--help')`."""
  site, folder = tmp_path_factory.mktemp('site'), tmp_path_factory.mktemp('empty')
  pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--no-index', '--no-deps']
  subprocess.run([*pip, f'--target={site}', str(wheel)], check=True, capture_output=True)
  one = os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=1')
  environment = os.environ | {'PYTHONPATH': str(site), 'XLA_FLAGS': one}

  def run(*arguments, command=(str(site / 'bin' / 'hbf'),)):
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout

  return run


def test_the_wheel_holds_all_of_the_package_and_nothing_else(wheel):
  files = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'hbf').rglob('*') if path.is_file()}
  files = {name for name in files if '__pycache__' not in name}
  with zipfile.ZipFile(wheel) as archive:
    found = {name for name in archive.namelist() if '.dist-info/' not in name}
    (metadata,) = (name for name in archive.namelist() if name.endswith('/METADATA'))
    about = email.message_from_bytes(archive.read(metadata))
    assert metadata.replace('METADATA', 'licenses/LICENSE') in archive.namelist()
  assert found == files and {'hbf/py.typed', 'hbf/analysis/report/page.html'} <= found
  assert (about['Version'], about['License-Expression']) == (hbf.__version__, 'Apache-2.0')
  tools = ('ruff', 'mypy', 'pytest', 'tokenizers', 'pyarrow')
  assert not [z for z in about.get_all('Requires-Dist') if z.startswith(tools) and 'extra ==' not in z]


def test_the_installed_command_helps_and_trains_without_the_checkout(installed, digits_dir):
  assert 'hbf COMMAND' in installed('--help')
  script = "import hbf, importlib.util; print(hbf.__file__); assert importlib.util.find_spec('configs') is None"
  assert '/site' in installed('-c', script, command=(sys.executable,))
  flags = ('--workdir=run', f'--config.data.dir={digits_dir}', *SMALL)
  assert 'accuracy' in installed('train', '--config=configs/digits.py:model=vit', *flags)


@pytest.mark.slow
def test_the_installed_command_compares_evaluates_and_exports(installed, digits_dir):
  flags = ('--config=digits', '--arm=vit', '--arm=hyperbf', '--seeds=0', f'--config.data.dir={digits_dir}', *SMALL)
  assert '| hyperbf ' in installed('compare', '--workdir=runs', *flags)
  assert 'accuracy' in installed('eval', '--workdir=runs/digits-hyperbf-0', '--json')
  assert 'exported' in installed('export', '--workdir=runs/digits-hyperbf-0', '--output=exported')


@pytest.mark.slow
def test_the_installed_library_trains_on_arrays_and_predicts(installed):
  script = """
import numpy as np, hbf
x, y = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8), np.arange(40) % 2
config = hbf.get_config('arrays')
config.model.update(width=16, depth=1)
config.train.update(epochs=1, batch_size=8)
result = hbf.train(config, 'mine', hbf.ArrayData(x, y, x, y))
print(result['n'], hbf.load('mine').predict(x).shape)
"""
  assert installed('-c', script, command=(sys.executable,)) == '40 (40, 2)\n'
