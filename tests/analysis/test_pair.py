"""How alike two runs are, against definitions in float64."""

import numpy as np
import pytest

from hbf.analysis.page import Lacks
from hbf.analysis.pair import alignment, cka, layers, matched, responses
from hbf.analysis.sections import pair

RANDOM = np.random.default_rng(0)


def test_cka_is_that_of_centred_kernels():
  x, y = RANDOM.normal(size=(40, 6)), RANDOM.normal(size=(40, 9)) + 3
  y[:, :6] += x
  h = np.eye(40) - 1 / 40
  k, m = h @ x @ x.T @ h, h @ y @ y.T @ h
  expected = np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m))
  assert cka(x.astype(np.float32), y) == pytest.approx(expected, rel=1e-5)


def test_cka_knows_no_rotation_and_no_factor():
  x = RANDOM.normal(size=(50, 5))
  rotation = np.linalg.qr(RANDOM.normal(size=(5, 5)))[0]
  assert cka(x, 7 * x @ rotation + 2) == pytest.approx(1)
  assert cka(RANDOM.normal(size=(4000, 5)), RANDOM.normal(size=(4000, 5))) < 0.02


def test_units_find_their_counterparts():
  x = RANDOM.normal(size=(300, 6))
  order = RANDOM.permutation(6)
  np.testing.assert_allclose(matched(x, 3 * x[:, order] + 1), np.ones(6))
  noisy = x[:, order] + RANDOM.normal(size=x.shape)
  assert matched(x, noisy).mean() == pytest.approx(2**-0.5, abs=0.05)
  assert len(matched(x, x[:, :4])) == 4
  assert matched(np.c_[x[:, 0], np.ones(300)], x[:, :2]).tolist()[1] == 0  # a constant unit is like none


def test_layers_of_a_run_are_those_of_itself(subject, images, made):
  here = layers(subject, images)
  assert here.shape == (3, 16, 16)
  np.testing.assert_allclose(np.diag(alignment(here, here)), 1)
  assert matched(*(responses(subject, images, 'block0'),) * 2).mean() == pytest.approx(1)
  assert responses(made('model=vit'), images, 'block0') is None


def test_runs_of_other_images_cannot_be_paired(subject, made):
  other = made(**{'data.name': 'digits'}, seed=3)
  found = pair.section(subject, other)
  assert found.numbers['agree'] <= 100 and len(found.numbers['cka']) == 3
  total = sum(found.numbers[key] for key in ('both_wrong', 'only_first_right', 'only_other_right'))
  right = [(s.test_logits.argmax(1) == s.test.labels).mean() * 100 for s in (subject, other)]
  assert right[0] - right[1] == pytest.approx(found.numbers['only_first_right'] - found.numbers['only_other_right'])
  assert total <= 100
  other.test.labels[:] = 0
  object.__setattr__(other, 'test', other.test._replace(images=other.test.images[:5]))
  with pytest.raises(Lacks, match='other test images'):
    pair.section(subject, other)
