"""The section of the page of a run on other seeds of its network."""

import json
import shutil

import numpy as np
import pytest
from scipy import stats

from hbf.analysis.report.page import Paragraph
from hbf.analysis.report.sections.seeds import SeedRun, quantities, read_seed_runs, section
from hbf.errors import UserError


def page_of(accuracy, images=60, loss=0.1):
  """The numbers of a page, as far as the section reads them."""
  effect = {'loss': {'mean': loss, 'half': 0.01}, 'accuracy': {'mean': -1.0, 'half': 0.1}}
  faults = {'dead': 1, 'constant': 0, 'low_share': 2, 'doubled': 0}
  return {
    'run': {'evaluated': 'parameters', 'accuracy': accuracy},
    'interventions': {
      'images': images,
      'silenced': {'3': effect, '5': {'loss': {'mean': 3 * loss, 'half': 0.0}}},
      'area': {'votes': {'mean': 0.2, 'half': 0.0}, 'random': {'mean': 0.5, 'half': 0.0}},
      'area_below_random': {'votes': {'mean': 0.3, 'half': 0.0}},
      'controls': {'all moved, draw 1': effect, 'all moved, draw 2': {'loss': {'mean': 0.3, 'half': 0.0}}},
    },
    'relevance': {'lacks': 'It has none.'},
    'centers': {'block0': faults, 'block1': faults, 'images': 100},
  }


@pytest.fixture
def made(finished, tmp_path):
  """Make a run folder of a seed, with the numbers of its page if they are given."""

  def make(seed, numbers=None, width=None):
    folder = tmp_path / f'run-{seed}-{width}'
    folder.mkdir()
    for name in ('config.json', 'data.json'):
      shutil.copy(finished[0] / name, folder)
    config = json.loads((folder / 'config.json').read_text()) | {'seed': seed}
    config['model']['width'] = width or config['model']['width']
    (folder / 'config.json').write_text(json.dumps(config))
    if numbers:
      (folder / 'explain.json').write_text(json.dumps(numbers))
    return folder

  return make


def test_the_quantities_of_a_page():
  assert quantities(page_of(90.0)) == pytest.approx(
    {
      'test accuracy, %': 90,
      'area below the curve, votes first': 0.2,
      'area below the curve, units at random': 0.5,
      'area for random order minus area for votes': 0.3,
      'change of the loss without one unit, greatest': 0.3,
      'change of the loss without one unit, mean of those tried': 0.2,
      'change of the loss, all moved': 0.2,
      'dead centers, all blocks': 2,
      'constant centers, all blocks': 0,
      'low-share centers, all blocks': 4,
      'doubled centers, all blocks': 0,
    }
  )
  text = {'run': {'token_nll': 1.8}, 'interventions': {'silenced': {'1': {'mean': 0.01, 'half': 0.0}}}}
  assert [*quantities(text).values()] == [1.8, 0.01, 0.01]


def test_means_and_spreads_over_seeds(made):
  values = [90.0, 91.0, 89.5]
  runs = [SeedRun(made(seed), page_of(value)) for seed, value in enumerate(values)]
  found = section(runs)
  of_accuracy = found.numbers['values']['test accuracy, %']
  assert of_accuracy['each'] == values and found.numbers['seeds'] == [0, 1, 2]
  assert (of_accuracy['mean'], of_accuracy['deviation']) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
  low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
  assert 2 * of_accuracy['half'] == pytest.approx(high - low)
  (table,) = found.parts
  assert table.rows[0] == ['test accuracy, %', '90.2', '0.8', '± 1.9', '90.0', '91.0', '89.5']
  assert section(runs[:2]).numbers['values']['test accuracy, %']['half'] is None
  assert json.loads(json.dumps(found.numbers)) == found.numbers


def test_a_section_with_other_images_is_left_out(made):
  found = section([SeedRun(made(0), page_of(90.0)), SeedRun(made(1), page_of(91.0, images=30))])
  assert 'test accuracy, %' in found.numbers['values']
  assert not [name for name in found.numbers['values'] if name.startswith('area')]
  assert isinstance(found.parts[-1], Paragraph) and 'interventions' in found.parts[-1].text


def test_checkpoints_of_different_steps_are_named(made):
  folders = [made(0), made(1)]

  def paragraphs(*steps):
    pages = [page_of(90.0), page_of(91.0)]
    for page, step in zip(pages, steps, strict=True):
      page['run'] |= step
    return [part.text for part in section([*map(SeedRun, folders, pages)]).parts if isinstance(part, Paragraph)]

  assert paragraphs({'step': 20}, {'step': 20}) == paragraphs({}, {}) == []
  (said,) = paragraphs({'step': 20}, {'step': 10})
  assert said == 'The pages are about checkpoints of different steps: seed 0 of step 20, 1 of step 10.'
  assert '0 of step 20, 1 of step unknown' in paragraphs({'step': 20}, {})[0]  # a page of an older version


def test_a_mean_that_overflowed_is_nan_in_the_table(made):
  effect = {'loss': {'mean': None, 'half': None}}  # explain.json has null in place of NaN and infinity
  stored = page_of(90.0) | {'interventions': {'images': 60, 'controls': {'all moved, draw 1': effect}}}
  (other,) = read_seed_runs(made(0), [str(made(1, stored))], False)
  for seed, own, shown in ((2, page_of(91.0), '0.200'), (3, stored, 'nan')):
    (table,) = section([SeedRun.of(made(seed), own), other]).parts
    (row,) = [row for row in table.rows if row[0] == 'change of the loss, all moved']
    assert row[-2:] == [shown, 'nan']


def test_keys_that_do_not_change_the_parameters_may_differ(made):
  own, other = made(0), made(1, page_of(90.0))
  config = json.loads((other / 'config.json').read_text())
  config['evaluate']['batch_size'] += 1
  config['data'] |= {'workers': 3, 'mean': [0.123]}
  config['checkpoint']['keep'] = 7
  (other / 'config.json').write_text(json.dumps(config))
  assert [run.seed for run in read_seed_runs(own, [str(other)], False)] == [1]


def test_only_explained_runs_of_other_seeds_are_read(made):
  own, good = made(0), made(1, page_of(90.0))
  assert [run.seed for run in read_seed_runs(own, [str(good)], False)] == [1]
  assert read_seed_runs(own, [], False) == []
  pair = {'run': {'first': {}, 'other': {}}}
  for folders, average, said in (
    ([made(0, width=24)], False, r'in more than its seed \(model.width is 24 there, 16 here\): give'),
    ([own], False, 'has seed 0 like'),
    ([good, good], False, 'has seed 1 like'),
    ([made(2)], False, 'has no page of this run alone: write it first'),
    ([made(3, pair)], False, 'has no page of this run alone'),
    ([good], True, 'is about the parameters, and this one about the average'),
  ):
    with pytest.raises(UserError, match=said):
      read_seed_runs(own, [str(folder) for folder in folders], average)
