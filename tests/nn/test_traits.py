"""Tests of traits: the declarations of a stage, and how the registry reads them."""

import flax.linen as nn
import pytest

from hbf.nn.registry import STAGE1, STAGE2, size_option, stage_units
from hbf.nn.traits import StageTraits, traits_of


class Plain(nn.Module):
  """A stage that declares nothing."""


def test_a_stage_without_traits_has_the_defaults():
  assert traits_of(Plain()) == traits_of(Plain) == traits_of(None) == StageTraits()
  assert not StageTraits().causal and not StageTraits().decodes and StageTraits().masks == 'none'


@pytest.mark.parametrize('stage', [*STAGE1.values(), *filter(None, STAGE2.values())])
def test_the_option_that_counts_units_is_a_field(stage):
  traits = traits_of(stage)
  assert traits.units is None or traits.units in stage.__dataclass_fields__
  assert traits.masks in ('any', 'keys', 'none')
  assert traits.causal or not traits.decodes


def test_units_of_a_block_are_those_of_its_stages():
  assert size_option('hyperbf') == ('stage2', 'centers')
  assert size_option('gated') == ('stage1', 'hidden')
  assert size_option('softmax+none') is None
  assert stage_units('mixer', 256) == (32, 256)
  assert stage_units('gated', 96) == (80, 96)
