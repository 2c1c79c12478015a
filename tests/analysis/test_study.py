"""Tests of the command that all studies share."""

import argparse
import pathlib

import pytest

from hbf.analysis.report.figures import plt, write_png
from hbf.analysis.study import Study
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
