"""Tests of mixup and CutMix against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hbf.data.augment import pairs
from hbf.data.augment.pairs import beta, cutmix, mix, partners, read_mix

KEY = jax.random.key(2)
BOTH = read_mix((('mixup', 0.8, 0.4), ('cutmix', 1.0, 0.4)))
CLASSES = 5


def batch(size=64, seed=0):
  random = np.random.default_rng(seed)
  images = random.integers(0, 256, (size, 8, 6, 3), np.uint8)
  return images, jax.nn.one_hot(random.integers(0, CLASSES, size), CLASSES), 100 + random.permutation(size)


def mixed(images, targets, index, entries=BOTH):
  return [np.asarray(z) for z in jax.jit(lambda *a: mix(KEY, *a, entries))(images, targets, jnp.asarray(index))]


@pytest.mark.parametrize('alpha', [0.3, 0.8, 1.0, 4.0])
def test_shares_are_of_the_beta_distribution(alpha):
  found = jax.vmap(lambda key: beta(key, alpha))(jax.random.split(KEY, 4000))
  assert stats.kstest(np.asarray(found, np.float64), stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize('size', [2, 3, 64])
def test_partners_are_one_circle_of_all_that_does_not_depend_on_the_rows(size):
  index = np.random.default_rng(size).permutation(1000)[:size]
  found = np.asarray(partners(KEY, jnp.asarray(index)))
  row, seen = 0, set()
  for _ in range(size):
    seen.add(row)
    row = found[row]
  assert row == 0 and len(seen) == size
  order = np.random.default_rng(1).permutation(size)
  again = np.asarray(partners(KEY, jnp.asarray(index[order])))
  assert dict(zip(index[order], index[order][again], strict=True)) == dict(zip(index, index[found], strict=True))


def test_equal_numbers_do_not_bring_the_rows_in(monkeypatch):
  monkeypatch.setattr(jax.random, 'bits', lambda key: jnp.uint32(7))
  assert partners(KEY, jnp.array([5, 9, 3, 8])).tolist() == [3, 2, 0, 1]


def test_an_example_is_mixed_by_what_it_drew_with_its_partner():
  images, targets, index = batch()
  found, found_targets = mixed(images, targets, index)
  partner = np.asarray(partners(jax.random.split(KEY)[0], jnp.asarray(index)))
  kinds = {'none': 0, 'mixup': 0, 'cutmix': 0}
  for own, other, target, other_target, result, result_target in zip(
    images.astype(float), images[partner], targets, targets[partner], found, found_targets, strict=True
  ):
    share = ((result - other) * (own - other)).sum() / ((own - other) ** 2).sum()
    if (result == own).all():
      kind, share = 'none', 1.0
    elif np.allclose(result, share * own + (1 - share) * other, atol=1e-3):
      kind = 'mixup'
    else:
      kind = 'cutmix'
      from_own = (result == own).all(axis=-1)
      np.testing.assert_array_equal(result, np.where(from_own[..., None], own, other))
      share = from_own.mean()
    np.testing.assert_allclose(result_target, share * target + (1 - share) * other_target, atol=1e-4)
    kinds[kind] += 1
  assert 0.1 < kinds['mixup'] / 64 < 0.6 and 0.1 < kinds['cutmix'] / 64 < 0.6 and kinds['none'] > 5
  np.testing.assert_allclose(found_targets.sum(axis=1), 1, rtol=1e-6)


def naive_cutmix(height, width, share, row, column):
  """Return the box of `rand_bbox` by Yun et al. 2019 for a given center."""
  ratio = np.sqrt(1 - share)
  half_height, half_width = int(height * ratio) // 2, int(width * ratio) // 2
  weights = np.ones((height, width))
  weights[max(row - half_height, 0) : row + half_height, max(column - half_width, 0) : column + half_width] = 0
  return weights


def test_cutmix_cuts_the_papers_box():
  for seed, share in enumerate((0.0, 0.1, 0.5, 0.77, 0.99, 1.0)):
    key = jax.random.key(seed)
    row, column = map(int, jax.random.randint(key, (2,), 0, jnp.array([16, 12])))
    found = cutmix(key, (16, 12), jnp.float32(share))
    np.testing.assert_array_equal(found, naive_cutmix(16, 12, share, row, column))


def test_mixing_is_a_function_of_the_examples_not_of_their_rows_or_devices(sharding):
  images, targets, index = batch()
  whole = mixed(images, targets, index)
  order = np.random.default_rng(3).permutation(64)
  for found, expected in zip(mixed(images[order], targets[order], index[order]), whole, strict=True):
    np.testing.assert_array_equal(found, expected[order])
  sharded = jax.device_put((images, targets, index), sharding)
  for found, expected in zip(mixed(*sharded), whole, strict=True):
    np.testing.assert_array_equal(found, expected)


def test_steps_differ():
  images, targets, index = batch()
  a, b = (mix(jax.random.fold_in(KEY, step), images, targets, jnp.asarray(index), BOTH)[0] for step in (0, 1))
  assert (np.asarray(a) != np.asarray(b)).any()


def test_without_mixes_images_and_targets_stay_as_they_are():
  images, targets, index = batch()
  found, found_targets = pairs.mix(KEY, jnp.asarray(images), targets, index, ())
  np.testing.assert_array_equal(found, images)
  assert found_targets is targets
