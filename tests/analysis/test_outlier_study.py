"""Tests of the studies of outliers and attacks on a small network, with their images, tables and pictures."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import stats

from hbf.analysis import attack_study, outlier_study, outlier_tokens
from hbf.analysis.nearness import image_nearness
from hbf.analysis.ood_images import load_ood_images
from hbf.analysis.outlier_study import made_up, scrambled
from hbf.analysis.outlier_tokens import CENTERS, GREATEST, MEANS, TOKENS
from hbf.analysis.report import attack_report, outlier_report
from hbf.analysis.report.seeds import about_intervals, over_seeds
from hbf.errors import UserError
from hbf.evaluation.outliers import Estimate, energy_score

pytestmark = pytest.mark.slow  # a study is run by hand, and changes rarely


@pytest.fixture(scope='module')
def small():
  """Let the study use fewer training images and neighbors, so that the tests are fast."""
  with pytest.MonkeyPatch.context() as patch:
    for name, value in {'TRAINING': 200, 'HELD_OUT': 40, 'MOST': 40, 'FEATURE_RANKS': (1, 5)}.items():
      patch.setattr(outlier_study, name, value)
    patch.setattr(outlier_tokens, 'IMAGES', 50)
    patch.setattr(outlier_tokens, 'BANK', 40)
    patch.setattr('hbf.analysis.ood_images.MOST', 40)
    yield


BALLS = {'model.stage2.kernel': 'ball_silu', 'model.stage2.normalization': 'none'}


@pytest.fixture(scope='module')
def row(made, small):
  run = made(**{'data.validation': 0.1})
  return outlier_study.measure(run, outlier_study.load_outside(run, ['digits']))


@pytest.mark.slow
def test_the_study_has_all_scores_of_a_network_with_centers(row):
  assert list(row['scores']) == ['digits', 'phase-scrambled', 'noise']
  found = row['scores']['noise']
  assert {'softmax', 'energy', GREATEST, CENTERS, MEANS, TOKENS, f'{CENTERS}, block1'} <= set(found)
  assert all(0 <= z['auroc']['low'] <= z['auroc']['value'] <= z['auroc']['high'] <= 100 for z in found.values())
  assert row['chosen']['k of features'] in (1, 5)


def test_scores_of_tokens_are_those_of_the_captured_arrays(made, run, images):
  fitted = outlier_tokens.fit(run, images)
  found = outlier_tokens.scores(run, fitted, images)
  np.testing.assert_allclose(found.logits, run.logits(images), rtol=1e-4, atol=1e-4)
  (_, seen), *_ = run.capture_batches(images)
  for block, near in image_nearness(run, images).items():
    np.testing.assert_allclose(found.tokens[GREATEST][block], near, rtol=1e-4)
    log_k = np.asarray(seen.log_kernels[block], np.float64)[:16]
    expected = np.log(np.exp(log_k).mean(axis=-1)).mean(axis=-1)
    np.testing.assert_allclose(found.tokens[CENTERS][block], expected, rtol=1e-3)
    assert found.tokens[TOKENS][block].shape == (16, len(outlier_tokens.RANKS))
  np.testing.assert_allclose(outlier_tokens.features(run, images), found.features, rtol=1e-5)


def observe(run, images):
  observed = jax.jit(functools.partial(outlier_tokens._observe, run.model))
  return observed(run.params, run.normalized(images))


@pytest.mark.slow
def test_a_ball_is_a_gaussian_of_its_sigma_and_a_gate_is_a_response(made, images):
  balls = made(**BALLS)
  seen = observe(balls, images).blocks['block0']
  unit = balls.params['block0']['stage2']
  centers, sigma = np.asarray(unit['centers'][0]), np.exp(np.asarray(unit['log_sigma']).reshape(-1))
  metric = np.asarray(unit['metric']).reshape(-1)
  squares = np.square((np.asarray(seen.tokens)[:, :, None] - centers) * metric).sum(axis=-1)
  np.testing.assert_allclose(seen.log_kernels, -squares / (2 * sigma**2), rtol=1e-3, atol=1e-3)
  vit = made('model=vit', **{'model.stage2.activation': 'swiglu', 'model.merge': (1,), 'model.pool': 'mean'})
  seen = observe(vit, images).blocks['block1']
  dense = vit.params['block1']['stage2']['hidden']
  gates = (np.asarray(seen.tokens) @ np.asarray(dense['kernel']) + np.asarray(dense['bias']))[
    ..., : seen.responses.shape[-1]
  ]
  np.testing.assert_allclose(seen.responses, gates, rtol=1e-3, atol=1e-3)
  assert seen.log_kernels is None


def test_a_run_that_holds_out_no_images_is_refused(made):
  with pytest.raises(UserError, match='holds out no images'):
    outlier_study.learn(made(**{'data.validation': 0}))


def test_a_class_with_too_few_training_images_is_refused(made, small, monkeypatch):
  monkeypatch.setattr(outlier_study, 'TRAINING', 12)
  with pytest.raises(UserError, match=r'^[01] of 12 training images of .* are of class .: expected two or more'):
    outlier_study.learn(made(**{'data.validation': 0.1}))


def test_classes_can_be_left_out(run, small):
  everything, nine = (load_ood_images(run, ['digits'], without)['digits'] for without in ({}, {'digits': ['3', '8']}))
  assert len(everything) == len(nine) == 40 and not np.array_equal(everything, nine)


def test_sources_of_one_name_are_refused(run, tmp_path, small):
  for name in ('svhn', 'dtd'):
    (tmp_path / name / 'test' / 'banded').mkdir(parents=True)
    for i in range(2):
      Image.new('RGB', (30, 20), (255, 0, 0)).save(tmp_path / name / 'test' / 'banded' / f'{i}.png')
  assert [*load_ood_images(run, [str(tmp_path / 'svhn'), str(tmp_path / 'dtd')])] == ['noise', 'svhn', 'dtd']
  with pytest.raises(UserError, match='the same name, test'):
    load_ood_images(run, [str(tmp_path / 'svhn' / 'test'), str(tmp_path / 'dtd' / 'test')])


def test_a_further_data_set_is_measured_alone_and_added(run, monkeypatch):
  def measured(run, outside):
    asked.append([*outside])
    about = run.about() | {'images': dict.fromkeys(outside, 5)}
    estimate = {'value': 70.0, 'low': 60.0, 'high': 80.0}
    return about | {'scores': {name: {'softmax': {'auroc': estimate}} for name in outside}}

  asked, rows = [], []
  monkeypatch.setattr(outlier_study, 'measure', measured)
  images = np.zeros((5, 8, 8, 1), np.uint8)
  calls = [outlier_study.add(rows, run, dict.fromkeys(names, images)) for names in (['a', 'b'], ['a', 'c'], ['b'])]
  assert calls == [True, True, False] and asked == [['a', 'b'], ['c']]
  assert [[*row['images'], *row['scores']] for row in rows] == [['a', 'b', 'c', 'a', 'b', 'c']]
  lacking = rows[0] | {'run': 'other', 'model': 'vit', 'scores': {'b': rows[0]['scores']['b']}}
  shown = outlier_report.table({'rows': [*rows, lacking]})
  assert 'b: AUROC, %' in shown and 'c: AUROC, %' not in shown
  rows[0]['step'] -= 1  # numbers of an earlier checkpoint are replaced
  assert outlier_study.add(rows, run, {'b': images})
  assert [[*row['images'], *row['scores']] for row in rows] == [['b', 'b']] and rows[0]['step'] == run.restored.step


def test_scrambled_images_keep_the_amplitudes_and_the_mean():
  images = np.random.default_rng(0).integers(90, 160, (5, 8, 8, 3)).astype(np.uint8)
  found = scrambled(images, seed=0)
  np.testing.assert_allclose(found.mean(axis=(1, 2)), images.mean(axis=(1, 2)), atol=1)
  amplitudes = [np.abs(np.fft.fft2(z, axes=(1, 2))) for z in (images, found)]
  assert stats.pearsonr(*(z[:, 1:4].ravel() for z in amplitudes)).statistic > 0.95
  assert np.abs(found.astype(int) - images).mean() > 5


def test_made_up_outliers_are_means_and_shuffled_parts():
  images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1)).astype(np.uint8)
  pairs, jigsaws = np.split(made_up(images, seed=0), 2)
  assert all(
    any(np.array_equal(pair, (a.astype(int) + b) // 2) for b in images)
    for pair, a in zip(pairs, images, strict=False)
  )
  parts = [sorted(map(bytes, z.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4))) for z in (images[3], jigsaws[0])]
  assert parts[0] == parts[1] and not np.array_equal(images[3], jigsaws[0])


def test_seeds_make_an_interval_from_three_on():
  one = [Estimate(value, value - 1, value + 1) for value in (80.0, 82.0, 84.0)]
  assert over_seeds(one[:1]) == one[0]
  assert over_seeds(one[:2]) == Estimate(81.0, 80.0, 82.0)
  half = np.hypot(1, stats.t.ppf(0.975, 2) * 2 / 3**0.5)
  found = over_seeds(one)
  np.testing.assert_allclose([found.value, found.low, found.high], [82, 82 - half, 82 + half])


@pytest.mark.slow
def test_attacks_are_stored_and_not_repeated(made, monkeypatch):
  run, rows, steps = made(), [], {'APGD': 3, 'Square': 4}
  monkeypatch.setattr(attack_study, 'ATTACKS', (('APGD', 2), ('Square', 2)))
  attack_study.measure(run, [], rows.append, 20, steps)
  attack_study.measure(run, rows, rows.append, 20, steps)
  assert [(row['attack'], row['images'], len(row['fooled']), row['steps']) for row in rows] == [
    ('APGD', 20, 20, 3),
    ('Square', 20, 20, 4),
  ]
  chosen = run.read('test', 20)
  right = run.logits(chosen.images).argmax(axis=1) == chosen.labels
  assert rows[0]['fooled'].count('0') <= rows[0]['right'] == right.sum()


@pytest.mark.parametrize(('images', 'steps', 'named'), [(30, 3, '30 images with 3'), (20, 5, '20 images with 5')])
def test_attacks_of_two_sizes_are_not_mixed(made, images, steps, named):
  stored, saved = [{'attack': 'APGD', 'levels': 1, 'images': 20, 'steps': 3}], []
  with pytest.raises(UserError, match=f'of APGD are for 20 images with 3 steps, not for {named} steps'):
    attack_study.measure(made(), stored, saved.append, images, {'APGD': steps, 'Square': 4})
  assert not saved


@pytest.mark.slow
def test_table_and_picture_of_outliers(row, tmp_path):
  few = {name: {'softmax': found['softmax']} for name, found in row['scores'].items()}
  rows = [row | {'run': 'a'}, row | {'run': 'b', 'model': 'vit', 'scores': few}]
  lines = outlier_report.table({'rows': rows}).splitlines()
  assert 'noise: AUROC, %' in lines[0] and sum('| ViT' in line for line in lines) == 1
  assert 'One seed' in lines[-1]
  outlier_report.draw({'rows': rows}, tmp_path / 'outliers.png')
  assert (tmp_path / 'outliers.png').stat().st_size > 10_000


def test_table_and_picture_of_attacks(tmp_path):
  def attacked(model, wrong, attack, levels, count):
    fooled = '1' + '01' * wrong + '0' * (count - 1 - 2 * wrong)
    about = {'run': model, 'model': model, 'attack': attack, 'levels': levels, 'images': count, 'steps': 9}
    return about | {'right': count - 1, 'fooled': fooled, 'queries': 100, 'median_queries': 5.0}

  attacks = (('APGD', 1, 40), ('APGD', 8, 40), ('Square', 1, 40))
  rows = [attacked(*model, *attack) for model in (('hyperbf', 3), ('vit', 5)) for attack in attacks]
  shown = attack_report.table({'rows': rows})
  assert '90.0 (76.9–96.0)' in shown
  assert 'ViT − HyperBF after APGD at 1/255: -5.0 (' in shown and 'right of 40 after APGD' in shown
  with pytest.raises(UserError, match='vit was not measured under APGD at 8/255: measure again'):
    attack_report.table({'rows': rows[:4]})  # as after an interruption
  attack_report.draw({'rows': rows}, tmp_path / 'attacks.png')
  assert (tmp_path / 'attacks.png').stat().st_size > 10_000


def test_attacks_are_joined_by_run_and_not_by_their_order():
  about = {'model': 'vit', 'levels': 1, 'images': 4, 'right': 4, 'steps': 9, 'queries': 9, 'median_queries': 5.0}
  fooled = {'a': '0011', 'b': '1100'}  # the same images after both attacks
  apgd, square = (
    [about | {'run': run, 'attack': attack, 'fooled': of_run} for run, of_run in fooled.items()]
    for attack in ('APGD', 'Square')
  )
  shown = attack_report.table({'rows': [*apgd, *square]})
  assert shown == attack_report.table({'rows': [*apgd, *reversed(square)]})
  assert '| 0 ' in shown  # no image is fooled by Square alone
  with pytest.raises(UserError, match=r'b was not measured under Square at 1/255: measure again'):
    attack_report.table({'rows': [*apgd, square[0]]})


@pytest.mark.parametrize(
  ('flag', 'said'),
  [
    ('--images=1', "argument --images: '1'; expected a whole number, at least 2"),
    ('--apgd_steps=0', "argument --apgd_steps: '0'; expected a whole number, at least 1"),
    ('--square_steps=-5', "argument --square_steps: '-5'; expected a whole number, at least 1"),
    ('--apgd_steps=few', "argument --apgd_steps: 'few'; expected a whole number, at least 1"),
  ],
)
def test_attacks_of_no_size_are_refused(flag, said, capsys):
  assert attack_study.main([flag, '--run=nowhere']) == 1
  assert f'error: {said}' in capsys.readouterr().err


def test_the_note_on_intervals_fits_the_numbers_of_seeds():
  assert 'say nothing about other seeds' in about_intervals([1, 1])
  assert about_intervals([2, 2]) == 'Means of 2 seeds of each network. Intervals are over images alone.'
  assert about_intervals([1, 2]) == 'Means of 1 to 2 seeds. Intervals are over images alone.'
  assert 'images alone for fewer than 3 seeds' in about_intervals([5, 1])
  assert about_intervals([5, 3]) == 'Means of 3 to 5 seeds. Intervals are over seeds and images.'


def test_the_logits_of_pixels_are_those_of_the_images(run, images):
  logits = attack_study.logits_of(run)(jnp.asarray(images, jnp.float32) / 255)
  np.testing.assert_allclose(jax.device_get(logits), run.logits(images), rtol=1e-4, atol=1e-4)
  assert energy_score(np.asarray(logits)).shape == (16,)
