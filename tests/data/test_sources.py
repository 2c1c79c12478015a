import dataclasses
import pickle

import numpy as np
import pytest

from hbf.data.datasets import load
from hbf.data.images import codec, sources
from hbf.data.images.sources import Subset, hold_out
from hbf.errors import UserError


def test_hold_out_is_disjoint_and_complete(make_source):
  train, validation = hold_out(make_source(101), 0.2, stratify=False)
  assert len(validation) == 20
  np.testing.assert_array_equal(np.sort(np.concatenate([train.indices, validation.indices])), np.arange(101))


def test_hold_out_is_fixed_and_looks_random(make_source):
  first, second = (hold_out(make_source(100, seed=seed), 0.2, stratify=False) for seed in (0, 1))
  np.testing.assert_array_equal(first[1].indices, second[1].indices)
  assert 30 < first[1].indices.mean() < 70
  assert len(set(np.diff(first[1].indices))) > 3


def test_hold_out_nothing(make_source):
  train, validation = hold_out(make_source(10), 0, stratify=False)
  assert len(validation) == 0
  np.testing.assert_array_equal(train.indices, np.arange(10))


def test_labels_of_prepared_data_are_read_without_their_images(digits_dir, monkeypatch):
  train = load(name='digits', dir=str(digits_dir), root='', image_size=0, download=False).splits['train']
  expected = [label for _, label in train.read(np.arange(len(train)))]
  monkeypatch.setattr(codec, 'decode', None)
  np.testing.assert_array_equal(sources.labels(train), expected)


def test_every_class_has_its_part_held_out(make_source):
  labels = np.repeat([3, 0, 1, 2], [7, 100, 51, 42])  # rare and frequent
  source = dataclasses.replace(make_source(200), labels=labels)
  train, validation = hold_out(source, 0.1, stratify=True)
  np.testing.assert_array_equal(np.sort(np.concatenate([train.indices, validation.indices])), np.arange(200))
  held = np.bincount(labels[validation.indices], minlength=4)
  assert held.sum() == 20 and held[0] == 10 and all(abs(held - np.bincount(labels) / 10) < 1)
  assert len(set(np.diff(validation.indices))) > 3
  again = hold_out(source, 0.1, stratify=True)[1].indices
  np.testing.assert_array_equal(validation.indices, again)


def test_without_stratification_the_classes_make_no_difference(make_source):
  """Older runs hold out the same examples as before."""
  validation = hold_out(make_source(1000), 0.01, stratify=False)[1]
  np.testing.assert_array_equal(validation.indices, [166, 348, 431, 609, 650, 789, 797, 819, 833, 850])


@pytest.mark.parametrize('fraction', [-0.1, 1.0, 2.0])
def test_hold_out_refuses_other_fractions(make_source, fraction):
  with pytest.raises(UserError, match=rf'{fraction}.*below 1'):
    hold_out(make_source(10), fraction, stratify=False)


def test_subset_reads_the_chosen_examples(make_source):
  source = make_source(10)
  subset = pickle.loads(pickle.dumps(Subset(source, np.array([7, 2]))))
  assert len(subset) == 2
  for row, index in enumerate((7, 2)):
    np.testing.assert_array_equal(subset[row][0], source[index][0])
    assert subset[row][1] == source[index][1]
