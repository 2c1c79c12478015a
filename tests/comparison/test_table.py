"""Tests of the tables of runs with known scores."""

import json
import re

import numpy as np
import pytest

from hbf.comparison.compare import report
from hbf.comparison.grid import Arm, Grid
from hbf.comparison.pack import pack
from hbf.comparison.table import markdown, read_rows
from hbf.errors import UserError
from hbf.training.workdir import write_json, write_predictions

EXAMPLES = 200


@pytest.fixture
def finish(tmp_path):
  """Return a function that writes the files of a finished run. Its numbers follow from its seed."""

  def write(arm, seed, held_out=()):
    run, random = tmp_path / arm.run_name(seed), np.random.default_rng([seed, len(arm.label)])
    run.mkdir()
    labels = np.arange(EXAMPLES) % 10
    predictions = np.where(random.random(EXAMPLES) < 0.6, labels, 9 - labels)
    write_predictions(run, {'labels': labels, 'predictions': predictions})
    about = {'recipe': 'small', 'epochs': 2.0, 'device': 'a cpu', 'params': 1000, 'flops_per_image': 1e6}
    about |= {'train_seconds': 60.0, 'images_per_second': 100.0, 'peak_memory_bytes': 10**9}
    write_json(run / 'result.json', about | {'accuracy': 100 * float((labels == predictions).mean())})
    log(arm, seed, held_out)

  def log(arm, seed, held_out):
    run = tmp_path / arm.run_name(seed)
    run.mkdir(exist_ok=True)
    lines = [{'step': 1, 'epoch': 1.0, 'split': 'train', 'loss': 2.0, 'accuracy': 99.0}]
    lines += [{'step': 1, 'epoch': 1.0, 'split': 'validation', **scores} for scores in held_out]
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))

  write.log = log
  return write


def grid_of(*labels, seeds=(0, 1)):
  return Grid(tuple(Arm('cifar10', label, ()) for label in labels), seeds)


def shown_by(grid, workdir):
  """Return the table's text, and its cells by the row's label and by column."""
  text = markdown(read_rows(grid, workdir))
  lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line[:1] == '|']
  return text, {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}


def test_a_table_says_what_its_intervals_cover(finish, tmp_path):
  grid = grid_of('one', 'three', 'other', seeds=(0, 1, 2))
  for arm, seed in grid.runs()[:6]:
    finish(arm, seed)
  text, cells = shown_by(grid, tmp_path)
  assert 'over test images alone. They are simultaneous: in 95% of comparisons, both contain' in text
  assert 'nothing is said about other seeds' in text
  assert re.fullmatch(r'[+-].* … [+-][\d.]+', cells['three']['95% interval'])
  for arm in grid.arms[:2]:
    finish(arm, 2)
  text, cells = shown_by(grid, tmp_path)
  assert 'over test images and seeds' in text and 'its interval is over the images alone' in text
  assert cells['other']['95% interval'].endswith(' (images)')
  assert not cells['three']['95% interval'].endswith(')')
  finish(grid.arms[2], 2)
  text, cells = shown_by(grid, tmp_path)
  assert 'alone' not in text and not cells['other']['95% interval'].endswith(')')


def test_a_difference_is_that_of_the_means_whatever_their_seeds(finish, tmp_path):
  grid = grid_of('vit', 'hyperbf')
  first, second = grid.arms
  for arm, seed in [(first, 0), (second, 0), (second, 1)]:
    finish(arm, seed)
  vit, hyperbf = read_rows(grid, tmp_path)
  assert hyperbf.difference.estimate == pytest.approx(hyperbf.mean - vit.mean)
  _, cells = shown_by(grid, tmp_path)
  assert (cells['vit']['seeds'], cells['hyperbf']['seeds']) == ('1', '2')
  assert re.fullmatch(r'\*\*\d+\.\d\d\*\*', cells['vit']['accuracy, % (sd)'])  # no deviation


def test_tables_of_accuracy_have_no_times(finish, tmp_path):
  grid = grid_of('vit', 'hyperbf')
  for arm, seed in grid.runs():
    finish(arm, seed)
  _, cells = shown_by(grid, tmp_path)
  expected = ['model', 'parameters', 'MFLOP', 'seeds', 'accuracy, % (sd)', 'difference', '95% interval']
  assert list(cells['vit']) == expected  # times mean little, because runs share their machine


def test_runs_on_other_images_are_not_compared(finish, tmp_path):
  grid = grid_of('vit', 'hyperbf', 'gone', 'late')
  for arm, seed in grid.runs():
    if arm.label != 'late':
      finish(arm, seed)
  labels = np.arange(EXAMPLES) % 5
  write_predictions(tmp_path / grid.arms[1].run_name(1), {'labels': labels, 'predictions': labels})
  (tmp_path / grid.arms[2].run_name(0) / 'predictions.npz').unlink()
  assert [row.difference for row in read_rows(grid, tmp_path)] == [None] * 4
  said = 'hyperbf is not compared: its test examples are others. gone is not compared: a run has no predictions.npz.'
  assert said in shown_by(grid, tmp_path)[0].splitlines()
  finish_again = grid_of('vit', 'gone', 'hyperbf')
  write_predictions(tmp_path / grid.arms[2].run_name(0), {'labels': np.arange(EXAMPLES) % 10, 'predictions': labels})
  assert [row.difference is None for row in read_rows(finish_again, tmp_path)] == [True, False, True]


def test_a_text_whose_scores_overflow_is_not_compared_and_the_others_are(tmp_path):
  grid = Grid(tuple(Arm('shakespeare', label, (), task='next_token') for label in ('gpt', 'wild', 'hyperbf')), (0,))
  for number, (arm, seed) in enumerate(grid.runs()):
    nll = np.full(40, np.inf if arm.label == 'wild' else 50.0 + number)
    (tmp_path / arm.run_name(seed)).mkdir()
    write_predictions(tmp_path / arm.run_name(seed), {'tokens': np.full(40, 25), 'correct': nll, 'nll': nll})
    about = {'recipe': 'small', 'epochs': 2.0, 'device': 'a cpu', 'params': 1000, 'flops_per_token': 1e6}
    write_json(tmp_path / arm.run_name(seed) / 'result.json', about | {'token_nll': float(nll.mean()) / 25})
  text, cells = shown_by(grid, tmp_path)
  assert cells['wild']['difference'] == '' and cells['hyperbf']['difference'] == '+0.0800'
  assert 'wild is not compared: a run has scores that are not finite.' in text


def test_operations_are_the_mean_over_the_seeds(finish, tmp_path):
  """Runs with `train.patience` end after different numbers of steps."""
  grid = grid_of('vit')
  for seed, operations in zip(grid.seeds, (1e12, 3e12), strict=True):
    finish(grid.arms[0], seed)
    path = tmp_path / grid.arms[0].run_name(seed) / 'result.json'
    write_json(path, json.loads(path.read_text()) | {'train_operations': operations})
  assert shown_by(grid, tmp_path)[1]['vit']['training operations'] == '2.00e12'


def test_a_report_of_held_out_images_is_refused_if_there_were_none(finish, tmp_path):
  grid = grid_of('vit')
  grid.save(tmp_path)
  finish(grid.arms[0], 0)
  with pytest.raises(UserError, match=r'held out no examples: train with --config\.data\.validation=0\.1'):
    report(tmp_path, 'validation')


@pytest.mark.parametrize('packed', [False, True])
def test_predictions_without_an_array_are_refused_by_name(finish, tmp_path, packed):
  grid = grid_of('vit', 'hyperbf')
  for arm, seed in grid.runs():
    finish(arm, seed)
  write_predictions(tmp_path / grid.arms[1].run_name(1), {'labels': np.arange(EXAMPLES) % 10})
  if packed:
    grid.save(tmp_path)
    pack(tmp_path, tmp_path / 'packed')
  with pytest.raises(UserError, match=f'{grid.arms[1].run_name(1)}.* is damaged .it lacks the array predictions'):
    read_rows(grid, tmp_path / 'packed' if packed else tmp_path)


def test_the_report_of_held_out_images_has_the_last_figures_of_finished_runs(finish, tmp_path, capsys):
  grid = grid_of('slow', 'fast', 'idle')
  random = np.random.default_rng(0)
  names = ('accuracy', 'top5', 'nll', 'ece')
  reported = {}
  for arm, seed in grid.runs():
    reported[arm.label, seed] = [dict(zip(names, 50 + 10 * random.random(4), strict=True)) for _ in range(3)]
    if arm.label == 'idle':
      finish.log(arm, seed, reported[arm.label, seed])  # still at work
    else:
      finish(arm, seed, reported[arm.label, seed])
  grid.save(tmp_path)
  before = sorted(path.name for path in tmp_path.rglob('*'))
  report(tmp_path, 'validation')
  assert sorted(path.name for path in tmp_path.rglob('*')) == before
  lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in capsys.readouterr().out.splitlines()]
  shown = {cells[0]: cells[1:] for cells in lines}
  assert shown['model'] == ['seeds', 'accuracy, % (sd)', 'top5, % (sd)', 'nll, nats (sd)', 'ece, % (sd)']
  assert shown['idle'] == ['0', '–', '–', '–', '–']
  means = {}
  for label in ('slow', 'fast'):
    ends = [[reported[label, seed][-1][name] for name in names] for seed in grid.seeds]
    numbers = [list(map(float, re.findall(r'\d+\.\d+', cell))) for cell in shown[label][1:]]
    np.testing.assert_allclose(np.transpose(numbers), [np.mean(ends, 0), np.std(ends, 0, ddof=1)], atol=0.005)
    means[label] = numbers[0][0]
  best = max(means, key=means.get)
  assert [label for label in means if shown[label][1].startswith('**')] == [best]
