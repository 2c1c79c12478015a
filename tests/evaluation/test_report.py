"""Tests of tables for a terminal: nothing is cut off, values have units, and long tables are shortened."""

import io

import numpy as np
import pytest
from rich.console import Console

from hbf.evaluation.classification import BINS, Counts, detail
from hbf.evaluation.tables import MOST_CLASSES, print_classes, print_result


def printed(function, *arguments, width=20):
  text = io.StringIO()
  function(*arguments, Console(file=text, width=width))
  return text.getvalue()


def summary_of(confusion):
  """Return the details for a confusion matrix [label, prediction]."""
  of_classes = {'examples': confusion.sum(axis=1), 'correct': np.diag(confusion), 'confusion': confusion}
  return detail(Counts.zeros(len(confusion)).replace(**of_classes, bin_examples=np.zeros(BINS, np.int32)))


def test_nothing_is_cut_off_on_a_narrow_terminal():
  result = {
    'dataset': 'a set with a long name',
    'params': 123_456_789,
    'accuracy': 98.7654,
    'nll': 0.12345,
    'seed': 3,
  }
  shown = printed(print_result, result, 'runs/a folder with a long name/result.json')
  for whole in (
    'runs/a folder with a long name/result.json',
    result['dataset'],
    '123,456,789',
    '98.77 %',
    '0.123 nats',
  ):
    assert any(whole in line for line in shown.splitlines()), shown
  names = ['a class with a long name', 'another one']
  shown = printed(print_classes, summary_of(np.array([[70, 30], [0, 10_000]])), names)
  assert '| a class with a long name | 100   | 70.0%    | another one (30)' in shown
  assert '…' not in shown


@pytest.mark.parametrize('classes', [3, MOST_CLASSES, 200])
def test_of_many_classes_the_hardest_are_shown_and_the_rest_counted(classes):
  names = [f'class {i}' for i in range(classes)]
  right = np.random.default_rng(0).permutation(classes)
  confusion = np.diag(right)
  confusion[np.arange(classes), (np.arange(classes) + 1) % classes] += classes - right
  lines = printed(print_classes, summary_of(confusion), names).splitlines()
  shown = [line.split('|')[1].strip() for line in lines if line.startswith('| class ')]
  rows = [name for name in shown if name != 'class']
  assert len(lines) < 2 * MOST_CLASSES
  if classes <= MOST_CLASSES:
    assert rows == names
  else:
    assert rows == [names[i] for i in np.argsort(right)[:MOST_CLASSES]]
    assert f'the {MOST_CLASSES} of 200 classes' in lines[0]
