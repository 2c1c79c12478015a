"""Tests that every registered stage 2 can get as many parameters as any other model."""

import pytest
from ml_collections import ConfigDict
from sampled import sampled

from hbf.config.recipes import make_config
from hbf.config.resolve import resolve
from hbf.errors import UserError
from hbf.models.build import build_model, count_parameters
from hbf.models.matching import match_parameters, match_steps, units_of
from hbf.nn.registry import MODELS, STAGE1, STAGE2, size_option

SHAPE, CLASSES = (32, 32, 3), 10
# Options that change what a unit costs, by stage 2.
VARIANTS = {
  'mlp': [{}, {'activation': 'swiglu'}],
  'hyperbf': [{}, {'metric': 'full'}, {'metric': 'low_rank', 'rank': 3}, {'sigma_per': 'layer'}, {'heads': 4}],
}
BUDGET, BUDGETS = 54_321, (40_000, 54_321, 400_000)  # of one block
CASES = [(f'softmax+{name}', variant, BUDGET) for name in VARIANTS for variant in VARIANTS[name] if variant]
CASES += [(f'softmax+{name}', {}, n) for name in VARIANTS for n in BUDGETS]
CASES += [(f'{first}+{second}', {}, BUDGET) for first in STAGE1 for second in VARIANTS if first != 'softmax']
CASES += [(model, {}, n) for model in MODELS if size_option(model)[0] == 'stage1' for n in BUDGETS]


def model_config(model, **stage2) -> ConfigDict:
  config = resolve(make_config(f'model={model}', {'name': 'cifar10'})).model
  config.update(pool='mean', depth=1)
  config.stage2.update(stage2)
  if stage2_has_units(model) and 'hidden' in config.stage1:
    config.stage1.hidden = 8  # leaves something of the budget
  return config


def stage2_has_units(model):
  return size_option(model)[0] == 'stage2'


def parameters(config):
  return count_parameters(build_model(config, CLASSES), SHAPE)


@pytest.mark.parametrize(('model', 'variant', 'budget'), sampled(CASES))
def test_every_model_comes_within_one_percent_and_as_close_as_units_allow(model, variant, budget):
  config = model_config(model, **variant)
  before = config.to_json()
  matched = match_parameters(config, budget, parameters)
  assert config.to_json() == before
  off = abs(parameters(matched) - budget)
  assert off <= 0.01 * budget
  ((option, units),) = units_of(matched).items()
  for neighbor in (units - 1, units + 1):
    other = matched.copy_and_resolve_references()
    other.update_from_flattened_dict({option: neighbor})
    assert abs(parameters(other) - budget) >= off
  matched.update_from_flattened_dict(units_of(config))
  assert matched.to_dict() == config.to_dict()  # nothing but the units changed


def test_every_stage_2_is_tried():
  assert set(VARIANTS) == {name for name, module in STAGE2.items() if module}


def test_a_model_without_units_is_refused():
  config = resolve(make_config('model=softmax+none', {'name': 'cifar10'})).model
  assert units_of(config) == {}
  with pytest.raises(UserError, match='has no units to have more or fewer of'):
    match_parameters(config, 100_000, parameters)


def test_a_budget_below_the_rest_of_the_model_is_refused():
  with pytest.raises(
    UserError, match=r'vit can not have 1,000 parameters to within 1%: it has [0-9,]+ with stage2.hidden=1;'
  ):
    match_parameters(model_config('vit'), 1000, parameters)


def test_a_budget_between_two_numbers_of_units_is_refused():
  with pytest.raises(UserError, match='choose another width, depth or number of parameters'):
    match_parameters(model_config('vit'), 54_322, parameters, tolerance=0.0)


def test_steps_are_whole_and_within_half_a_percent_of_the_operations():
  assert [match_steps(3.0, budget) for budget in (600.0, 601.4, 602.9)] == [200, 200, 201]
  assert match_steps(600.0, 600.0) == 1
  with pytest.raises(UserError, match=r'600 training operations are no whole .* a step takes 70, and 9 of them 630'):
    match_steps(70.0, 600.0)
