"""Tests of image copies against airbench's definition in NumPy."""

import numpy as np
import pytest

from hbf.data.augment.copies import COPIES

IMAGES = np.random.default_rng(0).normal(size=(3, 5, 4, 2)).astype(np.float32)


def moved(down, right):
  """Return images that are moved by one pixel, with reflected borders."""
  padded = np.stack([np.pad(z, ((1, 1), (1, 1), (0, 0)), mode='reflect') for z in IMAGES])
  return padded[:, 1 - down : 6 - down, 1 - right : 5 - right]


@pytest.mark.parametrize(
  ('kind', 'kept', 'expected'),
  [
    ('mirror', 1 / 2, []),
    ('mirror_shift', 1 / 4, [(1 / 8, moved(1, 1)), (1 / 8, moved(-1, -1))]),
  ],
)
def test_copies_and_their_weights(kind, kept, expected):
  copies, weights = COPIES[kind](IMAGES)
  expected = [(kept, IMAGES), *expected]
  sides = [(weight, z[:, :, ::side]) for weight, z in expected for side in (1, -1)]
  assert weights.dtype == np.float32 and weights.sum() == 1
  np.testing.assert_array_equal(weights, [weight for weight, _ in sides])
  np.testing.assert_array_equal(copies, np.stack([z for _, z in sides]))
