"""The study of corrupted images on a small network, and its table and picture."""

import numpy as np
import pytest

from hbf.analysis import corruption_study
from hbf.analysis.image_run import LabeledImages
from hbf.analysis.report import corruption_report
from hbf.data.augment.corruptions import CORRUPTIONS, corrupt
from hbf.errors import UserError

IMAGES = 40


def test_each_row_counts_right_answers_and_is_measured_once(run, monkeypatch):
  monkeypatch.setattr(corruption_study, 'CORRUPTIONS', {'contrast': CORRUPTIONS['contrast']})
  examples = corruption_study.shared_images([run, run], 30)
  rows = []
  corruption_study.measure([run], examples, rows, rows.append)
  corruption_study.measure([run], examples, rows, rows.append)
  assert [row['corruption'] for row in rows] == ['none', 'contrast']
  right = np.stack([run.logits(corrupt(examples.images, 'contrast', s)).argmax(1) for s in range(1, 6)])
  right = right == examples.labels
  assert rows[1]['right'] == ''.join(map(str, right.sum(axis=0)))
  np.testing.assert_allclose(rows[1]['accuracy'], 100 * right.mean(axis=1), atol=1e-3)
  clean = run.logits(examples.images).argmax(1) == examples.labels
  assert rows[0]['right'] == ''.join(map(str, clean.astype(int)))
  earlier = [row | {'step': row['step'] - 1} for row in rows]
  corruption_study.measure([run], examples, earlier, earlier.append)
  assert earlier[2:] == rows  # the numbers of an earlier checkpoint do not count


def test_runs_of_one_name_are_refused(capsys):
  assert corruption_study.main(['--run=one/run', '--run=other/run']) == 1
  assert 'one/run and other/run have the same name' in capsys.readouterr().err


def test_runs_with_other_images_are_refused(run, monkeypatch):
  other = type('Other', (), {'workdir': 'elsewhere', 'read': lambda *_: LabeledImages(np.zeros(3), np.zeros(3))})()
  with pytest.raises(UserError, match='elsewhere and nowhere have different test images'):
    corruption_study.shared_images([run, other], 30)


def row(model, corruption, counts, strengths=5):
  accuracy = [100 * float(np.mean(counts)) / strengths] * strengths
  about = {'run': model, 'model': model, 'seed': 0, 'step': 1, 'corruption': corruption}
  return about | {'accuracy': accuracy, 'right': ''.join(map(str, counts))}


def rows_of(model, counts):
  clean = row(model, 'none', (counts > 0).astype(int), strengths=1)
  return [clean, *(row(model, name, counts) for name in CORRUPTIONS)]


@pytest.fixture
def measured(monkeypatch):
  """Answers of two networks: the second one is right once less for half of the images."""
  counts = np.random.default_rng(0).integers(1, 6, IMAGES)
  rows = rows_of('hyperbf', counts) + rows_of('vit', counts - (np.arange(IMAGES) % 2))
  return {'data': 'digits', 'images': IMAGES, 'rows': rows}


def cells(shown, label):
  return [[cell.strip() for cell in line.split('|')[1:-1]] for line in shown.splitlines() if f'| {label} ' in line]


def test_the_table_has_accuracies_and_a_paired_difference(measured):
  shown = corruption_report.table(measured)
  assert 'One seed' in shown and 'HyperBF − network' in shown
  ours, rival = cells(shown, 'mean of all corruptions')
  accuracy = np.mean([int(digit) for digit in measured['rows'][1]['right']]) * 20
  assert ours[:7] == ['mean of all corruptions', 'HyperBF', *5 * [f'{accuracy:.1f}']] and ours[-1] == ''
  # One of five answers differs for half of the images: 10 points, and ±10 points around that for single images.
  half = 1.96 * 10 * np.sqrt(IMAGES / (IMAGES - 1)) / np.sqrt(IMAGES)
  mean, low, _, high = rival[-1].replace('(', '').replace(')', '').split()
  assert mean == '+10.00'
  np.testing.assert_allclose([float(low), float(high)], [10 - half, 10 + half], atol=0.15)
  assert [line[:2] for line in cells(shown, 'mean of weather')] == [
    ['mean of weather', z] for z in ('HyperBF', 'ViT')
  ]
  assert cells(shown, 'none')[0][2:7] == 5 * ['']


def test_a_mean_is_over_the_corruptions_of_a_group(measured):
  never = np.zeros(IMAGES, int)
  noise = 'gaussian_noise'
  rows = [row(z['model'], noise, never) if z['corruption'] == noise else z for z in measured['rows']]
  measured['rows'] = rows
  shown = corruption_report.table(measured)
  group, single = (float(cells(shown, label)[0][2]) for label in ('mean of noise', 'shot noise'))
  assert group == pytest.approx(2 / 3 * single, abs=0.1) and cells(shown, 'gaussian noise')[0][2] == '0.0'


def test_the_picture_is_drawn_and_a_gap_is_named(measured, tmp_path):
  corruption_report.draw(measured, tmp_path / 'corruptions.png')
  assert (tmp_path / 'corruptions.png').stat().st_size > 10_000
  measured['rows'].pop()
  with pytest.raises(UserError, match='vit was not measured under the corruption jpeg_compression'):
    corruption_report.table(measured)
