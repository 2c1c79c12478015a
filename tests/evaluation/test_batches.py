"""Tests of functions that are applied in batches."""

import numpy as np
import pytest

from hbf.evaluation.batches import in_batches


@pytest.mark.parametrize('count', [1, 6, 7])
def test_all_batches_have_one_size_and_only_the_last_is_copied(count):
  examples, seen = np.arange(count * 2.0).reshape(count, 2), []

  def double(batch):
    seen.append(batch)
    return {'twice': 2 * batch}

  np.testing.assert_array_equal(in_batches(double, examples, 3)['twice'], 2 * examples)
  assert {len(batch) for batch in seen} == {3}
  assert [np.shares_memory(batch, examples) for batch in seen] == [(i + 1) * 3 <= count for i in range(len(seen))]
