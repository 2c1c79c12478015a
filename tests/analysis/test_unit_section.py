"""Tests that the section on kernels draws what the model has."""

import dataclasses
import json

import numpy as np
import pytest

from hbf.analysis.report.page import Drawing
from hbf.analysis.report.sections import unit
from hbf.analysis.sigmas import SigmaSummary


def titles(run, tmp_path, stages):
  """Return the panel titles of each drawing for a run that logged the sigmas of these stages twice."""
  sigmas = {f'block{i}': dict.fromkeys(stages, 1.5) for i in range(2)}
  lines = [{'step': step, 'epoch': step / 2, 'split': 'train', 'sigmas': sigmas} for step in (1, 2)]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  section = unit.section(dataclasses.replace(run, workdir=tmp_path))
  drawings = [part for part in section.parts if isinstance(part, Drawing)]
  return [[figure.axes[0].get_title() for figure in drawing.figures] for drawing in drawings]


@pytest.mark.parametrize(
  ('arguments', 'stages'), [('model=hyperbf', ['stage1', 'stage2']), ('model=gated', ['stage1'])]
)
def test_a_stage_without_a_kernel_has_no_panel(made, tmp_path, arguments, stages):
  assert titles(made(arguments), tmp_path, stages) == [stages, stages]


@pytest.mark.parametrize(
  ('options', 'history'),
  [
    ({'kernel': 'signed_gaussian', 'metric': 'bilinear'}, ['stage1']),  # it has no sigma
    ({'kernel': 'ball_relu'}, ['stage1', 'stage2']),  # its response is not a function of r/σ alone
  ],
)
def test_a_kernel_that_sigma_does_not_determine_has_no_curve(made, tmp_path, options, history):
  changes = options | {'normalization': 'none'}
  run = made(**{f'model.stage2.{key}': value for key, value in changes.items()})
  assert titles(run, tmp_path, ['stage1', 'stage2']) == [['stage1'], history]


def summary(*sigma):
  return SigmaSummary('gaussian', np.array(sigma), 1.0, 2.0, None)


def test_sigmas_are_compared_in_blocks_with_sigmas_in_both_stages():
  fixed = {'stage1': summary(), 'stage2': summary(2.0)}
  assert unit._claims({'block0': fixed, 'block1': {'stage2': summary(1.0)}}) == []
  (claim,) = unit._claims({'block0': fixed, 'block1': {'stage1': summary(1.0), 'stage2': summary(2.0)}})
  assert 'true in 1 of 1 blocks' in claim


def test_fixed_sigmas_have_a_table_and_no_drawing(made, tmp_path):
  fixed = made(**{'model.stage1.sigma_per': 'fixed', 'model.stage2.sigma_per': 'fixed'})
  section = unit.section(dataclasses.replace(fixed, workdir=tmp_path))
  assert not any(isinstance(part, Drawing) for part in section.parts)
