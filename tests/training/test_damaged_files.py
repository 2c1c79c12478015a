"""Damaged files of a run folder are refused in one line. Most of this damage was found by `make fuzz`."""

import json
import re
import zipfile

import numpy as np
import pytest
from toy_runs import save_untrained

from hbf.comparison.stored import PackedRuns
from hbf.comparison.tune import load_trials
from hbf.errors import UserError
from hbf.evaluation.scores import ACCURACY
from hbf.interop import tensors
from hbf.training import export, side_file
from hbf.training.edits import Edit, Edits
from hbf.training.edits_file import read_edits, write_edits
from hbf.training.learned import Learned, LearnedClass, read_learned, write_learned
from hbf.training.restore import stored_dataset
from hbf.training.workdir import load_config, read_predictions, write_predictions
from hbf.training.writers import read_metrics, validation_scores


@pytest.fixture(scope='module')
def run(toy, tmp_path_factory):
  """Return a run folder with edits, learned classes and predictions."""
  folder = tmp_path_factory.mktemp('damaged') / 'run'
  save_untrained(toy('model=identity'), folder)
  edit = Edit('a.png', '1', '2', np.ones((2, 3)), np.ones(2), np.ones((2, 10)))
  write_edits(folder, Edits(1, False, np.eye(3), (edit,)))
  beside = tmp_path_factory.mktemp('beside')  # a run has one of both files only
  write_learned(beside, Learned(1, False, np.eye(3), np.ones((10, 3)), (LearnedClass('x', ('a.png',), np.ones(3)),)))
  (beside / 'learned.npz').rename(folder / 'learned.npz')
  write_predictions(folder, {'nll': np.ones(2)})
  return folder


@pytest.fixture
def damage(run):
  """Return a function that changes the JSON of a file of the run, until the end of the test."""
  whole = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}

  def change(name, *path, value):
    stored = part = json.loads((run / name).read_text())
    for key in path[:-1]:
      part = part[key]
    part[path[-1]] = value
    (run / name).write_text(json.dumps(stored))

  yield change
  for path, content in whole.items():
    path.write_bytes(content)


def refused(read, *words):
  with pytest.raises(UserError) as caught:
    read()
  assert re.search(r'.*'.join(map(re.escape, words)), str(caught.value)), str(caught.value)


def test_whole_files_are_read(run):
  assert load_config(run).model.name == 'identity' and stored_dataset(run).image_shape == (8, 8, 1)
  assert len(read_edits(run)) == 1 and len(read_learned(run)) == 1 and [*read_predictions(run)] == ['nll']


@pytest.mark.parametrize(
  ('path', 'value', 'words'),
  [
    (('mesh',), None, ('config.json is damaged', 'its mesh is null')),
    (('mesh', 'data'), None, ('config.json is damaged', 'mesh.data is None')),
    (('mesh',), {}, ('config.json is damaged', 'it lacks mesh.data')),
    (('model', 'stage2'), 3, ('config.json is damaged', 'its stage2 is 3')),
    (('model', 'depth'), 'two', ('config.json is damaged', "model.depth is 'two'")),
    (('model', 'name'), 'vitt', ('config.json is damaged', "did you mean 'vit'")),
    (('seed',), [], ('config.json is damaged', 'its seed is []')),
  ],
)
def test_a_config_has_all_keys_with_values_of_their_kind(run, damage, path, value, words):
  damage('config.json', *path, value=value)
  refused(lambda: load_config(run), *words)


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('classes', None),
    ('classes', [[], '1']),
    ('image_shape', [8, 8]),
    ('image_shape', None),
    ('names', 3),
    ('name', 1),
  ],
)
def test_the_description_of_the_data_is_of_images(run, damage, key, value):
  damage('data.json', key, value=value)
  refused(lambda: stored_dataset(run), 'data.json is damaged', 'restore it')


@pytest.mark.parametrize(
  'line',
  [{'step': None}, {'step': '1'}, {'step': True}, {'split': 2}, {'accuracy': 'high'}, {'accuracy': None}],
)
def test_a_line_of_metrics_has_a_step_a_split_and_scores(run, line):
  whole = {'step': 1, 'split': 'validation', 'accuracy': 3.0}
  (run / 'metrics.jsonl').write_text(json.dumps(whole | line) + '\n')
  refused(lambda: validation_scores(run, ACCURACY), 'line', 'metrics.jsonl is damaged', 'delete this line')
  (run / 'metrics.jsonl').write_text(json.dumps(whole) + '\n')
  assert validation_scores(run, ACCURACY) == {1: 3.0} and len(read_metrics(run)) == 1
  refused(lambda: validation_scores(run, ACCURACY, 'average'), 'metrics.jsonl is damaged')


def unread(path):
  """Stand for the reader of a file that is to be damaged."""


FACTS = {'version': 1, 'step': 1, 'average': False}
EDIT = {'source': 'a.png', 'was': '1', 'label': '2', 'centers': 2}


@pytest.mark.parametrize(
  ('facts', 'arrays'),
  [
    ({'step': None}, {}),
    ({'average': 1}, {}),
    ({'edits': []}, {}),
    ({'edits': None}, {}),
    ({'edits': [3]}, {}),
    ({'edits': [EDIT | {'was': None}]}, {}),
    ({'edits': [EDIT | {'centers': 'two'}]}, {}),
    ({}, {'centers': np.ones(())}),
    ({}, {'centers': np.array('text')}),
    ({}, {'radius': np.ones((2, 1))}),
    ({}, {'metric': np.ones((3, 4))}),
    ({}, {'changes': np.ones((2, 2), bool)}),
  ],
)
def test_edits_are_arrays_that_fit_with_their_facts(run, damage, facts, arrays):
  whole = {'centers': np.ones((2, 3)), 'radius': np.ones(2), 'changes': np.ones((2, 10)), 'metric': np.eye(3)}
  side_file.write_arrays(run / 'edits.npz', {**FACTS, 'edits': [EDIT], **facts}, whole | arrays, unread)
  refused(lambda: read_edits(run), 'edits.npz is damaged', 'restore it from a copy, or remove it')


@pytest.mark.parametrize(
  ('facts', 'arrays'),
  [
    ({'step': []}, {}),
    ({'classes': None}, {}),
    ({'classes': [{'name': 'x', 'sources': []}]}, {}),
    ({'classes': [{'name': 'x', 'sources': 'a'}]}, {}),
    ({'classes': [{'name': None, 'sources': ['a']}]}, {}),
    ({}, {'centers': np.ones(())}),
    ({}, {'metric': np.ones(3)}),
    ({}, {'trained_centers': np.ones((10, 4))}),
  ],
)
def test_learned_classes_are_arrays_that_fit_with_their_facts(run, damage, facts, arrays):
  whole = {'centers': np.ones((1, 3)), 'trained_centers': np.ones((10, 3)), 'metric': np.eye(3)}
  classes = [{'name': 'x', 'sources': ['a.png']}]
  side_file.write_arrays(run / 'learned.npz', {**FACTS, 'classes': classes, **facts}, whole | arrays, unread)
  refused(lambda: read_learned(run), 'learned.npz is damaged', 'restore it from a copy, or remove it')


HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
  'member',
  [
    b'no array at all',  # NumPy then returns its bytes
    HEADER.replace(b'(2,), }', b'(2,),').ljust(127) + b'\n',  # NumPy's reader of headers raises TokenError
  ],
)
def test_the_parts_of_an_npz_file_are_arrays(run, damage, member):
  for name in ('predictions', 'edits', 'learned'):
    with zipfile.ZipFile(run / f'{name}.npz', 'w') as archive:
      archive.writestr('about.npy', member)
  refused(lambda: read_predictions(run), 'predictions.npz is damaged', 'remove it')
  refused(lambda: read_edits(run), 'edits.npz is damaged')
  refused(lambda: read_learned(run), 'learned.npz is damaged')
  refused(lambda: tensors.read(run / 'edits.npz'), 'edits.npz cannot be read', 'not arrays by name')


@pytest.mark.parametrize(
  ('key', 'value', 'word'),
  [
    ('image_shape', None, 'image_shape is null'),
    ('image_shape', [8, 0, 1], 'image_shape'),
    ('classes', 3, 'classes is 3'),
    ('model', [], 'model is []'),
    ('model', {'name': 'vit'}, 'describes no network'),
    ('sha256', 'x', 'sha256'),
    ('schema', None, 'schema is null'),
  ],
)
def test_an_export_describes_a_network(tmp_path, key, value, word):
  about = dict.fromkeys(export._KEYS, 0) | {'classes': ['a'], 'image_shape': [8, 8, 1], 'mean': [0.0], 'std': [1.0]}
  about |= {'average': False, 'model': {'name': 'vit'}, 'sha256': {}, 'schema': export.SCHEMA, 'jax': '0'}
  about |= {'format': export.FORMAT, 'version': export.VERSION, key: value}
  (tmp_path / 'config.json').write_text(json.dumps(about))
  refused(lambda: export.load_model(tmp_path), 'config.json is damaged', word, 'export it again')


@pytest.mark.parametrize('content', ['null', '{"trials": null}', '{"trials": [3]}', '{"trials": []}', '{', '{}'])
def test_a_search_has_trials(tmp_path, content):
  (tmp_path / 'tuning.json').write_text(content)
  refused(lambda: load_trials(tmp_path / 'tuning.json'), 'tuning.json is damaged', 'restore it from a copy')


def test_a_packed_run_has_a_name_and_lines_of_metrics(tmp_path):
  (tmp_path / 'runs.jsonl').write_text('{"run": []}\n')
  refused(lambda: PackedRuns(tmp_path), 'line 1 of', 'its run is []')
  for metrics in ('3', '[3]', '[{"step": "1", "split": "test"}]'):
    (tmp_path / 'runs.jsonl').write_text(f'{{"run": "a", "metrics": {metrics}}}\n')
    refused(lambda: PackedRuns(tmp_path).metrics('a'), 'the metrics of a in', 'is damaged')
