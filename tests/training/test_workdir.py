import contextlib
import errno
import json
import os
import pathlib

import numpy as np
import pytest

from hbf.errors import UserError
from hbf.training import workdir
from hbf.training.workdir import (
  check_data,
  claim,
  load_config,
  locked,
  naming_trouble,
  read_predictions,
  write_predictions,
)
from hbf.training.writers import MetricsWriter, read_metrics


def read_finished(folder):
  return workdir.read_result(folder, 'n', 'correct')


DATA = {
  'name': 'pets',
  'classes': ['cat', 'dog'],
  'image_shape': [8, 8, 1],
  'splits': {'train': 9},
  'fingerprint': 'a',
}


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
  with locked(tmp_path / 'run'), pytest.raises(UserError, match='in use'), locked(tmp_path / 'run'):
    pass
  with locked(tmp_path / 'run'):
    pass


def test_a_full_disk_is_named_whoever_says_so(tmp_path):
  full = ValueError('RESOURCE_EXHAUSTED: Failed to write 5 bytes: No space left on device')  # as TensorStore does
  with pytest.raises(UserError, match='no space left'), naming_trouble(tmp_path):
    raise full
  with pytest.raises(UserError, match='quota exceeded'), naming_trouble(tmp_path):
    raise RuntimeError('could not save') from OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
  with pytest.raises(UserError, match=r"permission denied \(.*'/run/a'\)\. Mend"), naming_trouble(tmp_path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), '/run/a')
  for other in (ValueError('no'), UserError('no')):
    with pytest.raises(type(other), match=r'^no$'), naming_trouble(tmp_path):
      raise other from full if isinstance(other, UserError) else None


@pytest.mark.parametrize(
  ('error', 'message'),
  [(errno.EWOULDBLOCK, 'in use'), (errno.ENOLCK, 'without locks'), (errno.ENOTSUP, 'without locks')],
)
def test_a_lock_that_cannot_be_had_says_why(tmp_path, monkeypatch, error, message):
  def refuse(file, kind):
    raise OSError(error, 'no')

  monkeypatch.setattr(workdir.fcntl, 'flock', refuse)
  with pytest.raises(UserError, match=message), locked(tmp_path / 'run'):
    pass


def test_a_folder_is_in_use_as_long_as_it_is_held(tmp_path):
  assert not workdir.in_use(tmp_path / 'run')
  with locked(tmp_path / 'run'):
    assert workdir.in_use(tmp_path / 'run')
  assert not workdir.in_use(tmp_path / 'run')


def test_a_folder_that_may_only_be_read_can_be_in_use(tmp_path, monkeypatch):
  """For example another user's folder."""
  real_open = open

  def read_only(path, mode='r', **options):
    if {*mode} & {*'wax+'}:
      raise PermissionError(path)
    return real_open(path, mode, **options)

  with locked(tmp_path / 'run'):
    monkeypatch.setattr('builtins.open', read_only)
    assert workdir.in_use(tmp_path / 'run')
  assert not workdir.in_use(tmp_path / 'run')


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('gs://bucket/run', 'gs://bucket/run is a URL'),
    ('/proc/x', r'/proc/x cannot be used as a folder \(no such file'),
    ('a' * 300, r'cannot be used as a folder \(file name too long\)'),
    ('/'.join(['a' * 190] * 20), 'too long for the paths of files inside it'),
    (f'{__file__}/run', r'cannot be used as a folder \(not a directory\)'),
  ],
  ids=['url', 'proc', 'name', 'path', 'file'],
)
def test_a_folder_that_cannot_be_is_refused_in_a_line(tmp_path, monkeypatch, path, message):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=message), locked(pathlib.Path(path)):
    pass
  assert not any(tmp_path.iterdir())


def test_a_command_that_takes_no_bucket_says_so():
  with pytest.raises(UserError, match='s3://bucket/run is a URL, but a local folder is needed here'):
    load_config(pathlib.Path('s3://bucket/run'))


def test_a_folder_whose_name_is_not_utf8_is_refused():
  with pytest.raises(UserError, match=r'runs/r\\udce9 is not UTF-8, which checkpoints need: choose another'):
    workdir.check_place(pathlib.Path(os.fsdecode(b'runs/r\xe9')))


def test_a_teacher_may_move_if_its_weights_have_a_checksum(tmp_path, toy):
  taught = {'train.teacher': 'runs/a', 'train.teacher_weight': 0.5}
  claim(tmp_path, toy(**taught), DATA)
  moved = toy(**taught | {'train.teacher': 'runs/a/checkpoints/10'})
  with pytest.raises(UserError, match=r'train\.teacher is'):
    claim(tmp_path, moved, DATA)
  (tmp_path / workdir.TEACHER).write_text('{}')
  claim(tmp_path, moved, DATA)
  with pytest.raises(UserError, match=r'train\.teacher is'):
    claim(tmp_path, toy(), DATA)


def test_scores_that_the_run_reads_again_are_on_disk(tmp_path, monkeypatch):
  synced = []
  with MetricsWriter(tmp_path, 0) as writer:
    monkeypatch.setattr(os, 'fsync', synced.append)
    writer.write(1, 0.1, 'train', loss=1.0)
    assert not synced
    writer.write(1, 0.1, 'validation', loss=1.0)
  assert len(synced) == 1


def test_a_new_folder_is_no_trouble(tmp_path):
  workdir.check_place(tmp_path / 'new' / 'run')


READERS = {'config': load_config, 'data': lambda folder: check_data(folder, DATA), 'result': read_finished}
DAMAGES = {'empty': b'', 'cut': b'{"versi', 'list': b'[]', 'lacking': b'{}', 'nul': bytes(9), 'not UTF-8': b'{"\xff'}


@pytest.mark.parametrize('name', READERS)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, name):
  for content in DAMAGES.values():
    (tmp_path / f'{name}.json').write_bytes(content)
    with pytest.raises(UserError, match=rf'{name}\.json is damaged \(.+\): (restore|remove) it'):
      READERS[name](tmp_path)


def test_a_config_whose_sections_are_none_is_damaged(tmp_path, toy):
  claim(tmp_path, toy(), DATA)
  stored = json.loads((tmp_path / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(stored | {'version': 0, 'model': 7}))
  with pytest.raises(UserError, match=r'config\.json is damaged'):
    load_config(tmp_path)


def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path, monkeypatch):
  def refuse(self):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

  monkeypatch.setattr(pathlib.Path, 'read_bytes', refuse)
  with pytest.raises(UserError, match=r'config\.json cannot be read \(permission denied\)'):
    load_config(tmp_path)


def test_a_damaged_line_of_the_log_is_named(tmp_path):
  good = b'{"step": 1, "split": "train"}\n'
  for bad in (bytes(9), b'', b'{"step": 1}', b'{"step": '):
    (tmp_path / 'metrics.jsonl').write_bytes(good + bad + b'\n' + good)
    with pytest.raises(UserError, match=r'line 2 of .*metrics\.jsonl is damaged \(.+\): delete this line'):
      read_metrics(tmp_path)


def test_files_are_on_disk_before_they_replace_others(tmp_path, monkeypatch):
  did = []
  for name in ('fsync', 'replace'):
    monkeypatch.setattr(workdir.os, name, lambda *_, do=os.__dict__[name], name=name: (did.append(name), do(*_)))
  workdir.write_json(tmp_path / 'a.json', {})
  write_predictions(tmp_path, {'labels': np.zeros(1)})
  assert did == ['fsync', 'replace'] * 2


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  with pytest.raises(UserError, match='not a run'), locked(tmp_path):
    pass
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_a_comparison_is_no_run_and_what_a_killed_start_leaves_is_one(tmp_path):
  for names, allowed in (('.lock grid.json', False), ('.lock', True), ('.lock data.json', True)):
    folder = tmp_path / names.replace(' ', '-')
    folder.mkdir()
    for name in names.split():
      (folder / name).touch()
    with contextlib.nullcontext() if allowed else pytest.raises(UserError, match='not a run'), locked(folder):
      pass


def test_another_config_is_refused_with_the_keys_that_differ(tmp_path, toy):
  claim(tmp_path, toy(), DATA)
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(UserError, match=r'optimizer\.learning_rate is 0\.002 there, 0\.5 here'):
    claim(tmp_path, toy(**{'optimizer.learning_rate': 0.5}), DATA)
  assert (tmp_path / 'config.json').read_text() == before


def test_what_does_not_change_the_result_may_differ(tmp_path, toy):
  claim(tmp_path, toy(), DATA)
  claim(tmp_path, toy(**{'data.dir': '/elsewhere', 'data.cache': '/x', 'checkpoint.keep': 7}), DATA)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'classes': ['cat', 'ant']}, r'other data \(classes dog there, ant here\)'),
    ({'classes': ['dog', 'cat']}, 'classes cat, dog there, dog, cat here'),
    ({'splits': {'train': 8}}, 'sizes 9 train there, 8 train here'),
    ({'fingerprint': 'b'}, 'as many examples of the same kind, but others'),
  ],
)
def test_other_data_are_refused_with_what_differs(tmp_path, toy, change, message):
  claim(tmp_path, toy(), DATA)
  before = (tmp_path / 'data.json').read_text()
  with pytest.raises(UserError, match=message):
    claim(tmp_path, toy(), DATA | change)
  assert (tmp_path / 'data.json').read_text() == before


def test_a_start_that_was_killed_before_its_config_binds_to_no_data(tmp_path, toy):
  claim(tmp_path, toy(), DATA)
  (tmp_path / 'config.json').unlink()
  claim(tmp_path, toy(), DATA | {'fingerprint': 'b'})
  assert json.loads((tmp_path / 'data.json').read_text())['fingerprint'] == 'b'


def test_what_readers_are_told_of_classes_may_differ(tmp_path, toy):
  claim(tmp_path, toy(), DATA)
  claim(tmp_path, toy(), DATA | {'names': {'cat': 'house cat'}})


def test_an_old_run_learns_what_its_data_are_when_it_goes_on_and_not_when_it_is_finished(tmp_path, toy):
  for name in ('running', 'finished'):
    (tmp_path / name).mkdir()
    claim(tmp_path / name, toy(), DATA)
    (tmp_path / name / 'data.json').unlink()
  (tmp_path / 'finished' / 'result.json').touch()
  for name in ('running', 'finished'):
    claim(tmp_path / name, toy(), DATA)
  assert json.loads((tmp_path / 'running' / 'data.json').read_text()) == DATA
  assert not (tmp_path / 'finished' / 'data.json').exists()


def test_predictions_of_any_number_of_classes_come_back(tmp_path):
  labels = np.array([0, 40_000, 2**31 - 1], np.int32)
  write_predictions(tmp_path, {'labels': labels, 'predictions': labels[::-1]})
  found = read_predictions(tmp_path)
  np.testing.assert_array_equal((found['labels'], found['predictions']), (labels, labels[::-1]))


def test_the_config_comes_back_as_it_was(tmp_path, toy):
  config = toy(**{'data.mean': (0.25,), 'data.std': (0.5,)})
  claim(tmp_path, config, DATA)
  assert json.loads(load_config(tmp_path).to_json()) == json.loads(config.to_json())
  claim(tmp_path, config, DATA)


def test_a_folder_without_config_is_no_workdir(tmp_path):
  with pytest.raises(UserError, match=r'no config\.json'):
    load_config(tmp_path)


def test_a_resumed_log_drops_what_will_be_written_again_and_half_a_line(tmp_path):
  with MetricsWriter(tmp_path, 0) as writer:
    for step in (1, 2, 3):
      writer.write(step, step / 10, 'train', loss=1 / step)
    writer.write(2, 0.2, 'test', loss=0.0)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "ep')
  with MetricsWriter(tmp_path, 2) as writer:
    writer.write(3, 0.3, 'train', loss=0.5)
  assert [(line['step'], line['loss']) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]
