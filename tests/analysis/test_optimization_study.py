"""Tests of the study of refits and the AGOP, on a small untrained network."""

import itertools

import numpy as np
import pytest

from hbf.analysis import optimization_study as study
from hbf.analysis.report import optimization_report
from hbf.analysis.report.optimization_report import draw, tables
from hbf.errors import UserError


@pytest.fixture(scope='module')
def measured(made):
  run = made('model=vit', **{'model.width': 8, 'model.heads': 2, 'model.pool': 'mean', 'data.validation': 0.2})
  restored = run.restored
  about = {'run': 'vit', 'model': 'vit', 'seed': 0, 'stage2': restored.config.model.stage2.to_dict()}
  found = about | {'refits': study.measure_refits(restored, 100), 'agop': study.measure_agop(restored)}
  return {'networks': [found, found | {'run': 'other', 'refits': []}]}


@pytest.mark.slow
def test_every_refit_has_scores_and_operations(measured):
  refits = measured['networks'][0]['refits']
  assert len({(row['layer'], row['start'], row['loss']) for row in refits}) == len(refits) == 9
  for row in refits:
    if 'Adam' not in row['loss']:
      assert len(row['tests']) == 1 + sum(each['damping'] is not None for each in row.get('rounds', []))
    if row['loss'] == 'random step':
      continue
    assert row['operations'] > 0 and row['images'] == 100
    held_out = [row['before'], *(each['held_out'] for each in row['rounds'])]
    assert all(after <= before for before, after in itertools.pairwise(held_out)) or 'Adam' in row['loss']


@pytest.mark.slow
def test_the_agop_is_compared_for_both_states_and_every_block(measured):
  rows = measured['networks'][0]['agop']
  assert {(row['state'], row['block']) for row in rows} == {
    (state, block) for state in ('trained', 'untrained') for block in ('block0', 'block1')
  }
  assert all(abs(row[power][part]) <= 1 for row in rows for power in ('agop', 'root') for part in row[power])


@pytest.mark.slow
def test_the_report_shows_every_network(measured, tmp_path):
  text = tables(measured)
  assert text.count('ViT') >= 8
  draw(measured, tmp_path / 'x.png')
  assert (tmp_path / 'x.png').stat().st_size > 10_000


def test_blocks_are_sorted_by_their_numbers():
  rows = [
    {'state': 'trained', 'matrix': 'centers', 'block': f'block{number}', 'agop': {'diagonal': float(number)}}
    for number in (0, 1, 10, 11, 2)
  ]
  found = optimization_report._trained({'agop': rows})
  assert [row['block'] for row in found] == ['block0', 'block1', 'block2', 'block10', 'block11']


def test_codes_are_the_least_squares_fit():
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(60, 4)), rng.integers(4, size=60)
  one_hot = np.eye(4)[labels] - 1 / 4
  columns = np.stack([one_hot.reshape(-1), np.ones(240)], axis=1)
  np.testing.assert_allclose(study.codes(logits, labels), np.linalg.lstsq(columns, logits.reshape(-1))[0])


def test_a_missing_run_or_split_is_refused(tmp_path, capsys, made):
  assert study.main([f'--out={tmp_path}', '--report']) == 1
  assert 'measure it without --report' in capsys.readouterr().err
  assert study.main([f'--out={tmp_path}']) == 1
  assert '--run is missing' in capsys.readouterr().err
  assert study.main([f'--out={tmp_path}', '--run=nowhere', '--images=-1']) == 1
  assert "argument --images: '-1'; expected a whole number, at least 0" in capsys.readouterr().err
  with pytest.raises(UserError, match='holds out no images'):
    study.classifier(made('model=vit', **{'data.validation': 0.0}).restored, tmp_path)
