import json

import pytest

from hbf.errors import UserError
from hbf.training.workdir import claim, load_config, locked
from hbf.training.writers import MetricsWriter, read_metrics


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
  with locked(tmp_path / 'run'), pytest.raises(UserError, match='in use'), locked(tmp_path / 'run'):
    pass
  with locked(tmp_path / 'run'):
    pass


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  with pytest.raises(UserError, match='not a run'), locked(tmp_path):
    pass
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_another_config_is_refused_with_the_keys_that_differ(tmp_path, toy):
  claim(tmp_path, toy())
  before = (tmp_path / 'config.json').read_text()
  with pytest.raises(UserError, match=r'optimizer\.learning_rate is 0\.002 there, 0\.5 here'):
    claim(tmp_path, toy(**{'optimizer.learning_rate': 0.5}))
  assert (tmp_path / 'config.json').read_text() == before


def test_what_does_not_change_the_result_may_differ(tmp_path, toy):
  claim(tmp_path, toy())
  claim(tmp_path, toy(**{'data.dir': '/elsewhere', 'data.input': 'stream', 'checkpoint.keep': 7}))


def test_the_config_comes_back_as_it_was(tmp_path, toy):
  config = toy(**{'data.mean': (0.25,), 'data.std': (0.5,)})
  claim(tmp_path, config)
  assert json.loads(load_config(tmp_path).to_json()) == json.loads(config.to_json())
  claim(tmp_path, config)


def test_a_folder_without_config_is_no_workdir(tmp_path):
  with pytest.raises(UserError, match=r'no config\.json'):
    load_config(tmp_path)


def test_a_resumed_log_drops_what_will_be_written_again_and_half_a_line(tmp_path):
  with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
    for step in (1, 2, 3):
      writer.write(step, step / 10, 'train', loss=1 / step, seconds=float(step))
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "ep')
  with MetricsWriter(tmp_path, 2, tensorboard=False) as writer:
    assert writer.seconds == 2.0
    writer.write(3, 0.3, 'train', loss=0.5)
  assert [(line['step'], line['loss']) for line in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_tensorboard_files_are_written_if_asked_for(tmp_path):
  with MetricsWriter(tmp_path, 0, tensorboard=True) as writer:
    writer.write(1, 0.1, 'train', loss=1.0)
  assert list((tmp_path / 'tensorboard').glob('events.*'))
