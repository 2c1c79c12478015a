"""Tests of whole runs of the tasks multi_label and regression on a folder with CSV files."""

import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from toy_runs import ONE, assert_same_run

import hbf
from hbf.analysis import nested
from hbf.comparison.grid import Arm, Grid
from hbf.comparison.table import markdown, read_rows
from hbf.editing.learn import learn_folder
from hbf.errors import UserError
from hbf.tasks.registry import TASKS as TASK_CLASSES
from hbf.training.export import export, from_run
from hbf.training.predict import answer, of_export, of_trained, to_table
from hbf.training.restore import check_classifies
from hbf.training.workdir import read_predictions, write_predictions

TASKS = {'multi_label': ('labels.csv', 'map'), 'regression': ('targets.csv', 'r2')}


@pytest.fixture(scope='module', params=['multi_label', pytest.param('regression', marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
  """Return a task and a folder of gray images, with their CSV files: bright or not, and bright on the left or not."""
  task, root = request.param, tmp_path_factory.mktemp('images')
  random = np.random.default_rng(0)
  for split, count in (('train', 40), ('test', 12)):
    (root / split).mkdir()
    images = (random.random((count, 1, 1)) * random.random((count, 8, 8)) * 255).astype(np.uint8)
    values = np.stack([images.mean(axis=(1, 2)), images[:, :, :4].mean(axis=(1, 2)) - images.mean(axis=(1, 2))], 1)
    rows = values.round(2) if task == 'regression' else (values > (60, 0)).astype(int)
    lines = ['file,bright,left', *(f'{i}.png,{a},{b}' for i, (a, b) in enumerate(rows))]
    (root / split / TASKS[task][0]).write_text('\n'.join(lines))
    for i, image in enumerate(images):
      Image.fromarray(image).save(root / split / f'{i}.png')
  return task, root


def run_config(task, root):
  config = hbf.get_config('image_folder', model='vit', task=task)
  changes = {'width': 8, 'depth': 1, 'heads': 1, 'patch': 4, 'expansion': 1.0}
  config.model.update(changes)
  config.data.update(root=str(root), image_size=8, transforms=(('shift', 1),), validation=0.2)
  config.train.update(epochs=2.0, batch_size=8, average=0.5)
  config.log.every = '3steps'
  return config


def train(config, workdir, **options):
  return hbf.train(config, workdir, devices=ONE, progress=False, **options)


@pytest.fixture(scope='module')
def run(folder, tmp_path_factory):
  """Return the task, the data, the run folder and the result of a finished run."""
  task, root = folder
  workdir = tmp_path_factory.mktemp('runs') / 'vit-0'
  return task, root, workdir, train(run_config(task, root), workdir)


def test_a_continued_run_is_the_same(run, tmp_path):
  task, root, workdir, result = run
  if task == 'multi_label':
    pytest.skip('a run of values has more to keep, the measured targets')
  config = run_config(task, root)
  assert train(config, tmp_path / 'run', callbacks=[lambda step, *_: step == 5]) is None
  continued = train(config, tmp_path / 'run')
  assert_same_run(workdir, tmp_path / 'run')
  score = TASKS[task][1]
  assert continued[score] == result[score] and result['n'] == 12 and score in result['average']
  stored, again = (json.loads((path / 'config.json').read_text()) for path in (workdir, tmp_path / 'run'))
  assert stored == again and len(stored['data']['target_std']) == 2


def test_scores_and_predictions_of_a_run_are_those_of_its_files(run):
  task, root, workdir, result = run
  found = hbf.evaluate(workdir, 'test', devices=ONE)
  assert {name: found[name] for name in ('n', TASKS[task][1])} == {
    name: result[name] for name in ('n', TASKS[task][1])
  }
  assert hbf.evaluate(workdir, 'validation', 'best', devices=ONE)['n'] == 8
  images = np.stack([np.asarray(Image.open(root / 'test' / f'{i}.png').convert('RGB')) for i in range(12)])
  numbers, stored = hbf.load(workdir).predict(images, batch_size=5), read_predictions(workdir)
  if task == 'regression':
    np.testing.assert_allclose(numbers, stored['predictions'], rtol=1e-4, atol=1e-3)
    expected = np.loadtxt(root / 'test' / 'targets.csv', delimiter=',', skiprows=1, usecols=(1, 2))
    np.testing.assert_allclose(stored['targets'], expected, rtol=1e-6)
    assert set(found['per_target']) == {'bright', 'left'}
  else:
    np.testing.assert_allclose(numbers, jax.nn.sigmoid(stored['logits']), rtol=1e-4, atol=1e-5)
    assert found['per_label']['bright']['n'] == stored['labels'][:, 0].sum()


def test_an_exported_network_answers_like_its_run(run, tmp_path):
  task, root, workdir, _ = run
  model = from_run(workdir)
  export(model, tmp_path / 'model')
  paths = [str(root / 'test' / f'{i}.png') for i in range(3)] + [str(tmp_path / 'none.png')]
  answers = [[*answer(network, paths, top=1)] for network in (of_trained(model), of_export(tmp_path / 'model'))]
  many, one, number = {'regression': ('values', 'target', 'value')}.get(task, ('labels', 'label', 'probability'))
  said = [[each.to_json() for each in of_one] for of_one in answers]
  assert [entry[one] for entry in said[0][0][many]] == ['bright', 'left'] and 'error' in said[0][3]
  for ours, theirs in zip(said[0][:3], said[1][:3], strict=True):
    assert [e[number] for e in ours[many]] == pytest.approx([e[number] for e in theirs[many]], rel=1e-4)
  predictions = read_predictions(workdir).get('predictions')
  if predictions is not None:
    assert [e[number] for e in said[1][1][many]] == pytest.approx(predictions[1], rel=1e-4, abs=1e-3)
  assert to_table(answers[0][:3]).split('\n')[0].split('|')[2].strip() == 'bright'


def test_a_comparison_has_intervals_for_the_score(run, tmp_path):
  task, _, workdir, result = run
  (tmp_path / 'images-first-0').symlink_to(workdir)
  second, stored = tmp_path / 'images-second-0', read_predictions(workdir)
  shutil.copytree(workdir, second)  # another arm, whose predictions differ
  (name,) = stored.keys() & {'logits', 'predictions'}
  changed = stored | {name: stored[name] + np.random.default_rng(0).normal(size=(12, 2)) * stored[name].std(axis=0)}
  write_predictions(second, changed)
  other = TASK_CLASSES[task].example_scores(changed).mean()
  arms = tuple(Arm('images', label, (), task=task) for label in ('first', 'second'))
  first, row = read_rows(Grid(arms, (0,)), tmp_path)
  score = TASKS[task][1]
  assert first.mean == result[score]
  assert row.difference.estimate == pytest.approx(other - result[score])
  assert row.difference.low < row.difference.estimate < row.difference.high
  assert score in markdown([first, row])


def test_what_needs_classes_is_refused(run, tmp_path):
  task, _, workdir, _ = run
  loaded = hbf.load(workdir)
  images = np.zeros((1, 8, 8, 3), np.uint8)
  for call in (
    lambda: check_classifies(workdir, '--page'),
    lambda: nested.curve(workdir, 'latest', []),
    lambda: learn_folder(workdir, str(tmp_path)),
    lambda: hbf.learn(loaded, images, ['new']),
    lambda: hbf.edit(loaded, images, ['bright']),
  ):
    with pytest.raises(UserError, match=rf'has task {task}|run of task {task}'):
      call()
