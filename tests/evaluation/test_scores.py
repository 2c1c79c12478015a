"""Tests of counts and scores against naive definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hbf.evaluation.classification import BINS, Counts, detail, summarize


def batch(n=203, classes=7, seed=0):
  generator = np.random.default_rng(seed)
  logits = generator.normal(size=(n, classes)).astype(np.float32) * 3
  return logits, generator.integers(0, classes, n), generator.random(n) < 0.8


def softmax(logits):
  exponentials = np.exp(logits.astype(np.float64))
  return exponentials / exponentials.sum(axis=1, keepdims=True)


def counted(logits, labels, mask, parts=1):
  counts, add = Counts.zeros(logits.shape[1]), jax.jit(Counts.add)
  for x, y, m in zip(*(np.array_split(z, parts) for z in (logits, labels, mask)), strict=True):
    counts = add(counts, jnp.asarray(x), jnp.asarray(y), jnp.asarray(m))
  scores, details = summarize(counts), detail(counts)
  assert not scores.keys() & details.keys()  # a validation leaves out the details, which are long
  return scores | details


def test_scores_count_only_the_examples_that_the_mask_keeps():
  logits, labels, mask = batch()
  p, labels_kept = softmax(logits[mask]), labels[mask]
  predictions = p.argmax(axis=1)
  summary = counted(logits, labels, mask, parts=4)
  assert summary['n'] == mask.sum()
  assert summary['correct'] == (predictions == labels_kept).sum()
  assert summary['accuracy'] == pytest.approx(100 * (predictions == labels_kept).mean())
  best = np.argsort(-p, axis=1)[:, :5]
  assert summary['top5'] == pytest.approx(100 * (best == labels_kept[:, None]).any(axis=1).mean())
  assert summary['nll'] == pytest.approx(-np.log(p[np.arange(len(p)), labels_kept]).mean(), rel=1e-5)
  confusion = np.zeros((7, 7), int)
  np.add.at(confusion, (labels_kept, predictions), 1)
  assert summary['confusion'] == confusion.tolist()
  assert summary['per_class'] == pytest.approx(100 * np.diag(confusion) / confusion.sum(axis=1))


def test_calibration_error_is_the_weighted_gap_between_accuracy_and_confidence():
  logits, labels, mask = batch(seed=1)
  p = softmax(logits[mask])
  confidence, right = p.max(axis=1), p.argmax(axis=1) == labels[mask]
  error = 0.0
  for low in np.arange(BINS) / BINS:
    inside = (confidence > low) & (confidence <= low + 1 / BINS)
    if inside.any():
      error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
  assert counted(logits, labels, mask)['ece'] == pytest.approx(100 * error, rel=1e-4)


def test_top5_of_fewer_than_five_classes_is_everything():
  logits, labels, mask = batch(classes=3)
  assert counted(logits, labels, mask)['top5'] == 100


def test_a_class_without_examples_has_no_accuracy():
  logits, labels, mask = batch()
  assert counted(logits, np.zeros_like(labels), mask)['per_class'][1:] == [None] * 6


def test_sums_over_very_many_batches_lose_nothing():
  batches, logits = 200_000, jnp.asarray([[0.3, -0.1], [2.0, 0.5]])
  labels, mask = jnp.asarray([0, 1]), jnp.asarray([True, True])

  @jax.jit
  def count():
    step = lambda counts, _: (counts.add(logits, labels, mask), None)  # noqa: E731
    return jax.lax.scan(step, Counts.zeros(2), None, length=batches)[0]

  summary = summarize(count()) | detail(count())
  p = softmax(np.asarray(logits))
  assert summary['n'] == 2 * batches
  assert summary['nll'] == pytest.approx(
    -np.log(p[[0, 1], [0, 1]]).mean(), rel=3e-7
  )  # the rounding error of one batch
  found = sorted(row['confidence'] for row in summary['reliability'])
  assert found == pytest.approx(sorted(100 * p.max(axis=1)), rel=3e-7)


def test_the_confusion_of_very_many_classes_is_left_out():
  classes = 50_000
  counts = Counts.zeros(classes)
  assert sum(z.nbytes for z in jax.tree.leaves(counts)) < 10 * classes  # a matrix would have 10 GB
  labels = jnp.asarray([7, 7, classes - 1, 3])
  logits = jnp.zeros((4, classes)).at[jnp.arange(4), jnp.asarray([7, 0, classes - 1, 3])].set(1.0)
  counts = counts.add(logits, labels, jnp.asarray([True, True, True, False]))
  details = detail(counts)
  assert 'confusion' not in details and len(details['per_class']) == classes
  assert [details['per_class'][label] for label in (7, classes - 1, 3)] == [50.0, 100.0, None]
  assert (summarize(counts)['n'], summarize(counts)['correct']) == (3, 2)
