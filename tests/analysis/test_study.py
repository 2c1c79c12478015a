"""Tests of the command that all studies share."""

import argparse
import json
import pathlib

import pytest

from hbf.analysis.study import Record, Study, data_of
from hbf.api import get_config
from hbf.comparison.figures import plt, write_png
from hbf.config.resolve import resolve
from hbf.errors import UserError


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
  (tmp_path / 'taken').write_text('mine')
  study = Study('any', lambda numbers, path: None, str)
  for out in ('taken', 'taken/inside'):
    with pytest.raises(UserError, match=f'{out} cannot be used as a folder .*: choose another --out'):
      study.run(
        argparse.Namespace(out=pathlib.Path(tmp_path / out), report=False), lambda record: pytest.fail('measured')
      )
  assert (tmp_path / 'taken').read_text() == 'mine'


@pytest.fixture
def run_on(tmp_path):
  """Return a function that makes a run folder, named after the run, on a data set with a fingerprint or without."""

  def run_on(run, name, fingerprint=None):
    folder, config = tmp_path / run, resolve(get_config('digits'))
    folder.mkdir()
    with config.unlocked():
      config.data.name = name
    (folder / 'config.json').write_text(config.to_json())
    if fingerprint:
      (folder / 'data.json').write_text(json.dumps({'name': name, 'fingerprint': fingerprint}))
    return folder

  return run_on


def test_a_study_is_of_runs_on_one_data_set(run_on, tmp_path):
  folders, path = [run_on('a', 'flowers'), run_on('b', 'digits')], tmp_path / 'any.json'
  assert data_of(folders[:1]) == {'data': 'flowers'}
  with pytest.raises(UserError, match=r'a is a run on flowers, and .*b on digits: give runs on one'):
    data_of(folders)
  for stored in (None, {'data': 'digits'}):
    assert data_of(folders[1:], Record(path, stored)) == {'data': 'digits'}
  with pytest.raises(UserError, match='numbers of runs on birds, and not on digits: give another --out'):
    data_of(folders[1:], Record(path, {'data': 'birds'}))


def test_two_image_folders_are_two_data_sets(run_on, tmp_path):
  names = {'one': '1', 'same': '1', 'other': '2', 'old': None}
  runs, path = {run: run_on(run, 'image_folder', mark) for run, mark in names.items()}, tmp_path / 'any.json'
  known = {'data': 'image_folder', 'fingerprint': '1'}
  assert data_of([runs['one'], runs['same'], runs['old']]) == known
  with pytest.raises(UserError, match=r'one and .*other are runs on different data \(as many examples .* others\)'):
    data_of([runs['one'], runs['other']])
  for stored in (None, known, {'data': 'image_folder'}):
    assert data_of([runs['one']], Record(path, stored)) == known
  with pytest.raises(UserError, match=r'any.json has numbers of runs on other data than .*other: give another --out'):
    data_of([runs['other']], Record(path, known))
  assert data_of([runs['old']], Record(path, known)) == {'data': 'image_folder'}


def test_a_picture_that_is_not_finished_leaves_the_old_one(tmp_path, monkeypatch):
  figure, path = plt.figure(), tmp_path / 'any.png'
  path.write_text('old')

  def interrupted(file, **_):
    file.write(b'half')
    raise KeyboardInterrupt

  monkeypatch.setattr(figure, 'savefig', interrupted)
  with pytest.raises(KeyboardInterrupt):
    write_png(figure, path)
  assert path.read_text() == 'old' and [*tmp_path.iterdir()] == [path]
  plt.close(figure)
