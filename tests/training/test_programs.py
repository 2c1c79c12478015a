"""Tests of the compilation of a run's programs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.training.programs import compile_quickly

LEVEL = 'xla_backend_optimization_level'


@pytest.mark.parametrize('flags', ['', f'--{LEVEL}=0'])
def test_a_program_that_is_compiled_quickly_computes_the_same(flags, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', flags)
  z = jax.random.normal(jax.random.key(0), (16, 16))
  program = jax.jit(lambda z: jnp.sort(z @ z, axis=0))
  np.testing.assert_allclose(compile_quickly(program.lower(z))(z), program(z), rtol=1e-5)


@pytest.mark.parametrize(
  ('backend', 'flags', 'options'),
  [('cpu', '', {LEVEL: 1}), ('cpu', f'--other=1 --{LEVEL}=3', None), ('gpu', '', None), ('tpu', '', None)],
)
def test_the_level_is_lower_on_cpus_unless_the_user_set_it(backend, flags, options, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', flags)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  assert compile_quickly(types.SimpleNamespace(compile=lambda compiler_options: compiler_options)) == options
