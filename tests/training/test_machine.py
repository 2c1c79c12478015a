"""Each test has a process of its own, set up as the scripts set theirs up."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
from hbf.training.machine import keep_freed_memory
keep_freed_memory()
import jax, jax.numpy as jnp

step = jax.jit(lambda z: jnp.sort(z @ z, axis=0)[0, 0])
z = jnp.ones((2000, 2000))
megabytes = step.lower(z).compile().memory_analysis().temp_size_in_bytes / 1e6
for count in (3, 10):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(count):
    step(z).block_until_ready()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(megabytes, faults * resource.getpagesize() / 1e6)
"""


def run(script):
  done = subprocess.run(
    [sys.executable, '-c', script], env=os.environ | {'XLA_FLAGS': ''}, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


@pytest.mark.skipif(sys.platform != 'linux', reason='elsewhere memory is left to the C library')
def test_the_temporaries_of_a_step_are_not_fetched_from_the_system_again():
  temporary, fetched = map(float, run(FAULTS))
  assert temporary > 10
  assert fetched < temporary
