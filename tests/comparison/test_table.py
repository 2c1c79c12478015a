"""Tables of runs whose figures are known: what they say, and what they don't."""

import json
import re

import numpy as np
import pytest

from hbf.comparison.compare import report
from hbf.comparison.grid import Arm, Grid
from hbf.comparison.table import markdown, read_rows
from hbf.training.workdir import write_json, write_predictions

EXAMPLES = 200


@pytest.fixture
def finish(tmp_path):
  """Writes what a finished run leaves; its figures follow from its seed."""

  def write(arm, seed, held_out=()):
    run, random = tmp_path / arm.run(seed), np.random.default_rng([seed, len(arm.label)])
    run.mkdir()
    labels = np.arange(EXAMPLES) % 10
    predictions = np.where(random.random(EXAMPLES) < 0.6, labels, 9 - labels)
    write_predictions(run, {'labels': labels, 'predictions': predictions})
    about = {'recipe': 'small', 'epochs': 2.0, 'device': 'a cpu', 'params': 1000, 'flops_per_image': 1e6}
    about |= {'train_seconds': 60.0, 'images_per_second': 100.0, 'peak_memory_bytes': 10**9}
    write_json(run / 'result.json', about | {'accuracy': 100 * float((labels == predictions).mean())})
    log(arm, seed, held_out)

  def log(arm, seed, held_out):
    run = tmp_path / arm.run(seed)
    run.mkdir(exist_ok=True)
    lines = [{'step': 1, 'epoch': 1.0, 'split': 'train', 'loss': 2.0, 'accuracy': 99.0}]
    lines += [{'step': 1, 'epoch': 1.0, 'split': 'validation', **figures} for figures in held_out]
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))

  write.log = log
  return write


def grid_of(*labels, seeds=(0, 1)):
  return Grid(tuple(Arm('cifar10', label, ()) for label in labels), seeds)


@pytest.mark.parametrize('arms', [2, 6, 18])
def test_with_many_intervals_the_table_says_how_many_miss_by_chance(finish, tmp_path, arms):
  grid = grid_of(*(f'{"a" * i}' for i in range(1, 1 + arms)))
  for arm, seed in grid.runs():
    finish(arm, seed)
  text = markdown(read_rows(grid, tmp_path))
  shown = len(re.findall(r'[+-]\d+\.\d\d … [+-]\d', text))
  assert shown == 2 * (arms - 1)
  expected = re.search(r'One such interval in 20 misses by chance, of these (\d+) so about (\d+)\.', text)
  assert (expected is not None) == (shown >= 10)
  if expected:
    assert int(expected[1]) == shown
    assert abs(int(expected[2]) - 0.05 * shown) <= 0.5


def test_of_one_seed_nothing_is_said_about_others(finish, tmp_path):
  grid = grid_of('one', 'three', 'other')
  for arm, seed in grid.runs():
    if (arm.label, seed) != ('three', 1):
      finish(arm, seed)
  text = markdown(read_rows(grid, tmp_path))
  (row,) = [line for line in text.splitlines() if line.startswith('| three')]
  cells = [cell.strip() for cell in row.strip('|').split('|')]
  assert (cells[3], cells[6]) == ('1', '')
  assert re.fullmatch(r'\*\*\d+\.\d\d\*\*', cells[4])  # no deviation
  assert 'nothing is said of others' in text
  finish(grid.arms[1], 1)
  assert 'nothing is said of others' not in markdown(read_rows(grid, tmp_path))


def test_a_difference_over_fewer_seeds_than_a_mean_says_so(finish, tmp_path):
  grid = grid_of('vit', 'hyperbf')
  first, second = grid.arms
  for arm, seed in [(first, 0), (second, 0), (second, 1)]:
    finish(arm, seed)
  said = 'A difference counts the seeds that both arms have'
  assert said in markdown(read_rows(grid, tmp_path))
  finish(first, 1)
  assert said not in markdown(read_rows(grid, tmp_path))


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
