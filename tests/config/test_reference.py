"""Tests of the reference page of the config keys."""

import pathlib

from hbf.config.defaults import stage_keys
from hbf.config.reference import field_meanings, reference
from hbf.nn.gated import GatedHyperBF

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'reference' / 'config.md'


def test_the_committed_page_equals_the_generated_one():
  assert PAGE.read_text() == reference(), 'run: python -m hbf.config.reference > docs/reference/config.md'


def test_a_stage_has_the_meanings_of_its_bases_too():
  meanings = field_meanings(GatedHyperBF)
  assert {key.rpartition('.')[2] for key in stage_keys('gated')} <= meanings.keys()
  assert meanings['hidden'].startswith('number of channels of the values')
