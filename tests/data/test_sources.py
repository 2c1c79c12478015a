import pickle

import numpy as np
import pytest

from hbf.data.sources import Subset, hold_out
from hbf.errors import UserError


def test_hold_out_is_disjoint_and_complete(make_source):
  train, validation = hold_out(make_source(101), 0.2)
  assert len(validation) == 20
  np.testing.assert_array_equal(np.sort(np.concatenate([train.indices, validation.indices])), np.arange(101))


def test_hold_out_is_fixed_and_looks_random(make_source):
  first, second = hold_out(make_source(100, seed=0), 0.2), hold_out(make_source(100, seed=1), 0.2)
  np.testing.assert_array_equal(first[1].indices, second[1].indices)
  assert 30 < first[1].indices.mean() < 70
  assert len(set(np.diff(first[1].indices))) > 3


def test_hold_out_nothing(make_source):
  train, validation = hold_out(make_source(10), 0)
  assert len(validation) == 0
  np.testing.assert_array_equal(train.indices, np.arange(10))


@pytest.mark.parametrize('fraction', [-0.1, 1.0, 2.0])
def test_hold_out_refuses_other_fractions(make_source, fraction):
  with pytest.raises(UserError, match=rf'{fraction}.*below 1'):
    hold_out(make_source(10), fraction)


def test_subset_reads_the_chosen_examples(make_source):
  source = make_source(10)
  subset = pickle.loads(pickle.dumps(Subset(source, np.array([7, 2]))))
  assert len(subset) == 2
  for row, index in enumerate((7, 2)):
    np.testing.assert_array_equal(subset[row][0], source[index][0])
    assert subset[row][1] == source[index][1]
