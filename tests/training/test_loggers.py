"""Loggers get the numbers of metrics.jsonl, also across an interruption. Each is tested with its real package."""

import gzip
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from toy_runs import ONE, QUIET, params_of

from hbf.errors import Notice, UserError
from hbf.training import loggers
from hbf.training.experiment import make_plan
from hbf.training.loggers import LOGGERS, Loggers, check_loggers
from hbf.training.loop import train
from hbf.training.workdir import flatten
from hbf.training.writers import MetricsWriter, read_metrics


def logged(workdir):
  """Return the numbers of metrics.jsonl by name and step."""
  lines = read_metrics(workdir)
  about = ('step', 'epoch', 'split')
  return {
    (f'{line["split"]}/{name}', line['step']): value
    for line in lines
    for name, value in flatten({key: value for key, value in line.items() if key not in about}).items()
  }


def train_twice(config, workdir):
  """Run to step 10, where a callback stops it, and then to the end."""
  assert train(config, workdir, QUIET, ONE, callbacks=[lambda step, *_: step == 10]) is None
  assert train(config, workdir, QUIET, ONE) is not None


def read_events(workdir):
  """Return the entries of the event files by name and step: their kind and their value."""
  from tensorboardX.proto.event_pb2 import Event

  found = {}
  for path in sorted((workdir / 'tensorboard').glob('events.*')):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')  # a record has its size, a checksum, the event, a checksum
      event = Event.FromString(data[12 : 12 + size])
      data = data[16 + size :]
      for value in event.summary.value:
        found[value.tag, event.step] = value
  return found


@pytest.fixture(scope='module')
def on_board(tmp_path_factory, toy):
  """The folder of an interrupted run that logs to TensorBoard, with a trace of its steps 13 and 14."""
  workdir = tmp_path_factory.mktemp('board') / 'run'
  config = toy(**{'log.to': 'tensorboard', 'log.profile': '12..14', 'log.units': True, 'data.validation': 0.1})
  train_twice(config, workdir)
  return workdir


@pytest.mark.slow
def test_tensorboard_has_the_numbers_of_the_log(on_board):
  events, numbers = read_events(on_board), logged(on_board)
  assert len(numbers) > 50
  for (name, step), value in numbers.items():
    assert events[name, step].simple_value == pytest.approx(value, rel=1e-6), name


def test_tensorboard_has_histograms_of_all_parameters_and_the_first_images(on_board):
  events = read_events(on_board)
  step = max(step for name, step in events if name == 'parameters/head/kernel')
  for name, leaf in flatten_dict(params_of(on_board), sep='/').items():
    histogram = events[f'parameters/{name}', step].histo
    assert (histogram.num, sum(histogram.bucket)) == (leaf.size, leaf.size), name
    if leaf.min() < leaf.max():
      assert (histogram.min, histogram.max) == pytest.approx((leaf.min(), leaf.max()), rel=1e-5)
  image = events['train/images', 0].image
  assert (image.height % 8, image.width % 8, image.colorspace) == (0, 0, 3)
  assert ('train/images', 10) not in events


def test_a_trace_shows_the_steps_asked_for(on_board):
  (trace,) = (on_board / 'profile').rglob('perfetto_trace.json.gz')
  assert any((on_board / 'profile').rglob('*.xplane.pb'))
  names = [event.get('name', '') for event in json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']]
  assert any('train_steps' in name for name in names)


def test_loggers_and_traces_do_not_change_a_run(on_board, tmp_path, toy):
  plain = tmp_path / 'plain'
  train(toy(**{'data.validation': 0.1}), plain, QUIET, ONE)
  assert not (plain / 'tensorboard').exists()
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params_of(plain), params_of(on_board))))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'log.to': 'tensorbord'}, "unknown log.to 'tensorbord': did you mean 'tensorboard'"),
    ({'log.to': 'tensorboard, tensorboard'}, 'log.to has tensorboard 2 times: name each logger once'),
    ({'log.profile': '3'}, "log.profile is '3': expected two steps FIRST..LAST such as '100..110'"),
    ({'log.profile': '3..3'}, r'log.profile is 3..3, and the run has 21 steps: expected FIRST < LAST ≤ 21'),
    ({'log.profile': '20..22'}, r'log.profile is 20..22, and the run has 21 steps'),
  ],
)
def test_wrong_values_are_refused_before_the_run(toy, changes, message):
  with pytest.raises(UserError, match=message):
    make_plan(toy(**changes))


def test_a_logger_without_its_package_names_the_command_that_installs_it(monkeypatch):
  monkeypatch.setattr(LOGGERS['mlflow'], 'package', 'no_such_package')
  with pytest.raises(UserError, match=r"needs the package no_such_package: .*pip install 'hbf\[mlflow\]'"):
    check_loggers('mlflow')


class Failing:
  """A logger that can be opened and then takes nothing."""

  package, takes_pictures = 'json', False

  def __init__(self, *_):
    self.closed = False

  def numbers(self, step, values):
    raise OSError('the server is\ngone')


class Closed(Failing):
  """A logger that can't be opened."""

  def __init__(self, *_):
    raise ConnectionError('no route')


def test_a_run_goes_on_without_a_logger_that_fails(monkeypatch, tmp_path, toy):
  monkeypatch.setitem(LOGGERS, 'failing', Failing)
  with MetricsWriter(tmp_path, 0, Loggers(toy(**{'log.to': 'failing'}), tmp_path, 0)) as writer:
    with pytest.warns(Notice, match='the logger failing failed .the server is gone., and the run goes on'):
      writer.write(1, 0.1, 'train', loss=1.0)
    writer.write(2, 0.2, 'train', loss=0.5)
  assert [line['loss'] for line in read_metrics(tmp_path)] == [1.0, 0.5]


class Kept(Failing):
  """A logger that says whether the run was finished."""

  def __init__(self, closed):
    self.closed = closed

  def numbers(self, step, values):
    pass

  def close(self, finished):
    self.closed.append(finished)


@pytest.mark.parametrize(('splits', 'finished'), [(['train'], False), (['train', 'test'], True), ([], False)])
def test_a_logger_is_told_whether_the_run_is_finished(monkeypatch, tmp_path, toy, splits, finished):
  closed = []
  monkeypatch.setitem(LOGGERS, 'kept', lambda *_: Kept(closed))
  monkeypatch.setattr(loggers, 'check_loggers', lambda _: ('kept',))
  with MetricsWriter(tmp_path, 0, Loggers(toy(**{'log.to': 'kept'}), tmp_path, 0)) as writer:
    for split in splits:
      writer.write(1, 0.1, split, loss=1.0)
  assert closed == [finished]


def test_a_logger_that_cannot_start_is_a_line(monkeypatch, tmp_path, toy):
  monkeypatch.setitem(LOGGERS, 'closed', Closed)
  with pytest.raises(UserError, match=r'log.to=closed cannot start \(no route\): mend this, or leave closed out'):
    Loggers(toy(**{'log.to': 'closed'}), tmp_path, 0)


@pytest.fixture
def mlflow_client(monkeypatch, tmp_path):
  """A client of an MLflow store in a folder."""
  mlflow = pytest.importorskip('mlflow')
  monkeypatch.setenv('MLFLOW_TRACKING_URI', f'{tmp_path / "store"}')
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  return mlflow.MlflowClient()


def read_mlflow(client):
  """Return the only run of the store, and its numbers as a sorted list of (name, step, value)."""
  (run,) = client.search_runs([client.get_experiment_by_name('hbf').experiment_id])
  history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
  return run, sorted((name, point.step, point.value) for name, points in history.items() for point in points)


def test_mlflow_has_the_numbers_of_the_log(mlflow_client, tmp_path, toy):
  workdir = tmp_path / 'run'
  train_twice(toy(**{'log.to': 'mlflow', 'data.validation': 0.1}), workdir)
  run, found = read_mlflow(mlflow_client)
  assert (run.info.run_name, run.info.status, run.data.params['model.width']) == ('run', 'FINISHED', '16')
  assert found == sorted((name, step, value) for (name, step), value in logged(workdir).items())


def test_mlflow_has_each_number_once_if_steps_are_taken_again(mlflow_client, tmp_path, toy):
  config = toy(**{'log.to': 'mlflow'})
  for start, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
    loggers = Loggers(config, tmp_path, start)
    for step in steps:
      loggers.numbers(step, {'train/loss': float(step)})
    loggers.close(finished=True)
  _, found = read_mlflow(mlflow_client)
  assert found == [('train/loss', step, float(step)) for step in (1, 2, 3, 4)]


def wandb_records(path):
  """Yield the records of a file of W&B: a LevelDB log behind a header of 7 bytes."""
  from wandb.proto.wandb_internal_pb2 import Record

  data, place, parts = path.read_bytes(), 7, b''
  while place < len(data):
    room = 2**15 - place % 2**15
    if room < 7:  # the end of a block is filled up
      place += room
      continue
    size, kind = int.from_bytes(data[place + 4 : place + 6], 'little'), data[place + 6]
    parts += data[place + 7 : place + 7 + size]
    place += 7 + size
    if kind in (1, 4):  # a whole record, or its last part
      yield Record.FromString(parts)
      parts = b''


def test_weights_and_biases_has_the_numbers_of_the_log(monkeypatch, tmp_path, toy):
  pytest.importorskip('wandb')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  workdir = tmp_path / 'run'
  train_twice(toy(**{'log.to': 'wandb', 'data.validation': 0.1}), workdir)
  found, runs = {}, set()
  for record in [record for path in workdir.rglob('run-*.wandb') for record in wandb_records(path)]:
    if record.HasField('run'):
      runs.add((record.run.project, record.run.display_name, record.run.run_id))
    for item in record.history.item:
      found[item.key or '/'.join(item.nested_key), record.history.step.num] = json.loads(item.value_json)
  assert len(runs) == 1
  for (name, step), value in logged(workdir).items():
    assert found[name, step] == pytest.approx(value), name
  head = params_of(workdir)['head']['kernel']
  assert sum(found['parameters/head/kernel/values', 0]) == head.size
  assert found['train/images/count', 0] == 16
