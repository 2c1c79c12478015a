"""Tests of the similarity of two runs against definitions in float64."""

import types

import numpy as np
import pytest

from hbf.analysis.pair import alignment, cka, layers, matched, responses
from hbf.analysis.report import explain
from hbf.analysis.report.page import Drawing, MissingPart, PageTable, Section
from hbf.analysis.report.sections import pair

RANDOM = np.random.default_rng(0)


def test_cka_is_made_of_the_unbiased_hsic_of_song():
  n = 40
  x, y = RANDOM.normal(size=(n, 6)), RANDOM.normal(size=(n, 9)) + 3
  y[:, :6] += x

  def hsic(x, y):
    k, m, ones = x @ x.T, y @ y.T, np.ones(n)
    np.fill_diagonal(k, 0)
    np.fill_diagonal(m, 0)
    sums = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + sums - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))

  expected = hsic(x, y) / np.sqrt(hsic(x, x) * hsic(y, y))
  assert cka(x.astype(np.float32), y) == pytest.approx(expected, rel=1e-5)


def test_cka_knows_no_rotation_and_no_factor():
  x = RANDOM.normal(size=(50, 5))
  rotation = np.linalg.qr(RANDOM.normal(size=(5, 5)))[0]
  assert cka(x, 7 * x @ rotation + 2) == pytest.approx(1)
  assert cka(x, np.ones((50, 3))) == 0


def test_cka_of_what_has_nothing_in_common_is_0_even_with_few_examples():
  found = [cka(RANDOM.normal(size=(30, 300)), RANDOM.normal(size=(30, 300))) for _ in range(20)]
  assert abs(np.mean(found)) < 0.05 and np.std(found) < 0.1


def test_units_find_their_counterparts():
  x = RANDOM.normal(size=(300, 6))
  order = RANDOM.permutation(6)
  np.testing.assert_allclose(matched(x, 3 * x[:, order] + 1), np.ones(6))
  noisy = x[:, order] + RANDOM.normal(size=x.shape)
  assert matched(x, noisy).mean() == pytest.approx(2**-0.5, abs=0.05)
  assert len(matched(x, x[:, :4])) == 4
  assert matched(np.c_[x[:, 0], np.ones(300)], x[:, :2]).tolist()[1] == 0  # a constant unit is like none


def test_layers_of_a_run_are_those_of_itself(run, merged, images, made):
  here, there = layers(run, images), layers(merged, images)
  assert [z.shape for z in here] == [(16, 16)] * 3 and [z.shape for z in there] == [(16, 16), (16, 16), (16, 32)]
  assert alignment(here, there).shape == (3, 3)
  np.testing.assert_allclose(np.diag(alignment(here, here)), 1)
  assert matched(*(responses(run, images, 'block0'),) * 2).mean() == pytest.approx(1)
  assert responses(made('model=vit'), images, 'block0') is None


def test_another_order_of_classes_is_not_called_other_images():
  one, other = (types.SimpleNamespace(classes=classes) for classes in (('cat', 'dog'), ('dog', 'cat')))
  with pytest.raises(MissingPart, match='have different classes or another order of them'):
    pair.section(one, other)


@pytest.mark.parametrize('count', [1, 3])
def test_fewer_images_than_cka_needs_are_said(count):
  test = types.SimpleNamespace(images=np.zeros((count, 8, 8, 1)), labels=np.zeros(count, int))
  with pytest.raises(MissingPart, match=f'There are {count} test images, and CKA needs 4 or more'):
    pair.section(*[types.SimpleNamespace(classes=('cat', 'dog'), test=test)] * 2)


def test_runs_of_other_images_cannot_be_paired(run, made):
  other = made(**{'data.name': 'digits'}, seed=3)
  found = pair.section(run, other)
  assert found.numbers['agree'] <= 100 and found.numbers['cka_images'] == len(run.test.labels) < pair.IMAGES
  captions = [part.caption for part in found.parts if isinstance(part, Drawing)]
  assert f'of {len(run.test.labels)} test images' in captions[0]
  cka = [np.array(found.numbers[name]) for name in pair.CONTROLS]
  assert [z.shape for z in cka] == [(3, 3)] * 4 and found.numbers['kind'] == 'seeds'
  assert len({z[2, 2] for z in cka}) == 4
  rows = next(part.rows for part in found.parts if isinstance(part, PageTable))
  assert rows[2] == ('block1', *(f'{z[2, 2]:.2f}' for z in cka))
  total = sum(found.numbers[key] for key in ('both_wrong', 'only_first_right', 'only_other_right'))
  right = [(s.test_logits.argmax(1) == s.test.labels).mean() * 100 for s in (run, other)]
  ahead = found.numbers['ahead']
  assert right[0] - right[1] == pytest.approx(found.numbers['only_first_right'] - found.numbers['only_other_right'])
  assert right[0] - right[1] == pytest.approx(ahead['estimate']) and ahead['low'] < ahead['estimate'] < ahead['high']
  assert total <= 100
  other.test.labels[:] = 0
  object.__setattr__(other, 'test', other.test._replace(images=other.test.images[:5]))
  with pytest.raises(MissingPart, match='different test images'):
    pair.section(run, other)


def test_each_of_two_runs_gets_outside_images_in_its_own_shape(monkeypatch):
  def compared(one, other):
    raise MissingPart('The two runs have different test images.')

  def section(run, outside):
    return Section('outliers', '', [], {'shape': outside['noise'].shape[1:]})

  def run_of(shape):
    task, workdir = types.SimpleNamespace(shape=shape), types.SimpleNamespace(name='run')
    return types.SimpleNamespace(task=task, workdir=workdir, read=lambda split, most: None)

  monkeypatch.setattr(explain, 'TITLES', {'outliers': ''})
  monkeypatch.setattr(explain.pair, 'section', compared)
  monkeypatch.setattr(explain.outliers, 'section', section)
  count, sections = explain.explain(run_of((4, 4, 1)), run_of((8, 8, 3)), [])
  _, outliers = sections
  assert count == 2 and outliers.numbers == {'first': {'shape': (4, 4, 1)}, 'other': {'shape': (8, 8, 3)}}
