"""Any registered stage 2 can be given the parameters of any other model."""

import pytest
from ml_collections import ConfigDict

from configs.common import make_config
from hbf.errors import UserError
from hbf.models.build import build_model, count_parameters
from hbf.models.matching import match_parameters
from hbf.nn.registry import STAGE1, STAGE2, size_option

SHAPE, CLASSES = (32, 32, 3), 10
# Options that change what a unit costs, by stage 2.
VARIANTS = {
  'mlp': [{}],
  'hyperbf': [{}, {'metric': 'full'}, {'metric': 'low_rank', 'rank': 3}, {'width': 'layer'}, {'heads': 4}],
}
CASES = [(name, variant) for name in STAGE2 for variant in VARIANTS[name]]


def model_config(model, **stage2) -> ConfigDict:
  config = make_config(f'model={model}', {'name': 'cifar10'}).model
  config.stage2.update(stage2)
  return config


def parameters(config):
  return count_parameters(build_model(config, CLASSES), SHAPE)


@pytest.mark.parametrize('budget', [120_000, 203_146, 1_000_000])
@pytest.mark.parametrize('stage1', STAGE1)
@pytest.mark.parametrize(('stage2', 'variant'), CASES)
def test_every_stage_2_comes_within_one_percent_and_as_close_as_units_allow(stage1, stage2, variant, budget):
  config = model_config(f'{stage1}+{stage2}', **variant)
  before = config.to_json()
  matched = match_parameters(config, budget, SHAPE, CLASSES)
  assert config.to_json() == before
  off = abs(parameters(matched) - budget)
  assert off <= 0.01 * budget
  option = size_option(config.name)
  for neighbour in (matched.stage2[option] - 1, matched.stage2[option] + 1):
    other = matched.copy_and_resolve_references()
    other.stage2[option] = neighbour
    assert abs(parameters(other) - budget) >= off
  matched.stage2[option] = config.stage2[option]
  assert matched.to_dict() == config.to_dict()  # nothing but the units changed


def test_a_budget_below_the_rest_of_the_model_is_refused():
  with pytest.raises(
    UserError, match=r'vit can not have 1,000 parameters to within 1%: it has [0-9,]+ with stage2.hidden=1;'
  ):
    match_parameters(model_config('vit'), 1000, SHAPE, CLASSES)


def test_a_budget_between_two_numbers_of_units_is_refused():
  with pytest.raises(UserError, match='choose another width, depth or number of parameters'):
    match_parameters(model_config('vit'), 203_147, SHAPE, CLASSES, tolerance=0.0)
