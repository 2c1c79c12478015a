"""Tests of settings of the machine. Most have a process of their own, which is set up as by the commands."""

import os
import re
import subprocess
import sys
import types

import jax
import pytest

from hbf.training import machine

FAULTS = """
import resource
from hbf.training.machine import keep_freed_memory
keep_freed_memory()
import jax, jax.numpy as jnp

step = jax.jit(lambda z: jnp.max(jnp.abs(jnp.fft.fft(z))))
z = jnp.ones((10_000, 1000))
megabytes = step.lower(z).compile().memory_analysis().temp_size_in_bytes / 1e6
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
  step(z).block_until_ready()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(megabytes, faults * resource.getpagesize() / 1e6)
"""


CACHE = """
from hbf.training.machine import keep_compiled_programs
keep_compiled_programs()
import jax, jax.numpy as jnp

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda z: jnp.sort(z @ z))(jnp.ones((8, 8)))
print(events.count('/jax/compilation_cache/cache_hits'), jax.config.jax_compilation_cache_dir)
"""


def run(script, **environment):
  given = os.environ | {'XLA_FLAGS': '', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'} | environment
  given = {name: value for name, value in given.items() if value is not None}
  done = subprocess.run([sys.executable, '-c', script], env=given, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere memory is left to the C library')
def test_the_temporaries_of_a_step_are_not_fetched_from_the_system_again():
  temporary, fetched = map(float, run(FAULTS))
  assert temporary > 10
  assert fetched < 10 * temporary  # a few times, until freed pieces of the size lie about; without care 20 times


@pytest.mark.parametrize(('backend', 'set_up'), [('cpu', True), ('gpu', False), ('tpu', False)])
def test_the_c_library_is_left_as_it_is_where_another_backend_computes(backend, set_up, monkeypatch):
  calls = []
  library = types.SimpleNamespace(mallopt=lambda *setting: calls.append(setting))
  monkeypatch.setattr(machine.ctypes, 'CDLL', lambda _: library)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(jax.config, 'update', lambda *_: None)
  machine.keep_freed_memory()
  assert bool(calls) == set_up


def test_the_next_run_loads_what_this_one_compiled(tmp_path):
  home = {'XDG_CACHE_HOME': str(tmp_path), 'JAX_COMPILATION_CACHE_DIR': None}
  first, second = run(CACHE, **home), run(CACHE, **home)
  assert first[1] == second[1] == str(tmp_path / 'hbf' / 'xla')
  assert int(first[0]) == 0 < int(second[0])


def test_of_many_compiled_programs_the_latest_stay(tmp_path):
  for age, name in enumerate('abcd'):
    (tmp_path / name).write_bytes(bytes(10))
    os.utime(tmp_path / name, (1000 - age, 2000 + age))  # read, written
  (tmp_path / 'of_xla').mkdir()  # results of autotuning, on GPUs
  os.utime(tmp_path / 'of_xla', (0, 0))
  machine._trim(tmp_path, 25)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'b', 'of_xla']


def test_a_folder_given_to_jax_stays(tmp_path):
  assert run(CACHE, XDG_CACHE_HOME=str(tmp_path))[1] == os.environ['JAX_COMPILATION_CACHE_DIR']
  assert not any(tmp_path.iterdir())


def test_without_a_folder_for_it_a_run_compiles(tmp_path):
  (tmp_path / 'file').touch()
  assert run(CACHE, XDG_CACHE_HOME=str(tmp_path / 'file'), JAX_COMPILATION_CACHE_DIR=None) == ['0', 'None']


def test_an_installed_package_takes_no_commit_from_the_repository_around_it(tmp_path, monkeypatch):
  assert re.fullmatch('[0-9a-f]{40}(-dirty)?', machine.commit())
  (tmp_path / 'machine.py').touch()
  git = ['git', '-C', str(tmp_path), '-c', 'user.name=U', '-c', 'user.email=u@example.com']
  for command in (['init', '-q'], ['commit', '-q', '--allow-empty', '-m', 'theirs']):
    subprocess.run([*git, *command], check=True)
  monkeypatch.setattr(machine, '__file__', str(tmp_path / 'machine.py'))
  assert machine.commit() is None
