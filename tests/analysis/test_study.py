"""Tests of the command that all studies share."""

import argparse
import pathlib

import pytest

from hbf.analysis.report.figures import plt, write_png
from hbf.analysis.study import Record, Study, data_of
from hbf.api import get_config
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


def test_a_study_is_of_runs_on_one_data_set(tmp_path):
  folders = [tmp_path / 'flowers', tmp_path / 'digits']
  for folder in folders:
    folder.mkdir()
    config = resolve(get_config('digits'))
    with config.unlocked():
      config.data.name = folder.name
    (folder / 'config.json').write_text(config.to_json())
  assert data_of(folders[:1]) == 'flowers'
  with pytest.raises(UserError, match=r'a run on flowers, and .* on digits: give runs on one'):
    data_of(folders)
  for stored in (None, {'data': 'digits'}):
    assert data_of(folders[1:], Record(tmp_path / 'any.json', stored)) == 'digits'
  with pytest.raises(UserError, match='numbers of runs on birds, and not on digits: give another --out'):
    data_of(folders[1:], Record(tmp_path / 'any.json', {'data': 'birds'}))


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
