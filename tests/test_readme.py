"""What README.md says can be done is done here."""

import importlib.util
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from hbf.models.build import build_model, count_parameters
from hbf.models.matching import match_parameters
from hbf.nn import registry
from hbf.training.loop import train

README = (pathlib.Path(__file__).parents[1] / 'README.md').read_text()
QUIET = Console(file=open(os.devnull, 'w'))  # noqa: SIM115 (lives as long as the tests)


@pytest.fixture
def shift(tmp_path, monkeypatch):
  """The worked example, its file and its line, done as the README says."""
  section = re.search(r'^## Adding a stage\n(.*?)^## ', README, re.MULTILINE | re.DOTALL)[1]
  path = tmp_path / 'shift.py'
  path.write_text(re.search(r'```python\n(.*?)```', section, re.DOTALL)[1])
  specification = importlib.util.spec_from_file_location('shift', path)
  module = importlib.util.module_from_spec(specification)
  specification.loader.exec_module(module)
  name, stage = re.search(r"`'(\w+)': (\w+),`", section).groups()
  monkeypatch.setitem(registry.STAGE1, name, getattr(module, stage))
  return getattr(module, stage)


def test_the_stage_of_the_worked_example_sees_the_token_before(shift):
  tokens = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 4)), jnp.float32)
  variables = shift().init(jax.random.key(0), tokens)
  changed = shift().apply(variables, tokens.at[:, 1].add(1.0)) - shift().apply(variables, tokens)
  assert [bool(np.any(np.abs(z) > 1e-6)) for z in changed[0]] == [False, True, True, False, False]


def test_the_stage_of_the_worked_example_trains_and_is_matched(shift, toy, tmp_path, use_devices):
  use_devices(1)
  config = toy('model=shift+mlp', **{'train.epochs': 3.0})
  budget = count_parameters(build_model(toy('model=vit').model, 10), (8, 8, 1))
  config.model = match_parameters(config.model, budget, (8, 8, 1), 10)
  result = train(config, tmp_path / 'run', QUIET)
  assert abs(result['params'] - budget) <= 0.01 * budget
  assert result['nll'] < 2.3  # of ten classes alike
