"""Tests of the scores of labels and values against scikit-learn in float64."""

import numpy as np
import pytest
from sklearn import metrics

from hbf.evaluation import multi_label, regression


def drawn(n=61, k=4, seed=0):
  """Return labels and logits. Logits are rounded, so that some are equal. The last label has no image."""
  generator = np.random.default_rng(seed)
  labels = (generator.random((n, k)) < 0.4).astype(np.uint8)
  labels[:, -1] = 0
  return labels, np.round(generator.normal(size=(n, k)) + labels, 1).astype(np.float32)


def test_scores_of_labels_are_those_of_scikit_learn():
  labels, logits = drawn()
  found, details = multi_label.summarize(labels, logits), multi_label.detail(labels, logits, 'abcd')['per_label']
  each = metrics.average_precision_score(labels[:, :3], logits[:, :3], average=None)
  predicted = logits > 0
  assert found['map'] == pytest.approx(100 * each.mean())
  assert [details[name]['average_precision'] for name in 'abc'] == pytest.approx(100 * each)
  assert details['d']['average_precision'] is None
  assert found['f1'] == pytest.approx(100 * metrics.f1_score(labels, predicted, average='macro', zero_division=0))
  assert found['exact_match'] == pytest.approx(100 * metrics.accuracy_score(labels, predicted))
  assert found['correct'] == round(found['exact_match'] * found['n'] / 100)
  assert found['label_accuracy'] == pytest.approx(100 * (1 - metrics.hamming_loss(labels, predicted)))
  p = 1 / (1 + np.exp(-logits.astype(np.float64)))
  assert found['nll'] == pytest.approx(
    np.mean([metrics.log_loss(labels[:, k], p[:, k], labels=[0, 1]) for k in range(4)])
  )
  for k, name in enumerate('abcd'):
    for score in (metrics.precision_score, metrics.recall_score):
      expected = 100 * score(labels[:, k], predicted[:, k], zero_division=0)
      assert details[name][score.__name__.removesuffix('_score')] == pytest.approx(expected)


def test_large_logits_give_a_finite_likelihood():
  assert multi_label.summarize(np.array([[1, 0]]), np.array([[-2000.0, 2000.0]]))['nll'] == 2000


def weighted_derivative(score, n, step=1e-6):
  """Return n times the derivative of a score with respect to each example's weight at weights 1, [n]."""
  ones = np.ones(n)
  return np.array([n * (score(ones + step * one) - score(ones - step * one)) / (2 * step) for one in np.eye(n)])


def test_terms_of_images_are_the_score_plus_its_derivative():
  """The derivative is that of scikit-learn's weighted scores."""
  labels, logits = drawn(k=2)
  found = multi_label.average_precision_terms(labels[:, 0].astype(bool), logits[:, 0])
  change = weighted_derivative(
    lambda w: metrics.average_precision_score(labels[:, 0], logits[:, 0], sample_weight=w), len(labels)
  )
  average = metrics.average_precision_score(labels[:, 0], logits[:, 0])
  assert found.mean() == pytest.approx(average, rel=1e-12)
  np.testing.assert_allclose(found, average + change, atol=1e-6)

  targets, predictions = np.random.default_rng(1).normal(size=(2, 23, 3)).cumsum(axis=0)
  found = regression.determination_terms(targets, predictions)
  change = weighted_derivative(lambda w: metrics.r2_score(targets, predictions, sample_weight=w), 23)
  assert found.mean() == pytest.approx(metrics.r2_score(targets, predictions), rel=1e-12)
  np.testing.assert_allclose(found, metrics.r2_score(targets, predictions) + change, atol=1e-6)


def test_scores_of_values_are_those_of_scikit_learn():
  targets, predictions = (z.astype(np.float32) for z in np.random.default_rng(0).normal(size=(2, 40, 3)))
  targets[:, 1:], predictions[:, 1] = 5, 5  # two constant targets: one is predicted exactly, one is not
  found, details = regression.summarize(targets, predictions), regression.detail(targets, predictions, 'abc')
  wide = targets.astype(np.float64), predictions.astype(np.float64)
  functions = {
    'r2': metrics.r2_score,
    'rmse': metrics.root_mean_squared_error,
    'mae': metrics.mean_absolute_error,
  }
  for name, function in functions.items():
    assert found[name] == pytest.approx(function(*wide))
    each = [details['per_target'][target][name] for target in 'abc']
    assert each == pytest.approx(function(*wide, multioutput='raw_values'))
