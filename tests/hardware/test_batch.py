"""Tests of the largest batch that fits, for programs with known memory."""

import pytest

from hbf.hardware.batch import largest_batch


def line(batch):
  return 1000 + 7 * batch


def steps(batch):
  """Return the memory that a batch needs. It grows in pages, and by a jump above 3,000 examples."""
  return 1000 + 64 * -(-7 * batch // 64) + (5000 if batch > 3000 else 0)


@pytest.mark.parametrize('needs', [line, steps])
@pytest.mark.parametrize('start', [8, 256, 100_000])
@pytest.mark.parametrize('memory', [2000, 20_000, 300_000])
def test_it_fits_and_a_little_more_does_not(needs, start, memory):
  tried = []

  def compiled(batch):
    tried.append(batch)
    return needs(batch)

  found = largest_batch(compiled, memory, unit=8, start=start, most=10**6)
  assert found % 8 == 0 and found in tried
  assert needs(found) <= memory < needs(max(int(1.04 * found), found + 16))
  assert len(tried) <= 8


def test_none_fits():
  assert largest_batch(line, 900, unit=8, start=256, most=10**6) is None


def test_a_batch_is_never_larger_than_the_data():
  assert largest_batch(line, 10**9, unit=8, start=256, most=1797) == 1792
